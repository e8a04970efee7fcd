"""Trajectories of a run, in formats that others read."""
