"""Roots of supervised fine-tuning and of preference training, beside that of RL."""
