"""Versions that travel, and are served, in another format than the trainer casts to."""
