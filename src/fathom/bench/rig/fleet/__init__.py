"""Receivers in processes of their own: whom publications are measured with."""
