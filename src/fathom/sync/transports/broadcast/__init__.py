"""Weights by collectives: one sender, all engines of an offer at once, bucket by bucket."""
