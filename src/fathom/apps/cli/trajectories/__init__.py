"""`fathom trajectories`."""
