"""Several processes that train one model: each computes its share of every micro-batch."""
