"""From logits to the distribution a token is drawn from."""
