"""What all pictures share: one look, and the one place that loads matplotlib."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.core.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

BLUE, ORANGE, GREEN, PURPLE, BROWN = "#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#8b6c42"
BLACK, GREY, PALE = "#1a202c", "#a0aec0", "#edf2f7"

_STYLE: dict[RcKeyType, int | bool | str] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#4a5568",
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def require_matplotlib(option: str) -> None:
    """Raise MissingDependencyError, naming the option that asked, when nothing can be drawn here."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(option, "matplotlib", "plot")


@contextmanager
def picture(file: Path, *, option: str, inches: tuple[float, float]) -> Generator[Figure]:
    """A figure to draw on; when the block ends well it is written to an image `file` (.png, .svg, .pdf).

    Args:
        file: where to.
        option: what the user asked by, for the message.
        inches: width and height, at 150 dots each.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the file cannot be written.
    """
    require_matplotlib(option)
    if not file.suffix:  # matplotlib would add one, and the picture would be elsewhere
        raise ConfigError(f"{option} {file} does not say what kind of picture; end it with .png, .svg or .pdf")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=inches, dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        try:
            figure.savefig(file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the picture cannot be written to {file}: {error}") from None
