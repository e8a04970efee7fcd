"""Several adapters trained in one run over one base."""
