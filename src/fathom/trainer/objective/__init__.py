"""What is optimised: advantages, losses, mismatch correction. Pure functions on flat arrays of the tokens with loss."""
