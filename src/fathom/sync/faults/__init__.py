"""Ways to fail that ship with the package: scripted faults, and receivers and transports that do wrong."""
