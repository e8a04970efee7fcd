"""Commands about versions of the weights."""
