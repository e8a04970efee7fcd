"""Kernels of our own, compiled when they are first used."""
