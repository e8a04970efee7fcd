"""Workloads that drive whole runs and file their measurements."""
