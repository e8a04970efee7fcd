"""Append-only typed history: write, read, replay."""
