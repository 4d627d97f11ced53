"""Masks on chat templates of public models: each template of a folder with each conversation of ``test_masks.py``.

    python -m tests.data.corpus FOLDER [--page] [--details FILE]

FOLDER holds NAME.jinja files and, where they are known, NAME.json files with ``bos_token`` and ``eos_token``. A
template is run with a byte-level tokenizer made for it, whose added tokens are what looks like a token in the
template's text and in what it renders. For each conversation the ids must be those of ``apply_chat_template``, and each
token that ``oracle.py`` assigns to the model must be trained, and no other; or the row must be refused, with a reason.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.data.chat.render import Renderer
from manyhands.data.chat.template import ChatTemplate, complete_arguments
from manyhands.data.read.formats import Conversation
from manyhands.data.read.messages import RowRefused
from tests.conftest import ROOT

from .families import train_tokenizer
from .oracle import TAG, Verdict, judge, tag
from .test_masks import CONVERSATIONS

DATE = "2026-01-01"
TOKEN = re.compile(
    r"<[|｜][^|｜<>\s{}'\"]{1,50}[|｜]>|<\|[a-z_]{2,20}>|<[a-z_]{2,20}\|>|\[\|[a-z]+\|\]|\]~!?b[\[\]]|\[e~\[|〈\|[A-Z]+\|〉"
    r"|\[/?[A-Z][A-Z_]{1,40}\]|</?_?[a-zA-Z][a-zA-Z0-9_:]{0,30}>|<<?/?SYS>>?"
)
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<end_of_turn>", "<turn|>", "<|end_of_text|>",
    "<|end|>", "<｜end▁of▁sentence｜>", "<|end_of_turn|>", "<|eot|>", "[EOS]",
)  # fmt: skip
WORDS = (
    "Hello there how are you Fine user assistant system 42 43 Bye Hi \n\n Be kind Look it up"
    " get_weather city Paris sunny"
)
RIGHT, REFUSES, OURS, WRONG = "right", "the template refuses", "refused", "wrong"


ROWS, PAGE = ROOT / "benchmarks/results/templates.jsonl", ROOT / "docs/templates.md"
HEAD = """# Chat templates

Which tokens of a conversation are trained, measured on {templates} chat templates of public models and tools, each with
the {conversations} conversations of `tests/data/test_masks.py`. Each ran with a byte-level tokenizer built for it,
whose added tokens are what looks like a token in the template, not with its model's own tokenizer.

A case is *right* if the ids are those of `apply_chat_template` and exactly what the model must write itself is trained
(blanks aside). `tests/data/oracle.py` decides that and shares no code with the masks: it tags every word of a
conversation with its speaker, and infers what surrounds the words from the generation prompt and a second ending.

| cases | {cases} |
|---|---|
| right | {right} |
| the template itself refuses the conversation (roles that do not alternate, no tools) | {refuses} |
| refused by manyhands, for a reason below | {ours} |
| wrong | {wrong} |

{unusable} templates write nothing after an answer, so the model would not learn to stop: they are always refused.
Every template is a row of `benchmarks/results/templates.jsonl`. `python -m tests.data.corpus FOLDER --page` measures
the templates in FOLDER and writes this page; they are other people's files and not part of this repository.

