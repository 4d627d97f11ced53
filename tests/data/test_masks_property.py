"""Any conversation through any template: ids are the tokenizer's own and exactly the assistant's words are trained, or
the row is refused.

Assistants speak Cyrillic and all others Greek, so that a word tells whose it is whatever the template makes of it. Set
MANYHANDS_EXAMPLES for more examples than the few of every day.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from manyhands.data.chat.render import Renderer
from manyhands.data.chat.template import ChatTemplate, complete_arguments
from manyhands.data.read.formats import Conversation
from manyhands.data.read.messages import RowRefused

from .families import FAMILIES, family_tokenizer

DATE = "2026-01-01"
_CALLS: list[dict[str, Any]] = [
    {"id": name, "type": "function", "function": {"name": "look", "arguments": {"x": text}}}
    for name, text in (("abcdefghi", "б"), ("bcdefghij", "д"))
]
CALLS_FIRST = Conversation([{"role": "assistant", "content": "", "tool_calls": _CALLS}], None)
EXAMPLES = int(os.environ.get("MANYHANDS_EXAMPLES", "150"))
GREEK, CYRILLIC = "αβγδ", "бгдж"
MARKERS = sorted({token for family in FAMILIES.values() for token in (*family.special, *family.plain)})
BETWEEN = [
    " ",
    "\n",
    "\n\n",
    "  ",
    "",
    "{",
    '"',
    "\\",
    "é",
    "🙂",
    "\ue000",
    "\ue001",
    "<think>",
    "</think>",
    "assistant",
    "<|im_",
]


def words(alphabet: str) -> st.SearchStrategy[str]:
    piece = st.one_of(st.text(alphabet, min_size=1, max_size=3), st.sampled_from(BETWEEN), st.sampled_from(MARKERS))
    return st.lists(piece, max_size=5).map("".join)


def calls() -> st.SearchStrategy[list[dict]]:
    arguments = st.dictionaries(st.sampled_from(["x", "y"]), words(CYRILLIC) | st.integers(0, 9), max_size=2)
    name = st.sampled_from(["look", "бг", "look_up"])
    ids = st.sampled_from(["abcdefghi", "abcdefghj", "short"])
    one = st.builds(
        lambda n, a, i: {"id": i, "type": "function", "function": {"name": n, "arguments": a}}, name, arguments, ids
    )
    return st.lists(one, min_size=1, max_size=2)


def optional(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries({}, optional=keys)


def messages() -> st.SearchStrategy[dict]:
    others = st.builds(
        lambda r, c: {"role": r, "content": c},
        st.sampled_from(["system", "user", "user", "user", "developer"]),
        words(GREEK),
    )
    results = st.builds(lambda c: {"role": "tool", "content": c, "tool_call_id": "abcdefghi"}, words(GREEK))
    answers = st.builds(
        lambda c, m: {"role": "assistant", "content": c, **m},
        words(CYRILLIC),
        optional(reasoning_content=words(CYRILLIC), weight=st.just(1.0)),
    )
    calling = st.builds(
        lambda c, t, m: {"role": "assistant", "content": c, "tool_calls": t, **m},
        words(CYRILLIC) | st.none(),
        calls(),
        optional(reasoning_content=words(CYRILLIC)),
    )
    return st.one_of(others, answers, others, answers, calling, results)


def conversations() -> st.SearchStrategy[Conversation]:
    tools = st.none() | st.just(
        [{"type": "function", "function": {"name": "look", "description": "αβγ", "parameters": {}}}]
    )
    alternating = st.lists(st.tuples(words(GREEK), words(CYRILLIC)), min_size=1, max_size=3).map(
        lambda pairs: [
            m for q, a in pairs for m in ({"role": "user", "content": q}, {"role": "assistant", "content": a})
        ]
    )
    return st.builds(Conversation, st.lists(messages(), max_size=6) | alternating, tools)


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.sampled_from(sorted(FAMILIES)), conversations(), st.booleans())
@example("glm4", CALLS_FIRST, False)  # no prompt before the calls, and no token closes them
def test_the_assistants_words_are_trained_and_no_others(
    family: str, conversation: Conversation, trim_offsets: bool
) -> None:
    tokenizer = family_tokenizer(family, trim_offsets)
    (rendered,) = Renderer(tokenizer, date=DATE).render_many([conversation])
    if isinstance(rendered, RowRefused):
        assert str(rendered)
        return
    arguments = complete_arguments({}, DATE)
    template = ChatTemplate(tokenizer, arguments)
    prepared = [template.prepare(message) for message in conversation.messages]
    assert rendered.ids.tolist() == tokenizer.apply_chat_template(
        prepared, tools=conversation.tools, return_dict=False, **arguments
    )
    trained = tokenizer.decode(rendered.ids[rendered.trained].tolist(), clean_up_tokenization_spaces=False)
    untrained = tokenizer.decode(rendered.ids[~rendered.trained].tolist(), clean_up_tokenization_spaces=False)
    assert not set(GREEK) & set(trained), "others' words are trained"
    assert not set(CYRILLIC) & set(untrained), "the assistant's words are not trained"


@settings(
    max_examples=EXAMPLES // 3, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(conversations() | st.text(), max_size=5),
    st.sampled_from(["last", "all"]),
)
def test_rows_keep_their_places_and_trained_ones_are_never_empty(
    family: str, rows: list[Conversation | str], train_on: Any
) -> None:
    renderer = Renderer(family_tokenizer(family), train_on=train_on, date=DATE)
    together = renderer.render_many(rows)
    assert len(together) == len(rows)
    for row, result in zip(rows, together, strict=True):
        (alone,) = renderer.render_many([row])
        assert type(alone) is type(result)
        if not isinstance(result, RowRefused):
            assert result.ids.tolist() == alone.ids.tolist() and result.trained.tolist() == alone.trained.tolist()
            assert result.trained[1:].any() and len(result.ids) == len(result.trained)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(
        st.lists(st.sampled_from([*MARKERS, " ", "\n", "é", "🙂"]) | st.text(max_size=4)).map("".join), max_size=4
    ),
    st.booleans(),
)
@example("deepseek1", ["<｜begin▁of▁sentence｜>", "<｜begin▁of▁sentence｜>a"], True)
def test_texts_keep_the_ids_of_the_tokenizer(family: str, texts: list[str], adds_bos: bool) -> None:
    tokenizer = family_tokenizer(family, adds_bos=adds_bos)
    for text, row in zip(texts, Renderer(tokenizer, date=DATE).render_many(texts), strict=True):
        ids = tokenizer(text, verbose=False)["input_ids"]
        if ids[:2] == [tokenizer.bos_token_id] * 2:  # the text has one already: the tokenizer's own is left out
            ids = ids[1:]
        if isinstance(row, RowRefused):
            assert len(ids) < 2
        else:
            assert row.ids.tolist() == (ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id])
            assert row.trained.all() and row.num_straddling == 0
