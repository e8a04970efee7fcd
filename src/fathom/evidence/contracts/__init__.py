"""What a run promised, examined again."""
