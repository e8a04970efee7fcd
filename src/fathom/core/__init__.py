"""Nouns and ports that every layer shares. Needs no torch."""
