"""Spreads requests over the engines that serve."""
