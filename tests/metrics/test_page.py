"""report.html: complete by itself, nothing of the data is markup, and charts show what they were given."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from manyhands.metrics.page import Line, format_tick, line_chart
from manyhands.metrics.report import write_report
from manyhands.training.types import TrainState
from tests.metrics.test_report import CONFIG, MEASURED, make_plan, write_metrics

HOSTILE = '<script>alert(1)</script><img src="http://example.org/x.png">'


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def page_of(folder, **changes) -> str:
    state = TrainState(step=4, samples=32, tokens=500, loss_tokens=200, elapsed_s=14.0, stop_reason="all 4 steps done")
    write_report(folder, make_plan(), CONFIG, state, MEASURED | changes)
    return (folder / "report.html").read_text()


def test_the_page_needs_nothing_else_and_shows_what_the_report_holds(tmp_path):
    write_metrics(tmp_path)
    page, found = page_of(tmp_path), Tags()
    found.feed(page)
    assert not {"script", "link", "img", "iframe"} & set(found.tags) and found.links == []
    for shown in (
        "1.50 GiB",
        "3.1000 → 0.9000",
        "75.00%",
        "120 tensors equal",
        "activations 0.50 GiB",
        "weights 1.00 GiB",
    ):
        assert shown in page
    assert page.count("<svg") == 3, "loss, norm, rate; no speed"
    assert page.count('class="bar"') == 1 + 2, "memory as planned and of two ranks; no seconds"
    assert page.count("<circle") == 2, "a dot an evaluation"


def test_text_of_data_and_model_is_no_markup(tmp_path):
    evaluations = [{"step": 4, "loss": 0.9, "perplexity": 2.46, "accuracy": 0.75, "samples": [(HOSTILE, HOSTILE)]}]
    found = Tags()
    page = page_of(tmp_path, evaluations=evaluations, verified={"adapter": HOSTILE})
    found.feed(page)
    assert not {"script", "img"} & set(found.tags) and found.links == []
    assert page.count("&lt;script&gt;") >= 3


def test_a_page_of_a_run_that_measured_nothing(tmp_path):
    page = page_of(
        tmp_path, evaluations=[], losses=[], seconds_by_step=[], tokens_by_step=[], peak_bytes_by_rank=[], verified={}
    )
    assert "nan" not in page and "Training" not in re.findall(r"<h2>(.*?)</h2>", page)


def test_a_line_keeps_its_order_its_gaps_and_its_range():
    svg = line_chart("loss", [Line("a", [(1, 4.0), (2, 2.0), (3, None), (4, 1.0), (5, 0.0)])])
    pieces = [
        [tuple(map(float, p.split(","))) for p in points.split()] for points in re.findall(r'points="(.*?)"', svg)
    ]
    assert [len(piece) for piece in pieces] == [2, 2], "a gap where there is no value"
    (x1, top), (x2, _) = pieces[0]
    (_, _), (x5, bottom) = pieces[1]
    assert x1 < x2 < x5 and top < bottom, "larger values lie higher"
    assert (x2 - x1) * 4 == pytest.approx(x5 - x1, abs=0.5)
    assert line_chart("one", [Line("a", [(1, 4.0)])]) == line_chart("none", [Line("a", [(1, None), (2, None)])]) == ""
    assert "<polyline" in line_chart("flat", [Line("a", [(1, 2.0), (2, 2.0)])])


def test_numbers_are_as_short_as_they_can_be():
    assert [format_tick(x) for x in (0.0, 12000.0, 0.25, 3e-5, 1.0)] == ["0", "12,000", "0.25", "3e-05", "1"]
