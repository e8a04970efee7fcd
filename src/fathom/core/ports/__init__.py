"""Ports: what a component promises to the others. State and implementation live elsewhere."""
