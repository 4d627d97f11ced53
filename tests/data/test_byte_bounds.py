"""Masks from the ids alone are those from the tokenizer's offsets, or the ids say that they do not tell."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import accumulate, chain, combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.data.bounds import ByteBounds, make_byte_bounds
from manyhands.data.formats import Conversation
from manyhands.data.messages import RowRefused, check_messages
from manyhands.data.render import MAX_UNTOLD, Rendered, Renderer, Text, TrainOn, _attempt
from manyhands.data.tokenizer import widen_cache

from .families import FAMILIES, family_tokenizer
from .test_masks import CONVERSATIONS, EXPECTED
from .test_masks_property import EXAMPLES, MARKERS, conversations

DATE = "2026-01-01"
PIECES = [
    *MARKERS,
    "Ġ",
    " ",
    "  ",
    "\n",
    "\t",
    "\u00a0",
    "\u3000",
    "e\u0301",
    "\u0301\u0323",
    "\u0958",
    "\u212b",
    "é",
    "한",
    "ᄒ",
    "🙂",
    "你好",
    "\x00",
    "<0xC3>",
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12).map("".join)
RELAXED = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def components(**parts: Any) -> Any:
    """The tokenizer of the chatml fixture with other parts, as tokenizer.json describes them; ``model`` and ``added``
    change these.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    described = json.loads(family_tokenizer("chatml").backend_tokenizer.to_str())
    described["model"].update(parts.pop("model", {}))
    for left, right in [
        ("Ċ", "Ġ"),
        ("©", "a"),
        ("a", "Ã"),
    ]:  # a blank at the end of a token, and tokens of two characters' bytes
        described["model"]["vocab"].setdefault(left + right, 2000 + len(described["model"]["vocab"]))
        described["model"]["merges"].append([left, right])
    for token in parts.pop("lacks", ()):
        described["model"]["vocab"].pop(token)
        described["model"]["merges"] = [pair for pair in described["model"]["merges"] if token not in "".join(pair)]
    described["added_tokens"] += parts.pop("more", [])
    for token in described["added_tokens"]:
        token.update(parts.get("added", {}))
    parts.pop("added", None)
    backend = Tokenizer.from_str(json.dumps({**described, **parts}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = family_tokenizer("chatml").chat_template
    return tokenizer


def by_bytes(**more: Any) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True, **more}


def sequence(name: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(parts)}


PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
DIGITS = {"type": "Digits", "individual_digits": True}
LINES = {"type": "Split", "pattern": {"Regex": r" ?[^\s\p{L}\p{N}]+[\r\n ]*"}, "behavior": "Isolated", "invert": False}
KINDS: dict[str, dict[str, Any]] = {
    "no post-processor": {"post_processor": None},
    "trims": {"post_processor": by_bytes()},
    "trims all but the first": {"post_processor": by_bytes(add_prefix_space=True)},
    "composes": {"normalizer": {"type": "NFC"}, "post_processor": None},
    "composes and trims": {"normalizer": sequence("normalizers", {"type": "NFC"}), "post_processor": by_bytes()},
    "splits, and trims behind words": {
        "pre_tokenizer": sequence("pretokenizers", LINES, DIGITS, by_bytes(use_regex=False)),
        "post_processor": by_bytes(),
    },
    "added tokens swallow blanks": {"added": {"lstrip": True, "rstrip": True}, "post_processor": None},
    "added tokens of single words": {"added": {"single_word": True}, "post_processor": None},
    "lacks bytes": {
        "model": {"unk_token": "<|endoftext|>", "fuse_unk": True},
        "lacks": ["Ã", "Ł", "č"],
        "post_processor": None,
    },
    "lacks bytes, each unknown": {
        "model": {"unk_token": "<|endoftext|>", "fuse_unk": False},
        "lacks": ["Ã"],
        "post_processor": None,
    },
    "lacks bytes and drops them": {"lacks": ["Ã", "Ł"], "post_processor": None},
    "added tokens begin or end with blanks": {
        "more": [
            {"id": 3000 + n, "content": text, "special": True, **PLAIN} for n, text in enumerate(["a\n", "\n\n", "ĠĠ"])
        ],
        "post_processor": by_bytes(),
    },
    "added tokens are text": {"added": {"special": False, "normalized": True}, "post_processor": None},
}
UNTOLD: dict[str, dict[str, Any]] = {
    "removes": {"pre_tokenizer": sequence("pretokenizers", {**LINES, "behavior": "Removed"}, by_bytes())},
    "adds a blank": {"pre_tokenizer": by_bytes(add_prefix_space=True)},
    "no bytes": {"pre_tokenizer": DIGITS},
    "lower case": {"normalizer": {"type": "Lowercase"}},
    "marks the end of words": {"model": {"end_of_word_suffix": "e"}},
    "trims by another rule": {
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": ["a", 1],
            "cls": ["a", 1],
            "trim_offsets": True,
            "add_prefix_space": False,
        }
    },
}


