"""Task folders: made and checked."""
