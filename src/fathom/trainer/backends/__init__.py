"""How the trainer computes: one module per way, all behind `port.Backend`."""
