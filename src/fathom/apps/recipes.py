"""Where the recipes are: beside the package when installed, at the top of a checkout."""

from __future__ import annotations

from pathlib import Path

from fathom.core.errors import ConfigError

_PACKAGE = Path(__file__).parent.parent
_PLACES = (_PACKAGE / "recipes", _PACKAGE.parent.parent / "recipes")


def recipe(name: str) -> Path:
    """The TOML file of a recipe. Raises ConfigError with the names there are."""
    for place in _PLACES:
        if (place / f"{name}.toml").is_file():
            return place / f"{name}.toml"
    known = sorted({path.stem for place in _PLACES for path in place.glob("*.toml")})
    raise ConfigError(f"no recipe {name!r}; there are: {', '.join(known) or 'none'}")
