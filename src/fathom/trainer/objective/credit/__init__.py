"""Who deserves what: token rewards, returns, advantages and value losses. All sums are in float64."""
