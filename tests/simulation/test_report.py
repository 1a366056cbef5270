"""The page says what the result says, and shows it in a real browser."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.simulation.report import render_report, write_report
from megatron_fssdp.simulation.report.figures import heat_maps, slow_iterations
from megatron_fssdp.simulation.report.timeline import MOST_SHAPES, close_up, timeline
from megatron_fssdp.simulation.report.words import gigabytes, seconds, summary
from tests import chromium
from tests.simulation.results import make_events, make_result


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "new folder" / "report.html"
    write_report(make_result(), path)
    return path


def test_the_summary_comes_first_and_in_words() -> None:
    sentences = summary(make_result())
    assert sentences[0] == (
        "FSSDP makes an iteration 1.76 times as fast as EP: 1.02 s instead of 1.80 s, mean of 12."
    )
    assert "computes 2.50 times the mean tokens (worst 2.50); as it ran, 1.01" in sentences[1]
    assert sentences[2] == "That takes 6 replicas and 250 MB of copies an iteration."
    assert "waits 100.0 ms of an iteration for communication" in sentences[3]
    assert "peaks at 25.1 GB, 7.5 GB less than with EP" in sentences[4]
    assert "LAER-MoE, with 1.30 s" in sentences[5]


def test_the_summary_says_when_it_does_not_pay() -> None:
    ep, _, fssdp = make_result().systems
    slower = replace(fssdp, iteration_s=2 * ep.iteration_s)
    (first, *_) = summary(replace(make_result(), systems=(ep, slower)))
    assert "does not pay here" in first
    assert "Keep --moe-parallel ep" in first
    same = replace(fssdp, iteration_s=ep.iteration_s * 1.001)
    (first, *_) = summary(replace(make_result(), systems=(ep, same)))
    assert "makes no difference here" in first


def test_the_page_is_whole_and_alone(page: Path) -> None:
    text = page.read_text()
    assert "<script" not in text
    # No address but names of XML's own namespaces, which nobody loads.
    assert set(re.findall(r'https?://[^"]+', text)) <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink",
        "http://www.w3.org/1999/xhtml",
    }  # fmt: skip
    assert "a &lt;model&gt; &amp; more on h100_dgx" in text
    assert "FSSDP (this project) is &lt;made up&gt; &amp; simple" in text
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    labels = re.findall(r'<svg[^>]*role="img" aria-label="([^"]+)"', text)
    # Time, memory, stragglers, slow iterations, heat maps, two timelines and close-ups; all twice.
    assert len(labels) == 18
    assert any("up to 2.11" in label for label in labels)
    assert text.count("As a table") == 9
    # Figures take the page's colors.
    assert "#010203" not in text
    assert "currentColor" in text


def test_a_result_of_one_system_without_extras() -> None:
    """What nobody knows is left out: a training run knows no parts, memory or timeline."""
    ep = make_result().systems[0]
    bare = replace(ep, parts_s={}, memory_bytes={}, timelines={}, notes=())
    text = render_report(replace(make_result(), source="measured", systems=(bare,), notes=()))
    assert text.count("<figure>") == 3
    assert "An iteration took 1.80 s, mean of 12." in text
    assert "Memory" not in text
    assert ">Systems<" not in text


def test_slow_iterations_are_listed_with_their_reasons() -> None:
    fssdp = make_result().systems[2]
    time_s, factor, moved = (
        fssdp.iteration_s.copy(),
        fssdp.straggler_IL.copy(),
        fssdp.moved_I.copy(),
    )
    time_s[[7, 4]], factor[7, 2], moved[4] = (3.0, 2.0), 1.9, 8
    slow = replace(fssdp, iteration_s=time_s, straggler_IL=factor, moved_I=moved)
    picture = slow_iterations(make_result(), slow)
    assert picture is not None
    assert picture.table[1] == ("7", "3.00 s", "1.90", "100.0 ms", "0")
    assert picture.table[2] == ("4", "2.00 s", "1.01", "100.0 ms", "8")
    assert len(picture.table) == 6


def test_sizes_of_a_large_job_stay_bounded() -> None:
    """1000 ranks x 60 layers and a long timeline: dots instead of shapes."""
    result = make_result()
    big_LR = np.random.default_rng(0).random((60, 1000))
    fssdp = replace(result.systems[2], loads_LR=big_LR, timelines={0: make_events(3, 200)})
    assert len(make_events(3, 200)) > MOST_SHAPES
    big = replace(result, owner_loads_LR=big_LR, layers=np.arange(60))
    for picture in (timeline(fssdp), heat_maps(big, fssdp)):
        assert picture is not None
        assert "<image" in picture.wide
        assert len(picture.wide) < 600_000


def test_a_timeline_shows_ranks_of_one_stage() -> None:
    """The fullest rank, and the others of its pipeline stage: layers of theirs in the close-up."""
    first = make_events(3, 4)
    second = tuple(
        replace(event, rank=event.rank + 3, layer=event.layer + 4, start_s=event.start_s + 1)
        for event in make_events(2, 4)
        if event.layer is not None
    )
    # On the second stage rank 4 is the fullest of all.
    second = tuple(
        replace(event, duration_s=0.04) if (event.rank, event.name) == (4, "experts") else event
        for event in second
    )
    system = replace(make_result().systems[0], timelines={0: first + second})
    whole, near = timeline(system), close_up(system)
    assert whole is not None
    assert near is not None
    assert whole.table[0] == near.table[0] == ("milliseconds", "rank 4", "rank 3")
    assert near.title == "Close-up: MoE layers 6 and 7, forward, ep"
    experts = next(row for row in near.table if row[0] == "experts")
    assert experts == ("experts", "80.00", "20.00")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(RuntimeError, match=r"needs jinja2: pip install 'megatron-fssdp\[report\]'"):
        render_report(make_result())


def test_words() -> None:
    assert [seconds(value) for value in (12.345, 0.0123, 4e-5, 0)] == [
        "12.35 s", "12.3 ms", "40 us", "0.0 ms",
    ]  # fmt: skip
    assert [gigabytes(value) for value in (4.56e10, 7e8)] == ["45.6 GB", "700 MB"]


@pytest.mark.skipif(chromium.PROGRAM is None, reason="no chromium: apt-get install chromium")
def test_in_a_browser(page: Path) -> None:
    """Console, network, figures and width, on a desk and on a phone, light and dark."""
    with chromium.Browser() as browser:
        for width, scheme in ((1280, "light"), (390, "light"), (390, "dark")):
            browser.open(page, width, 900, scheme)
            assert browser.evaluate("document.documentElement.scrollWidth") == width
            drawn = browser.evaluate(
                "[...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect())"
                ".filter(r => r.width > 0).map(r => [r.left, r.right, r.height])"
            )
            assert len(drawn) == 9
            for left, right, height in drawn:
                assert 0 <= left < right <= width
                assert height > 100
            # Text in figures is text, and large enough to read.
            sizes = browser.evaluate(
                "[...document.querySelectorAll('figure svg text')]"
                ".map(t => t.getBoundingClientRect().height).filter(h => h > 0)"
            )
            assert len(sizes) > 50
            assert min(sizes) >= 9
            images = browser.evaluate(
                "[...document.querySelectorAll('figure image')].every(i => i.href.baseVal"
                ".startsWith('data:'))"
            )
            assert images
            # What is cut off would be text that ends outside of its figure.
            outside = browser.evaluate(
                "[...document.querySelectorAll('figure svg text')].filter(t => {"
                "const r = t.getBoundingClientRect(),"
                " f = t.closest('svg').getBoundingClientRect();"
                "return r.width > 0 && (r.left < f.left - 1 || r.right > f.right + 1"
                " || r.top < f.top - 1 || r.bottom > f.bottom + 1)})"
                ".map(t => t.textContent)"
            )
            assert outside == []
        ink = browser.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
        assert ink == "rgb(228, 231, 236)", "dark pages have light text in figures"
        assert browser.problems == []
        loaded = [url for url in browser.requests if not url.startswith("data:")]
        assert loaded == [page.as_uri()] * 3
