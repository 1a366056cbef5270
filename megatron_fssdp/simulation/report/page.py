# SPDX-License-Identifier: Apache-2.0

"""Fill the page's template: `page.html.j2`."""

from __future__ import annotations

from pathlib import Path

from megatron_fssdp.simulation.report import words
from megatron_fssdp.simulation.result import Result
from megatron_fssdp.version import __version__


def write_report(result: Result, path: str | Path) -> None:
    """Write a result as one HTML file: no script, nothing that a browser would have to load.

    Raises:
        RuntimeError: matplotlib or jinja2 is not installed.
        OSError: the file cannot be written.
    """
    text = render_report(result)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def render_report(result: Result) -> str:
    """Return the page's text. See `write_report`."""
    try:
        # Not at the top: they are needed for pages alone, and matplotlib takes a second.
        import jinja2

        from megatron_fssdp.simulation.report import figures, timeline
    except ImportError as error:
        raise RuntimeError(
            f"the HTML report needs {error.name}: pip install 'megatron-fssdp[report]'"
        ) from None
    subject = words.subject(result)
    # Of more systems the table and the bars tell enough.
    watched = [system for system in result.systems if system.name == "ep" or system is subject]
    pictures = [
        figures.time_by_system(result),
        figures.memory_by_system(result),
        figures.stragglers(result),
        figures.slow_iterations(result, subject),
        figures.heat_maps(result, subject),
        *(timeline.timeline(system) for system in watched),
        *(timeline.close_up(system) for system in watched),
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    head, rows = words.systems_table(result)
    return environment.get_template("page.html.j2").render(
        result=result,
        name="FSSDP" if subject.name == "fssdp" else subject.title,
        layout=" x ".join(f"{key} {size}" for key, size in result.layout.items()),
        summary=words.summary(result),
        cards=words.cards(result),
        head=head,
        rows=rows,
        pictures=[picture for picture in pictures if picture is not None],
        version=__version__,
    )
