"""The scripted engine: the whole port in process, for tests of whatever drives an engine."""
