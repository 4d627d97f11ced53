"""The oracle of the corpus over the committed templates, and that it sees masks that are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from manyhands.data.chat.render import Renderer
from manyhands.data.chat.template import ChatTemplate, complete_arguments
from manyhands.data.read.formats import Conversation

from .corpus import (
    OURS,
    PAGE,
    REFUSES,
    RIGHT,
    ROWS,
    WRONG,
    check_template,
    compare,
    judge,
    tag,
    to_row,
    tokenizer_for,
    write_page,
)
from .families import FAMILIES, TEMPLATES
from .test_masks import CONVERSATIONS, DATE, EXPECTED, HIDDEN

HERE = {"bos_token": "<s>", "eos_token": None}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_agrees_with_the_masks_written_by_hand(family: str) -> None:
    report = check_template(
        family, (TEMPLATES / f"{family}.jinja").read_text(), vars(FAMILIES[family]) | HERE, CONVERSATIONS
    )
    expected = {
        name: OURS if masks == HIDDEN else REFUSES if isinstance(masks, str) else RIGHT
        for name, masks in EXPECTED[family].items()
    }
    assert {name: kind for name, (kind, _) in report.cases.items()} == expected, report.cases


@pytest.mark.parametrize("fault", ["one token more", "one token less", "others' words", "no end"])
@pytest.mark.parametrize("family", ["chatml", "qwen3", "mistral3", "glm4"])
def test_a_wrong_mask_is_seen(family: str, fault: str) -> None:
    template = (TEMPLATES / f"{family}.jinja").read_text()
    tokenizer = tokenizer_for(template, HERE, CONVERSATIONS)
    messages, tools = tag(*CONVERSATIONS["several"])
    (rendered,) = Renderer(tokenizer, date=DATE).render_many([Conversation(messages, tools)])
    verdict = judge(messages, tools, rendering(tokenizer), list(tokenizer.get_added_vocab()), tokenizer.eos_token)
    assert verdict is not None and not isinstance(rendered, Exception)
    assert compare(tokenizer, rendered, verdict) == (RIGHT, "")
    trained = rendered.trained.copy()
    first = trained.argmax()
    behind = first + (~trained[first:]).argmax()
    visible = next(place for place in range(first - 1, 0, -1) if tokenizer.decode(rendered.ids[place]).strip())
    spots = {"one token more": visible, "one token less": first + 2, "others' words": 1, "no end": behind - 1}
    trained[spots[fault]] = not trained[spots[fault]]
    assert compare(tokenizer, replace(rendered, trained=trained), verdict)[0] == WRONG


def rendering(tokenizer: Any) -> Any:
    template = ChatTemplate(tokenizer, complete_arguments({}, DATE))

    def show(messages: Any, tools: Any, generation: bool) -> str | None:
        return template.try_render([template.prepare(message) for message in messages], tools, generation=generation)

    return show


def test_the_page_counts_cases_and_templates_by_reason() -> None:
    chosen = {name: CONVERSATIONS[name] for name in ("single", "two answers", "tools")}
    rows = [
        to_row(check_template(name, (TEMPLATES / f"{name}.jinja").read_text(), HERE, chosen))
        for name in ("gemma3", "chatml")
    ]
    silent = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    rows.append(to_row(check_template("nothing", silent, HERE, chosen)))
    assert [(row["right"], row["refuses"], row["refused"]) for row in rows] == [(1, 2, 0), (2, 0, 1), (0, 0, 0)]
    assert "writes nothing after an assistant turn" in rows[2]["unusable"]
    page = write_page(rows, len(chosen))
    assert "| cases | 6 |" in page and page.count("does not show the tool call") == 1
    assert "measured on 3 chat templates" in page and "1 templates write nothing" in page


def test_the_page_is_what_its_rows_make_of_it() -> None:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    assert PAGE.read_text(encoding="utf-8") == write_page(rows, 17), "of the 17 conversations when it was measured"
