"""Holds finished groups and hands them out under the staleness bound."""
