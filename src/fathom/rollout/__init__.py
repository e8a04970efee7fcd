"""Tasks to trajectories."""
