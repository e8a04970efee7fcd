"""TRL in an environment of its own, asked through one script."""
