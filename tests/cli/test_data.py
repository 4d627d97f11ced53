"""``manyhands data`` on a tiny model: the text and the page that a user reads, also of data that a run refuses."""

from __future__ import annotations

import json
import re
import types
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.core.errors import EXIT_FAILED, EXIT_USAGE
from manyhands.importers.load import load_config
from manyhands.preview.collect import collect
from manyhands.preview.contents import Preview, bin_lengths, decode_spans
from manyhands.preview.page import MARK, render_page
from manyhands.preview.text import mark_trained, print_preview
from tests.support.tiny import write_tiny_model

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> [bold]b[/bold] \x1b[2J"


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "80"})


def question(n: int, **more) -> dict:
    return {"question": f"q{n}{'?' * (n % 30)}", "answer": f"a{n}", **more}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def write_run(tmp_path, monkeypatch, model_folder):
    """Writes sources, {file: rows or text}, and a run file over them; the working folder is theirs."""
    monkeypatch.chdir(tmp_path)

    def write(files: dict[str, list | str], train=None, **sections) -> Path:
        for name, rows in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
        data = {"train": train or list(files), "cache": str(tmp_path / "cache"), **sections.pop("data", {})}
        run = {"name": "tiny", "model": {"name": str(model_folder)}, "data": data, "parallel": {"gpus": 1}, **sections}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
        return tmp_path / "run.yaml"

    return write


