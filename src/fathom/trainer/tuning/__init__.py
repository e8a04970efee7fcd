"""Training on what others wrote: demonstrations to imitate, pairs of answers to tell apart."""
