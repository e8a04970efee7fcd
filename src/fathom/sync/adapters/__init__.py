"""Adapters between trainer and engines: which base each is for."""
