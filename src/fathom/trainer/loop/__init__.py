"""Batches through a backend, step by step."""