@cache
def tokenizer_of(kind: str) -> Any:
    return components(
        **{name: (dict(value) if isinstance(value, dict) else value) for name, value in (KINDS | UNTOLD)[kind].items()}
    )


def by_offsets(tokenizer: Any, **arguments: Any) -> Renderer:
    """A renderer that never asks the ids."""
    renderer = Renderer(tokenizer, date=DATE, **arguments)
    renderer._bounds = None
    return renderer


def assert_equal(found: Rendered | RowRefused, expected: Rendered | RowRefused) -> None:
    if isinstance(expected, RowRefused) or isinstance(found, RowRefused):
        assert str(found) == str(expected)
        return
    assert found.ids.tolist() == expected.ids.tolist() and found.ids.dtype == expected.ids.dtype
    assert found.trained.tolist() == expected.trained.tolist() and found.trained.dtype == expected.trained.dtype
    assert (found.weights is None) == (expected.weights is None)
    assert found.weights is None or (
        found.weights.tolist() == expected.weights.tolist() and found.weights.dtype == expected.weights.dtype
    )
    assert found.num_straddling == expected.num_straddling


@st.composite
def spanned(draw: st.DrawFn) -> Text:
    """A text with spans anywhere in it, empty ones too, though templates would put them elsewhere."""
    text = draw(TEXTS)
    borders = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    spans = tuple(zip(borders[::2], borders[1::2], strict=False))
    weights = tuple(
        draw(st.lists(st.sampled_from([0.0, 1.0, 1.0, 0.5, 3.0]), min_size=len(spans), max_size=len(spans)))
    )
    return Text(text, spans, weights, draw(st.sampled_from([0.0, 0.0, 1.0, 2.0])))


