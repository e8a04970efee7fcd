"""One forward for both users, engine and trainer."""
