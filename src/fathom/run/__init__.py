"""Wires one run and drives its loops."""