class Page(HTMLParser):
    """What a browser would see of a page: tags, and text by the element it is in."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text, self.marked = "", ""
        self.feed(html)
        assert not self.open, "every element is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data
            self.marked += data if "mark" in self.open else ""


def test_a_packed_step_is_shown_as_the_plan_lays_it_out(write_run):
    run = write_run(
        {"a.jsonl": [question(n) for n in range(60)]},
        batch={"samples": 8, "micro_tokens": 512},
        data={"max_length": 256},
    )
    shown = call("data", run, "--step", 2)
    assert shown.exit_code == 0, shown.output
    preview = collect(load_config(run, []), step=2, max_samples=None, report=lambda _: None)
    batch = preview.batch
    assert batch and (batch.step, batch.num_step_samples, batch.num_steps) == (2, 8, 7) and batch.num_tokens <= 512
    assert len(preview.rows) == batch.num_samples and sum(row.num_tokens for row in preview.rows) == batch.num_tokens
    assert "Step 2 of 7 trains 8 samples" in shown.stdout
    heads = re.findall(r"sample (\d+) · a · a\.jsonl:(\d+) · (\d+) tokens, (\d+) loss tokens ─", shown.stdout)
    assert len(heads) == batch.num_samples
    for _, line, num_tokens, num_loss_tokens in heads:
        n = int(line) - 1
        assert f"q{n}{'?' * (n % 30)}<|im_end|>\n<|im_start|>assistant\n⟦a{n}<|im_end|>⟧" in shown.stdout
        assert int(num_loss_tokens) == len(f"a{n}") + 1 and int(num_tokens) > int(num_loss_tokens)
    other = collect(load_config(run, []), step=1, max_samples=None, report=lambda _: None)
    assert not {row.number for row in other.rows} & {row.number for row in preview.rows}
    assert call("data", run, "--step", 8).exit_code == EXIT_USAGE


def test_without_packing_the_micro_batch_holds_its_rows(write_run):
    run = write_run(
        {"a.jsonl": [question(n) for n in range(60)]}, batch={"samples": 8, "micro_samples": 2}, data={"packing": False}
    )
    shown = call("data", run)
    assert "This is the first micro-batch: 2 samples (micro-batches of at most 2 samples, not packed)" in " ".join(
        shown.stdout.split()
    )
    assert (
        shown.stdout.count(" loss tokens ─") == 2
        and "not packed" in shown.stdout
        and "padding up to the longest sample" in shown.stdout
    )
    one = call("data", run, "--rows", 1).stdout
    assert one.count(" loss tokens ─") == 1 and "this micro-batch holds 1 more sample:" in one
    assert call("data", run, "--rows", 0).stdout.count(" loss tokens ─") == 0


def test_several_sources_are_counted_and_weighted(write_run):
    run = write_run(
        {
            "a.jsonl": [question(n) for n in range(50)],
            "two/x.jsonl": [question(1)] * 6,
            "two/y.jsonl": "\n" + json.dumps(question(7)) + "\n",
        },
        train=[{"path": "a.jsonl", "weight": 0.5, "max_samples": 20}, {"path": "two", "weight": 2, "name": "pair"}],
        data={"validation_fraction": 0},
    )
    preview = collect(load_config(run, []), max_samples=None, report=lambda _: None)
    by_name = {entry.name: entry for entry in preview.sources}
    assert (by_name["a"].num_samples, by_name["pair"].num_samples) == (20, 7)
    assert [by_name[name].weight * by_name[name].num_samples for name in ("a", "pair")] == [10, 14]
    assert sum(entry.share for entry in preview.sources) == pytest.approx(1)
    assert by_name["pair"].num_loss_tokens == 7 * 3
    shown = " ".join(call("data", run).stdout.split())
    assert re.search(r"a question 20 [\d,]+ [\d,]+ 0 0\.5 \d+ %", shown) and re.search(r"all 27 ", shown)
    assert "left out 30 samples beyond max_samples" in shown and "validation none" in shown and "refused none" in shown
    whole = call("data", run, "batch.samples=24", "--rows", 99).stdout
    assert " · pair · two/y.jsonl:2 · " in whole, "the file of a folder, and the line in it"


def test_weights_of_tokens_are_shown(write_run):
    turns = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "half", "weight": 0.5},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "none", "weight": 0},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "full"},
    ]
    run = write_run({"a.jsonl": [{"messages": turns}] * 40}, data={"validation_fraction": 0})
    shown = call("data", run, "--rows", 1).stdout
    assert "⟦half<|im_end|>⟧×0.5" in shown and "none<|im_end|>\n" in shown and "⟦full<|im_end|>⟧\n" in shown
    assert "their loss counts half" in shown
    page = Page(render_page(collect(load_config(run, []), max_samples=1, report=lambda _: None)))
    assert "half<|im_end|>×0.5" in page.text and "none" not in page.marked and "full<|im_end|>" in page.marked


def test_refused_rows_do_not_hide_the_others(write_run):
    rows = [question(n) for n in range(60)]
    faulty: list = list(rows)
    for n in range(30, 55):
        faulty[n] = {"question": "q", "answer": ""}
    faulty[5] = {"question": "only"}
    faulty[6] = {"question": "q", "answer": "x" * 3000}
    lines = "".join(json.dumps(row) + "\n" for row in rows[:10]) + '{"broken\n[1]\n'
    run = write_run(
        {"good.jsonl": rows, "faulty.jsonl": faulty, "broken.jsonl": lines},
        train=["good.jsonl", "faulty.jsonl", "broken.jsonl", "gone.jsonl"],
    )
    shown = call("data", run)
    assert shown.exit_code == EXIT_FAILED and not isinstance(shown.exception, ValueError)
    refused = shown.stdout.split("Refused: source ")[1:]
    assert [part.split("\n")[0] for part in refused] == ["faulty", "broken", "gone"]
    assert (
        "26 rows cannot be trained" in refused[0]
        and "faulty.jsonl:31: answer is empty (24 more: 32, 33, 34, 35, ...)" in refused[0]
    )
    assert "faulty.jsonl:6: no field answer" in refused[0] and "faulty.jsonl:7: 3," in refused[0]
    assert "broken.jsonl:11: broken JSON" in refused[1] and "broken.jsonl:12: a row must be an object" in refused[1]
    assert "no such data file" in refused[2] and "A run refuses this data: correct 3 sources first" in refused[2]
    assert "cover the valid rows; a file is read up to its first unreadable line" in " ".join(shown.stdout.split())
    assert shown.stdout.count(" loss tokens ─") == 3 and re.search(r"good +question +\d\d", shown.stdout)
    preview = collect(load_config(run, []), report=lambda _: None)
    counts = {entry.name: entry.num_samples + entry.num_validation_samples for entry in preview.sources}
    assert counts == {"good": 60, "faulty": 60 - 27, "broken": 10}
    assert not list(Path("cache").glob("*")) or not list(Path("cache").glob(".unfinished*")), (
        "nothing of it stays in the cache"
    )


def test_where_no_row_is_left_the_faults_are_still_shown(write_run):
    shown = call("data", write_run({"a.jsonl": '{"x": 1}\n'}))
    assert shown.exit_code == EXIT_FAILED and "a.jsonl:1" in shown.stdout and "x" in shown.stdout
    assert "up to the first line" not in shown.stdout
    nothing = call("data", write_run({"a.jsonl": "\n"}))
    assert nothing.exit_code == EXIT_FAILED and "no rows" in nothing.stdout


def test_an_error_that_is_not_the_datas_is_one(write_run):
    run = write_run({"a.jsonl": [question(n) for n in range(40)]})
    Path("file").write_text("")
    shown = call("data", run, "data.cache=file")
    assert shown.exit_code == EXIT_USAGE and "the token cache cannot be written" in shown.stderr
    shown = call("data", run, "task=cpt", "data.max_length=1", "data.too_long=split")
    assert shown.exit_code == EXIT_USAGE and "data.max_length" in shown.stderr and "Refused" not in shown.stdout


def test_without_a_plan_the_rows_stand_alone(write_run, model_folder, tmp_path):
    bare = tmp_path / "bare"  # configuration and tokenizer, no weights
    bare.mkdir()
    for path in model_folder.iterdir():
        if path.suffix != ".safetensors":
            (bare / path.name).write_bytes(path.read_bytes())
    shown = call("data", write_run({"a.jsonl": [question(n) for n in range(40)]}), f"model.name={bare}")
    assert shown.exit_code == 0, shown.output
    assert "cannot be planned on this machine, so samples are shown in the order of the data" in " ".join(
        shown.stdout.split()
    )
    assert (
        "sample 0 · a · a.jsonl:" in shown.stdout
        and "33 more samples: --rows N shows more" in shown.stdout
        and "packing" not in shown.stdout
    )


def test_truncated_and_split_rows_are_counted(write_run):
    run = write_run(
        {"a.jsonl": [{"text": "word " * n} for n in range(1, 60)]},
        task="cpt",
        data={"max_length": 128, "too_long": "split"},
    )
    split = call("data", run).stdout
    assert re.search(r"split +\d+ documents into samples of data\.max_length = 128 tokens", split)
    starts = re.findall(r"^── sample .* loss tokens? ─*\n(.)", split, re.M)
    assert "⟦" in split and starts, split
    assert "⟦" not in starts, "the first token has nothing to be predicted from"
    cut = call("data", run, "data.too_long=truncate").stdout
    assert re.search(r"cut +\d+ samples at data\.max_length = 128 tokens", cut)


def test_hostile_rows_stay_text(write_run):
    run = write_run(
        {
            "a.jsonl": [{"question": HOSTILE, "answer": f"{HOSTILE}{n}"} for n in range(40)],
            "<b>.jsonl": [{"question": HOSTILE}],
        }
    )
    shown = call("data", run, "--rows", 1)
    assert shown.exit_code == EXIT_FAILED and "\x1b" not in shown.stdout and "[bold]b[/bold] \\u001b[2J" in shown.stdout
    assert call("data", run, "--html", "page.html").exit_code == EXIT_FAILED
    html = Path("page.html").read_text()
    page = Page(html)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "link", "iframe", "b"} and not any(
        key.startswith("on") for _, attrs in page.tags for key in attrs
    )
    assert HOSTILE.replace("\x1b", "\\u001b") in page.marked and "\x1b" not in html
    assert "source <b>" in page.text and "<b>.jsonl:1" in page.text


def test_the_page_says_what_the_terminal_says(write_run):
    run = write_run(
        {"a.jsonl": [question(n) for n in range(60)], "b.jsonl": [question(n) for n in range(20)]}, batch={"samples": 8}
    )
    written = call("data", run, "--html", "page.html")
    assert written.exit_code == 0 and written.stdout.startswith("wrote page.html")
    html = Path("page.html").read_text()
    page = Page(html)
    assert MARK in html[:1024] and not re.search(r"https?:|url\(|@import|<script", html)
    assert [tag for tag, _ in page.tags].count("article") == 8 and page.text.count("<|im_end|>") == 16
    assert "Legend: loss tokens" in page.text and "Step 1 of " in page.text and "Samples by source" in page.text
    assert "prefers-color-scheme: dark" in html and "@media print" in html and len(html) < 30_000
    assert ("html", {"lang": "en"}) in page.tags and all(attrs.get("scope") for tag, attrs in page.tags if tag == "th")
    widths = [float(attrs["style"][6:-1]) for tag, attrs in page.tags if "width" in attrs.get("style", "")]
    assert widths and max(widths) == 100


def test_json_has_samples_with_weights_and_what_is_refused(write_run):
    run = write_run({"good.jsonl": [question(n) for n in range(9)], "bad.jsonl": [{"question": 1, "answer": "x"}]})
    shown = call("data", run, "--json", "--rows", 2)
    assert shown.exit_code == EXIT_FAILED
    found = json.loads(shown.stdout)
    trained = ["".join(text for text, weight in sample["spans"] if weight) for sample in found["samples"]]
    assert len(trained) == min(2, found["batch"]["num_samples"]) > 0 and all(text.startswith("a") for text in trained)
    assert found["refused"][0]["errors"] and found["lengths"] and found["batch"]["num_samples"]
    assert call("data", run, "--json", "--html", "x.html").exit_code == EXIT_USAGE


def test_only_a_page_of_ours_is_overwritten(write_run):
    run = write_run({"a.jsonl": [question(n) for n in range(40)]})
    Path("notes.html").write_text("my notes")
    refused = call("data", run, "--html", "notes.html")
    assert (
        refused.exit_code == EXIT_USAGE
        and "not overwritten" in refused.stderr
        and Path("notes.html").read_text() == "my notes"
    )
    assert call("data", run, "--html", "none/page.html").exit_code == EXIT_USAGE
    for _ in range(2):
        assert call("data", run, "--html", "page.html").exit_code == 0


def test_trained_tokens_are_told_apart():
    tokenizer = types.SimpleNamespace(decode=lambda ids, **_: "".join(chr(i) for i in ids))
    ids = np.array([ord(c) for c in "Q:\x1b[2JA!"], dtype=np.int32)
    spans = list(decode_spans(tokenizer, ids, np.array([0] * 6 + [1] + [2.5], dtype=np.float32)))
    assert mark_trained(spans, colored=False).plain == "Q:\\u001b[2J⟦A⟧⟦!⟧×2.5"
    colored = mark_trained(spans, colored=True)
    assert colored.plain == "Q:\\u001b[2JA!×2.5"
    assert [str(span.style) for span in colored.spans] == ["bold green", "bold green", "bold yellow"]


@pytest.mark.parametrize(("no_color", "mark"), [(False, "\x1b[1;32ma1<|im_end|>\x1b[0m"), (True, "⟦a1<|im_end|>⟧")])
def test_a_terminal_with_colour_gets_colour(write_run, no_color, mark):
    run = write_run({"a.jsonl": [question(1)] * 40}, data={"validation_fraction": 0})
    preview = collect(load_config(run, []), max_samples=1, report=lambda _: None)
    console = Console(
        force_terminal=True, no_color=no_color, color_system=None if no_color else "standard", width=80, highlight=False
    )
    with console.capture() as captured:
        print_preview(preview, console)
    assert mark in captured.get()


@pytest.mark.parametrize(
    "lengths", [[2], [7] * 5, [1, 2, 3, 4], [64, 65, 127, 128], [2, 131072], list(range(1, 3000, 7))]
)
def test_the_histogram_holds_every_row_once(lengths):
    array = np.array(lengths, dtype=np.int32)
    bins = bin_lengths(array)
    assert len(bins) <= 18 and sum(entry.num_samples for entry in bins) == len(lengths)
    assert sum(entry.num_tokens for entry in bins) == sum(lengths)
    assert bins[0].first <= min(lengths) and bins[-1].last >= max(lengths)
    assert all(before.last + 1 == after.first for before, after in pairwise(bins))
    for entry in bins:
        assert entry.num_samples == int(((array >= entry.first) & (array <= entry.last)).sum())


def test_everything_fits_a_terminal_of_80_columns(write_run):
    run = write_run(
        {f"a-source-with-a-long-name-{i}.jsonl": [question(20 * i + n) for n in range(20)] for i in range(3)},
        batch={"samples": 8},
    )
    lines = call("data", run, "--rows", 0).stdout.splitlines()
    assert max(map(len, lines)) <= 80 and sum("█" in line for line in lines) > 2


def test_an_empty_preview_can_be_shown():
    assert "Data of x" in Page(render_page(Preview("x", "m", 8))).text
