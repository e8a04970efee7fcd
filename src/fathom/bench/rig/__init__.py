"""What workloads are measured on: engine, trainer and publisher, a plain loop, an environment that takes time."""
