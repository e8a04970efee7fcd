"""What people touch. No logic of its own."""
