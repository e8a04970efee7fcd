"""The engines of a run, and the versions that reach them."""
