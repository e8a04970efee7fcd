"""What a run did, in numbers and pictures."""
