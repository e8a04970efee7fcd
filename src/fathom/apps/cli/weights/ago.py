"""How long ago something was, for people."""

from __future__ import annotations

_UNITS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))


def ago(seconds: float) -> str:
    """In the largest unit of which at least two have passed.

    >>> ago(59.4), ago(7200.0)
    ('59 s ago', '2 h ago')
    """
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
