"""Moves a version of the weights: stage, verify, commit."""
