"""Stands in for the package `verifiers`, so that its process is tried where that is not installed."""
