"""Engines: adapters of the engine port, one folder each, and the suite that all of them pass."""
