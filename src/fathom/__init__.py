"""Fathom: asynchronous reinforcement learning for language models, with every token accounted for."""
