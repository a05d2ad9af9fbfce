"""Plots, as PNG and SVG. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policies.errors import CountersignError

FORMATS = ("png", "svg")
_METADATA: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}}


def new(width: float, height: float) -> Any:
    """An empty figure, inches. Raises CountersignError where matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CountersignError(
            "the plots need matplotlib: install this project with its extra `bench`, or give --no-plots"
        ) from error
    # The same numbers give the same bytes.
    matplotlib.rcParams["svg.hashsalt"] = "countersign"
    return Figure(figsize=(width, height))


def save(folder: Path, name: str, figure: Any) -> str:
    """Write it as PNG and SVG; returns its name."""
    figure.tight_layout()
    for kind in FORMATS:
        figure.savefig(folder / f"{name}.{kind}", dpi=110, metadata=_METADATA[kind], bbox_inches="tight")
    return name
