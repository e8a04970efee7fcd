"""Conversations: messages to token ids by a model's own template, and sampled ids to messages."""
