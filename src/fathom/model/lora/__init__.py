"""Adapters: a trained update of low rank beside frozen weights."""
