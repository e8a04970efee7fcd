"""Commands about chat templates."""
