"""Prompts of a JSONL file as tokens: rows with ``prompt`` or ``messages``, rendered by the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from manyhands.config.sources import IMAGES
from manyhands.core.errors import UserError
from manyhands.core.files import parse_json
from manyhands.data.chat.template import ChatTemplate
from manyhands.data.read.columns import carries
from manyhands.data.read.files import Findings
from manyhands.data.read.messages import ImagesRefused, Reading, RowRefused, check_messages
from manyhands.data.read.text_files import is_encodable
from manyhands.data.store.streams import StoredImage
from manyhands.data.tokenize.tokenizer import encode_text
from manyhands.infer.images import PromptImages, has_images, refuse_images

NO_FIELDS: Mapping[str, Any] = {}
TEXT_ALONE = "the prompt has images, and text alone is read: by this model, or by serve and vLLM with any model"


@dataclass(frozen=True)
class PromptTokens:
    """``number`` counts from 0 and seeds a sampled answer. ``images`` are prepared where they are used."""

    number: int
    ids: tuple[int, ...]
    images: tuple[StoredImage, ...] = ()


@dataclass(frozen=True)
class PromptOptions:
    """What is added to each row that has none of its own: a system prompt, tools as the chat template takes them."""

    system: str | None = None
    tools: tuple[Any, ...] = ()

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> PromptOptions:
        return PromptOptions(values.get("system"), tuple(values.get("tools") or ()))


NOTHING_ADDED = PromptOptions()


def encode_prompt(
    tokenizer: Any,
    chat_template_kwargs: Mapping[str, Any],
    messages: Sequence[dict[str, Any]],
    tools: list[Any] | None = None,
    finish: Callable[[str], str] = str,
) -> list[int]:
    """The tokens of a conversation up to the answer; without a chat template those of its only message's text.
    ``finish`` changes what the template has written.

    UserError for an empty prompt, and for more than one message or tools without a template; RowRefused for what the
    template refuses.
    """
    if tokenizer.chat_template:
        template = ChatTemplate(tokenizer, chat_template_kwargs)
        text = template.render([template.prepare(message) for message in messages], tools or None, generation=True)
        _check_characters(text)
        ids = tokenizer.encode(finish(text), add_special_tokens=False)  # the template writes its own
    elif len(messages) == 1 and not tools:
        _check_characters(messages[0]["content"])
        ids = encode_text(tokenizer, messages[0]["content"])
    else:
        raise UserError(
            "the model has no chat template",
            why="a conversation of several messages, a system prompt and tools are rendered by one",
            fix="give single prompts, or a model with a chat_template",
        )
    if not ids:
        raise UserError("the prompt is empty", fix="give --prompt some text")
    return ids


def _check_characters(text: str) -> None:
    """RowRefused for what JSON can name and tokenizers do not take, and for bytes of an input that is no UTF-8."""
    if not is_encodable(text):
        if re.search("[\udc80-\udcff]", text):  # what Python makes of each such byte
            raise RowRefused("the prompt is not UTF-8 text: convert it first, such as by iconv -f latin1 -t utf-8")
        raise RowRefused("the prompt holds half of a surrogate pair: not a character")


def prompt_of(
    number: int,
    tokenizer: Any,
    chat_template_kwargs: Mapping[str, Any],
    messages: Sequence[dict[str, Any]],
    tools: list[Any] | None = None,
    *,
    images: PromptImages | None = None,
    row: Mapping[str, Any] = NO_FIELDS,
    folder: Path = Path(),
) -> PromptTokens:
    """A conversation as a prompt with images of its parts and of ``row``'s columns. Raises as ``encode_prompt``."""
    if images is None:
        if has_images(messages):
            raise refuse_images()
        if any(carries(row.get(name)) for name in IMAGES):
            raise RowRefused(TEXT_ALONE)
        return PromptTokens(number, tuple(encode_prompt(tokenizer, chat_template_kwargs, messages, tools)))
    messages, opened = images.open(messages, row, folder)
    finish = partial(images.put, images=opened)
    ids = encode_prompt(tokenizer, chat_template_kwargs, messages, tools, finish)
    images.check_placeholders(ids, opened)
    return PromptTokens(number, tuple(ids), tuple(image.stored for image in opened))


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of each line that is not blank. UserError for what is not a JSON object."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = parse_json(line)
                except ValueError as error:
                    raise UserError(
                        "the line is not JSON", where=f"{file}:{number}", why=str(error), fix=_EXAMPLE
                    ) from None
                if not isinstance(row, dict):
                    raise UserError("the line is not a JSON object", where=f"{file}:{number}", fix=_EXAMPLE)
                yield number, row
    except OSError as error:
        raise UserError("the prompts cannot be read", where=str(file), why=error.strerror or str(error)) from None


