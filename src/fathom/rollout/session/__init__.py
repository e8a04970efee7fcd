"""Sessions: an agent talks to a base URL; what the engine was sent and what it sampled stays, token by token."""
