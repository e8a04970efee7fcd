"""Sampled ids to an answer, while they arrive: what is said, what is thought, which tools are called."""
