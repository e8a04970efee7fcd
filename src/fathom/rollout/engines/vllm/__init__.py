"""vLLM behind the engine port: a server in an environment of its own, started here or attached by URL."""
