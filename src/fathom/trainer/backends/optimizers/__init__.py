"""How masters follow their gradient: one module per kind, all behind `port.Optimizer`."""