_EXAMPLE = 'write lines like {"prompt": "Why is the sky blue?"} or {"messages": [{"role": "user", "content": "..."}]}'


def messages_of(
    row: Mapping[str, Any], options: PromptOptions, *, images: bool = False
) -> tuple[list[dict[str, Any]], list[Any]]:
    """The conversation to answer and its tools. An assistant's turn at the end is left out: it is what is asked for.
    ``images``: parts of a content may be images.

    Raises RowRefused.
    """
    given = [key for key in ("prompt", "messages") if row.get(key) is not None]
    if len(given) != 1:
        named = " and ".join(given) if given else f"neither prompt nor messages (it has {', '.join(row) or 'nothing'})"
        raise RowRefused(f"the row has {named}")
    if {"answer", "reference"} <= row.keys():
        raise RowRefused("the row has answer and reference; an answer of its own would be written as reference")
    value = row[given[0]]
    if isinstance(value, str):
        if not value.strip():
            raise RowRefused("the prompt is empty")
        messages: list[dict[str, Any]] = [{"role": "user", "content": value}]
    else:
        messages = read_messages(value, given[0], images=images)
    while len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    has_turn, field = messages[0]["role"] in ("system", "developer"), row.get("system")
    if not isinstance(field, str | None):
        raise RowRefused(f"system must be a string, this is {type(field).__name__}")
    if field and has_turn:
        raise RowRefused("two system prompts: the field system and the first turn")
    system = field or options.system
    if system is not None and not has_turn:
        messages = [{"role": "system", "content": system}, *messages]
    tools = row.get("tools") or list(options.tools)
    if isinstance(tools, str):
        tools = parse_json(tools)
    if not isinstance(tools, list):
        raise RowRefused("tools must be a list of functions")
    return messages, tools


def read_messages(value: Any, where: str, *, images: bool) -> list[dict[str, Any]]:
    """A conversation as checked messages; ``images``: parts of a content may be images. Raises RowRefused."""
    try:
        return check_messages(value, where, {}, Reading(images))
    except ImagesRefused:  # which speaks of training
        raise RowRefused(TEXT_ALONE) from None


def encode_rows(
    file: Path,
    tokenizer: Any,
    chat_template_kwargs: Mapping[str, Any],
    options: PromptOptions,
    max_tokens: int | None = None,
    images: PromptImages | None = None,
) -> list[PromptTokens]:
    """All prompts of a file, in its order. UserError names unanswerable rows and those above ``max_tokens``."""
    prompts: list[PromptTokens] = []
    findings = Findings()
    for line, row in read_rows(file):
        try:
            messages, tools = messages_of(row, options, images=images is not None)
            given = (len(prompts), tokenizer, chat_template_kwargs, messages, tools)
            prompt = prompt_of(*given, images=images, row=row, folder=file.parent)
            if max_tokens is not None and len(prompt.ids) > max_tokens:
                raise RowRefused(
                    f"{len(prompt.ids):,} tokens, and the model has room for {max_tokens:,} before the answer"
                )
        except (RowRefused, ValueError) as refused:
            findings.add(str(file), line, str(refused))
            continue
        prompts.append(prompt)
    what = f"{findings.count:,} of {findings.count + len(prompts):,} prompts cannot be answered"
    if (error := findings.make_error(what, where=str(file), fix=_EXAMPLE)) is not None:
        raise error
    if not prompts:
        raise UserError("the file has no prompts", where=str(file), fix=_EXAMPLE)
    return prompts
