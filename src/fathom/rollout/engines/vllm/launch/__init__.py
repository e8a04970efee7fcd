"""From nothing to a server that was asked what it can do."""
