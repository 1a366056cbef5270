# SPDX-License-Identifier: Apache-2.0

"""Print the benchmarks' rows."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def show(
    console: Console,
    title: str,
    rows: list[Row],
    sections: tuple[str, ...] = (),
    places: int = 3,
) -> None:
    """Print a table; what is not one value is for the JSON file.

    Args:
        console: where to.
        title: of the table.
        rows: columns by name, the same in every row.
        sections: columns whose change starts a new section.
        places: decimals of a number.
    """
    table = Table(title=title, pad_edge=False)
    names = [name for name, value in rows[0].items() if not isinstance(value, dict)]
    for name in names:
        is_text = isinstance(rows[-1][name], str)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    group = None
    for row in rows:
        this = [row[name] for name in sections]
        if group not in (None, this):
            table.add_section()
        group = this
        table.add_row(*(_text(row[name], places) for name in names))
    console.print(table)


def _text(value: Any, places: int) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.{places}f}" if isinstance(value, float) else str(value)
