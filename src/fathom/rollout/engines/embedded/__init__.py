"""The embedded engine: our own model code in a process of its own, spoken to over loopback HTTP."""
