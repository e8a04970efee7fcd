"""Engines that Fathom did not start: they pull versions from a chain and report what they serve."""
