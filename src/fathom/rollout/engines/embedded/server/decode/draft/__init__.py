"""Drafts: guesses of the next tokens, which the model's own forward then confirms or not."""
