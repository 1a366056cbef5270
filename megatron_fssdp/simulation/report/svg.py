# SPDX-License-Identifier: Apache-2.0

"""Matplotlib figures as SVG for a page: its fonts and its colors, light or dark, no ids twice."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

# Stand for the page's own colors, which change between light and dark.
INK, GRID = "#010203", "#040506"
_PAGE_COLORS = {INK: "currentColor", GRID: "var(--grid)"}

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fssdp",
    "font.family": "sans-serif",
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}

# Pixels on the page: the column of text, half of it, and a phone's.
WIDE, HALF, NARROW = 1040, 500, 340

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Picture:
    """A figure for wide and for narrow screens.

    Attributes:
        title: above it.
        alt: what it shows, in words, for those who do not see it.
        wide, narrow: SVG elements.
        caption: below it.
        is_half: two of them fit beside each other.
        table: header and rows of what is drawn; empty: the page has it elsewhere.
    """

    title: str
    alt: str
    wide: str
    narrow: str
    caption: str = ""
    is_half: bool = False
    table: tuple[tuple[str, ...], ...] = ()


def draw(
    paint: Callable[[Figure, bool], None], width: int, heights: tuple[int, int], alt: str
) -> tuple[str, str]:
    """Draw a figure twice.

    Args:
        paint: fills a figure; told whether it is narrow.
        width: of the wide one, in pixels.
        heights: of the wide and the narrow one.
        alt: see `Picture`.

    Returns:
        the wide and the narrow SVG element.
    """
    wide = _draw(paint, (width, heights[0]), False, alt)
    return wide, _draw(paint, (NARROW, heights[1]), True, alt)


def _draw(
    paint: Callable[[Figure, bool], None], size: tuple[int, int], narrow: bool, alt: str
) -> str:
    with rc_context(_STYLE):
        # A point of matplotlib is a pixel of the page.
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72, layout="constrained")
        paint(figure, narrow)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, dpi=144)
    return embed(buffer.getvalue(), f"f{next(_numbers)}-", alt)


def embed(svg: str, prefix: str, alt: str) -> str:
    """Make a file's text an element of a page.

    Args:
        svg: the file's text.
        prefix: of its ids, which must differ from other figures'.
        alt: its description.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.S)
    svg = re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{prefix}", svg)
    for stand_in, color in _PAGE_COLORS.items():
        svg = svg.replace(stand_in, color)
    # Black is matplotlib's default for text that has no color of its own.
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    alt = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'{head} role="img" aria-label="{alt}">{rest}'