| why rows are refused | templates |
|---|---|
"""


@dataclass
class Report:
    """One template: what became of each conversation, by name: (one of RIGHT, REFUSES, OURS, WRONG; why)."""

    name: str
    cases: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fault: str = ""  # why it cannot be used at all

    def count(self, kind: str) -> int:
        return sum(kind == found for found, _ in self.cases.values())


def make_tokenizer(template: str, bos: str | None, eos: str | None, texts: Sequence[str]) -> Any:
    """A byte-level tokenizer with what looks like a token in ``template`` and in ``texts``, made of it."""
    added = dict.fromkeys(
        [token for token in (bos, eos) if token] + [m for text in (template, *texts) for m in TOKEN.findall(text)]
    )
    tokenizer = train_tokenizer(list(added), WORDS, 330 + len(added), bos, eos, trim_offsets=False)
    tokenizer.chat_template = template
    return tokenizer


def guess_ends(template: str) -> tuple[str, str]:
    """(bos, eos) of a template whose tokenizer is not known."""
    eos = next(
        (end for end in ENDS if end in template),
        "</s>" if "<s>" in template or "[INST]" in template else "<|endoftext|>",
    )
    return ("<|begin_of_text|>" if "<|eot_id|>" in template else "<s>"), (
        "</s>" if "eos_token" in template and "[INST]" in template else eos
    )


def tokenizer_for(
    template: str, tokens: Mapping[str, str | None], conversations: Mapping[str, tuple[list[dict], list | None]]
) -> Any:
    guessed = guess_ends(template)
    bos, eos = tokens.get("bos_token") or guessed[0], tokens.get("eos_token") or guessed[1]
    first = make_tokenizer(template, bos, eos, [])
    texts = render_all(first, conversations)
    return make_tokenizer(template, bos, eos, texts)


def render_all(tokenizer: Any, conversations: Mapping[str, tuple[list[dict], list | None]]) -> list[str]:
    """The texts of all conversations, without and with the generation prompt; "" for what the template refuses."""
    chat = ChatTemplate(tokenizer, complete_arguments({}, DATE))
    return [
        chat.try_render([chat.prepare(message) for message in messages], tools, generation=generation) or ""
        for messages, tools in conversations.values()
        for generation in (False, True)
    ]


def check_template(
    name: str,
    template: str,
    tokens: Mapping[str, str | None],
    conversations: Mapping[str, tuple[list[dict], list | None]],
) -> Report:
    """Every conversation through one template."""
    report = Report(name)
    try:
        tokenizer = tokenizer_for(template, tokens, conversations)
        renderer = Renderer(tokenizer, date=DATE)
        for case, (messages, tools) in conversations.items():
            report.cases[case] = check(tokenizer, renderer, *tag(messages, tools))
        report.notes = renderer.notes()
    except UserError as error:
        report.fault = error.what
    return report


def check(tokenizer: Any, renderer: Renderer, messages: list[dict], tools: list | None) -> tuple[str, str]:
    arguments = complete_arguments({}, DATE)
    chat = ChatTemplate(tokenizer, arguments)

    def show(messages: Sequence[dict], tools: list | None, generation: bool) -> str | None:
        return chat.try_render([chat.prepare(message) for message in messages], tools, generation=generation)

    (rendered,) = renderer.render_many([Conversation(messages, tools)])
    verdict = judge(messages, tools, show, list(tokenizer.get_added_vocab()), tokenizer.eos_token)
    if isinstance(rendered, RowRefused):
        return (REFUSES if verdict is None else OURS), TAG.sub("", str(rendered))
    if verdict is None:
        return WRONG, "the template refuses, but the row was taken"
    own = tokenizer.apply_chat_template(
        chat._as_taken([chat.prepare(message) for message in messages]), tools=tools, return_dict=False, **arguments
    )
    if rendered.ids.tolist() != own:
        return WRONG, "ids differ from apply_chat_template"
    if verdict.hidden:
        return WRONG, f"{len(verdict.hidden)} words of answers or calls are not in the text"
    if verdict.unsure:
        return WRONG, f"oracle: {verdict.unsure}"
    return compare(tokenizer, rendered, verdict)


def compare(tokenizer: Any, rendered: Any, verdict: Verdict) -> tuple[str, str]:
    """The trained tokens against the spans; blanks count on neither side."""
    offsets = tokenizer(verdict.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    text, faults = verdict.text, []
    inside = [False] * len(text)
    for start, end in verdict.spans:
        inside[start:end] = [True] * (end - start)
    open = {place for start, end in verdict.open for place in range(start, end)}
    for (start, end), trained in zip(offsets, rendered.trained.tolist(), strict=True):
        owned = {inside[place] for place in range(start, end) if not text[place].isspace() and place not in open}
        if len(owned) == 1 and owned != {trained}:
            faults.append((start, end, trained))
    if not faults:
        return RIGHT, ""
    untrained = "".join(text[start:end] for start, end, trained in faults if not trained)
    trained = "".join(text[start:end] for start, end, trained in faults if trained)
    return WRONG, " ".join(
        part
        for part in (f"untrained: {untrained!r}" * bool(untrained), f"trained: {trained!r}" * bool(trained))
        if part
    )[:300]


def _check_file(path: Path) -> Report:
    beside = path.with_suffix(".json")
    tokens = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    return check_template(path.stem, path.read_text(encoding="utf-8"), tokens, CONVERSATIONS)


def to_row(report: Report) -> dict[str, Any]:
    """What is kept of a report: the number of cases of each kind, and the reasons without what differs by row."""
    names = {"right": RIGHT, "refuses": REFUSES, "refused": OURS, "wrong": WRONG}
    counts = {name: 0 if report.fault else report.count(kind) for name, kind in names.items()}
    cases = () if report.fault else report.cases.values()
    why = sorted({re.sub(r"message \d+", "message N", why) for kind, why in cases if kind in (OURS, WRONG)})
    return {"template": report.name, **counts, "why": why, "unusable": report.fault}


def write_page(rows: Sequence[Mapping[str, Any]], num_conversations: int) -> str:
    """docs/templates.md."""
    counts = {name: sum(row[name] for row in rows) for name in ("right", "refuses", "refused", "wrong")}
    reasons = Counter(why for row in rows for why in row["why"])
    head = HEAD.format(
        templates=len(rows), conversations=num_conversations, unusable=sum(bool(row["unusable"]) for row in rows),
        cases=sum(counts.values()), ours=counts["refused"], **counts,
    )  # fmt: skip
    wrong = [row["template"] for row in rows if row["wrong"]]
    tail = f"\nWith a wrong case: {', '.join(wrong)}.\n" if wrong else ""
    return head + "".join(f"| {_cell(why)} | {n} |\n" for why, n in reasons.most_common()) + tail


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--details", type=Path)
    asked = parser.parse_args()
    paths = sorted(asked.folder.glob("*.jinja"), key=lambda path: path.stem.lower())
    with ProcessPoolExecutor(2) as pool:
        reports = list(pool.map(_check_file, paths, chunksize=4))
    if asked.details:
        asked.details.write_text(json.dumps([vars(report) for report in reports], indent=1, ensure_ascii=False))
    if asked.page:
        rows = [to_row(report) for report in reports]
        ROWS.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        PAGE.write_text(write_page(rows, len(CONVERSATIONS)), encoding="utf-8")
    total = Counter(kind for report in reports for kind, _ in report.cases.values())
    print(len(reports), dict(total), "unusable:", sum(bool(report.fault) for report in reports), file=sys.stderr)


if __name__ == "__main__":
    main()
