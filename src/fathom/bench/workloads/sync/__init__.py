"""Publications: how fast, how long generation stands still for them, and when sending only what changed pays."""
