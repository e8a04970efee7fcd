"""Which transport to use, and what a publication would cost with each: sums over bytes, layouts and rates."""
