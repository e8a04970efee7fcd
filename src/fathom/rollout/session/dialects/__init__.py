"""The APIs that agents speak. Each reads a body into a `TurnCall`, and writes what is heard as that API does."""