@pytest.mark.parametrize("kind", KINDS)
def test_spans_anywhere_cover_the_tokens_that_offsets_say(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    renderer, slow = Renderer(tokenizer, date=DATE), by_offsets(tokenizer)
    assert renderer._bounds is not None
    told = []

    @RELAXED
    @given(spanned())
    def check(text: Text) -> None:
        by_ids = renderer._mask({0: text}, renderer._mask_by_ids, special=False, offsets=False)[0]
        if by_ids is not None:
            assert_equal(by_ids, slow._mask_chats({0: text})[0])
        told.append(by_ids is not None)

    check()
    assert sum(told) > len(told) / 10


@pytest.mark.parametrize("kind", KINDS)
def test_every_span_of_every_short_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    renderer, slow = Renderer(tokenizer, date=DATE), by_offsets(tokenizer)
    num_told = 0
    for pieces in chain.from_iterable(
        product([" ", "\n", "a", "é", "<|im_end|>"], repeat=length) for length in range(1, 5)
    ):
        text, borders = "".join(pieces), [0, *accumulate(map(len, pieces))]
        (by_ids,) = renderer._encode([text], special=False, offsets=False)
        (encoding,) = slow._encode([text], special=False, offsets=True)
        for span in combinations_with_replacement(borders, 2):
            row = Text(text, (span,), (2.0,), 1.0)
            found = _attempt(renderer._mask_by_ids, row, by_ids)
            if found is not None:
                assert_equal(found, _attempt(slow._mask_by_offsets, row, encoding))
                num_told += 1
    assert num_told > 100


@RELAXED
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(conversations(), max_size=4),
    st.booleans(),
    st.sampled_from(["assistant", "last", "all"]),
    st.sampled_from([1.0, 0.5]),
)
def test_conversations_of_every_template(
    family: str, rows: list[Conversation], trim: bool, train_on: TrainOn, weight: float
) -> None:
    tokenizer = family_tokenizer(family, trim)
    rows = [replace(row, weight=weight) for row in rows]
    found = Renderer(tokenizer, date=DATE, train_on=train_on).render_many(rows)
    for one, other in zip(found, by_offsets(tokenizer, train_on=train_on).render_many(rows), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fixtures_are_told_by_their_ids(family: str) -> None:
    """Offsets are asked for none of the rows: what is compared above is not the same way twice."""
    renderer = Renderer(family_tokenizer(family), date=DATE)
    renderer._mask_by_offsets = None  # type: ignore[method-assign, assignment]
    names = [name for name, expected in EXPECTED[family].items() if not isinstance(expected, str)]
    assert all(
        isinstance(row, Rendered)
        for row in renderer.render_many([Conversation(*CONVERSATIONS[name]) for name in names])
    )


@pytest.mark.parametrize("kind", UNTOLD)
def test_tokenizers_whose_ids_do_not_tell(kind: str) -> None:
    assert make_byte_bounds(tokenizer_of(kind)) is None


def test_texts_whose_ids_do_not_tell() -> None:
    def tells(kind: str, text: str) -> bool:
        tokenizer = tokenizer_of(kind)
        bounds, ids = make_byte_bounds(tokenizer), tokenizer.encode(text, add_special_tokens=False)
        assert isinstance(bounds, ByteBounds)
        return bounds.cover(np.array(ids, dtype=np.int32), text, [(0, len(text))]) is not None

    assert tells("composes", "é 한") and not tells("composes", "e\u0301") and not tells("composes", "\u0301\u0323")
    assert tells("added tokens swallow blanks", "a<|im_end|>b") and not tells(
        "added tokens swallow blanks", "a <|im_end|>b"
    )
    assert (
        tells("lacks bytes", "plain")
        and not tells("lacks bytes", "é")
        and not tells("lacks bytes", "plain<|endoftext|>")
    )
    assert not tells("lacks bytes and drops them", "é") and not tells("trims", "")


def test_a_tokenizer_whose_ids_hardly_ever_tell_is_not_asked_for_long() -> None:
    tokenizer = tokenizer_of("lacks bytes")
    rows = [Conversation([{"role": "user", "content": "é"}, {"role": "assistant", "content": "Hi"}])] * (MAX_UNTOLD + 1)
    renderer = Renderer(tokenizer, date=DATE)
    first = renderer.render_many(rows)
    assert renderer._bounds is None
    for one, other in zip(
        [*first, *renderer.render_many(rows)], by_offsets(tokenizer).render_many(rows) * 2, strict=True
    ):
        assert_equal(one, other)


@RELAXED
@given(st.sampled_from(sorted(FAMILIES)), st.lists(TEXTS, min_size=1, max_size=4), st.booleans())
def test_texts_keep_their_ids_without_offsets(family: str, texts: list[str], adds_bos: bool) -> None:
    tokenizer = family_tokenizer(family, adds_bos=adds_bos)
    for text, row in zip(texts, Renderer(tokenizer, date=DATE).render_many(texts), strict=True):
        ids = tokenizer(text, verbose=False)["input_ids"]
        if isinstance(row, RowRefused):
            assert len(ids) < 2
        else:
            assert row.ids.tolist() == (ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id])
            assert row.trained.all() and row.num_straddling == 0


def test_a_wider_cache_keeps_the_ids() -> None:
    text = " ".join(f"word{number} Hello" for number in range(200))
    tokenizer = components(post_processor=None)
    before = tokenizer.encode(text)
    widen_cache(tokenizer)
    assert [tokenizer.encode(text) for _ in range(2)] == [before, before]


@given(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "from"]),
        st.sampled_from([None, "user", "function", "Hi", 1, ["user"]]),
    )
)
def test_messages_of_role_and_content_alone_are_checked_as_all_others_are(message: dict[str, Any]) -> None:
    def check(given: dict[str, Any]) -> Any:
        return _attempt(check_messages, [given], "messages", {})

    expected, found = check({**message, "key": "value"}), check(message)
    if isinstance(expected, RowRefused):
        assert str(found) == str(expected)
    else:
        assert found == [{key: value for key, value in expected[0].items() if key != "key"}]
