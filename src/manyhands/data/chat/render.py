"""From conversations and texts to token ids and what is trained of them. Knows no files and no policy on length.

The ids are the tokenizer's own: those of ``apply_chat_template`` for a conversation, those of ``tokenizer(text)`` for a
text. Only the mask and the weights are ours; they come from the spans that ``spans.py`` finds.
"""

from __future__ import annotations

import copy
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Literal

import numpy as np

from manyhands.config.text import nearest_name
from manyhands.core.errors import UserError, panics_as_errors
from manyhands.data.chat.spans import Span, SpanFinder
from manyhands.data.chat.template import ChatTemplate, attempt, complete_arguments
from manyhands.data.chat.turn_ends import PROMPT, compile_any
from manyhands.data.read.formats import Conversation, Ready, ReadyTokens
from manyhands.data.read.messages import (
    MAX_WEIGHT,
    Message,
    RowRefused,
    find_keys,
    hides_thinking,
    visible,
    weight_of,
    without_key,
)
from manyhands.data.read.text_files import walk
from manyhands.data.tokenize.tokenizer import without_doubled

TrainOn = Literal["assistant", "last", "all"]
PLAIN_WRAPPER = "transformers.tokenization_utils_tokenizers"  # whose _encode_plus adds nothing to the backend's ids
DEFAULT_DATE = "2026-01-01"
ACROSS_THE_END = "a token spans the end of an assistant turn: loss tokens are ambiguous for this row"
NO_CALLS = (
    "the chat template does not support tool calls: leave out samples with tool calls, or use a "
    "model.chat_template that shows them"
)
PROMPT_ALONE = "of a prompt with a completion nothing is trained"
WEIGHTED_ALONE = {
    "assistant": "only assistant turns are trained",
    "last": "data.train_on: last trains the last answer alone",
    "all": "with data.train_on: all every message has weight 1",
}
MAX_ARGUMENTS = 256  # of the template, by row, that are remembered
MAX_KEYS = 100  # below the top level that are named; more of them are values under names of their own


@dataclass(frozen=True)
class Rendered:
    """One row of T tokens: ``ids`` int32 (T), ``trained`` bool (T), ``weights`` float32 (T).

    ``weights`` are 0 where nothing is trained, and None where every trained token weighs 1. ``num_straddling`` counts
    tokens that lie across the border of a trained span (untrained in conversations).
    """

    ids: np.ndarray
    trained: np.ndarray
    weights: np.ndarray | None = None
    num_straddling: int = 0


@dataclass(frozen=True)
class Text:
    """A row as text; ``spans`` of characters and the weight of each; ``rest`` is the weight of everything else but the
    spans ``images``, which are never trained."""

    text: str
    spans: tuple[Span, ...]
    weights: tuple[float, ...]
    rest: float = 0.0
    images: tuple[Span, ...] = ()


def put_images(text: Text, placeholder: str, images: Sequence[str]) -> Text:
    """The text with ``images[i]`` in place of its i-th ``placeholder``. Raises RowRefused where there are not as many
    of them."""
    parts = text.text.split(placeholder)
    if len(parts) != len(images) + 1:
        raise RowRefused(
            f"the chat template writes {len(parts) - 1} placeholders ({placeholder}) for {len(images)} images: it "
            "leaves some out, or the row's text holds the placeholder itself"
        )
    if not images:
        return text
    ends = list(accumulate(len(part) + len(placeholder) for part in parts[:-1]))  # of each placeholder
    grown = [0, *accumulate(len(image) - len(placeholder) for image in images)]

    def move(place: int) -> int:
        return place + grown[bisect_right(ends, place)]

    spans = tuple((move(start), move(end)) for start, end in text.spans)
    shown = tuple((move(end) - len(image), move(end)) for end, image in zip(ends, images, strict=True))
    joined = "".join(piece for pair in zip(parts, [*images, ""], strict=True) for piece in pair)
    return Text(joined, spans, text.weights, text.rest, shown)


def finish(ids: np.ndarray, weights: np.ndarray, num_straddling: int) -> Rendered:
    """``weights`` float32, or bool where all are 0 or 1. Raises RowRefused where no token is trained; the first one has
    nothing to be predicted from."""
    trained = weights if weights.dtype == np.bool_ else weights > 0
    if not trained[1:].any():
        raise RowRefused("no loss token")
    return Rendered(
        ids, trained, None if weights is trained or (weights[trained] == 1).all() else weights, num_straddling
    )


def widen(encoding: Any) -> tuple[np.ndarray, np.ndarray]:
    """(starts, ends) of tokens in characters, where a blank that belongs to no token belongs to the next one.

    Byte-level tokenizers with ``trim_offsets`` leave the blanks of `` word`` out of the offsets, and give a token of
    blanks alone the empty offset behind them: taken as they are, blanks before a span would count as inside it.
    """
    offsets = np.fromiter(chain.from_iterable(encoding.offsets), dtype=np.int64).reshape(-1, 2)
    starts, ends = offsets[:, 0], offsets[:, 1]
    if len(ends) == 0:
        return starts, ends
    reached = np.maximum.accumulate(ends)
    return np.minimum(starts, np.concatenate([[0], reached[:-1]])), ends


def render(conversation: Conversation | str, tokenizer: Any, **arguments: Any) -> Rendered:
    """One conversation or text; ``arguments`` as of ``Renderer``. RowRefused gives the reason it cannot be masked."""
    rendered = Renderer(tokenizer, **arguments).render_many([conversation])[0]
    if isinstance(rendered, RowRefused):
        raise rendered
    return rendered


class Renderer:
    """Renders and masks rows with one tokenizer.

    ``plain_prompts`` renders a user and an assistant turn as prompt + completion + eos where the tokenizer has no chat
    template. ``chat_template_kwargs`` are handed to the template, and ``date`` where it asks for today's.

    ``train_on``: the tokens of every ``assistant`` turn, of the ``last`` one, or ``all`` tokens. A turn's key
    ``weight`` (or ``train``: weight 1 or 0) multiplies its tokens' loss, and the conversation's weight all of them.

    ``placeholder``: what the template writes for an image, in a run with images; ids are then those of the processor,
    which adds the tokenizer's own special tokens where the template does not begin with one.

    Raises UserError where the tokenizer cannot give character offsets, and for template arguments that are not to be
    given.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        plain_prompts: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        train_on: TrainOn = "assistant",
        date: str = DEFAULT_DATE,
        placeholder: str | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                "the tokenizer has no character offsets",
                why=f"{type(tokenizer).__name__} is not backed by tokenizer.json, and masks are made from offsets",
                fix="use a model folder with a tokenizer.json",
            )
        self.tokenizer = tokenizer
        self.plain_prompts = plain_prompts and not tokenizer.chat_template
        self._train_on, self._placeholder = train_on, placeholder
        added = tokenizer.added_tokens_decoder.values()
        self._arguments, self._date = dict(chat_template_kwargs or {}), date
        self._template = ChatTemplate(tokenizer, complete_arguments(self._arguments, date))
        self._unread_arguments: set[str] = set()
        if misspelt := self._find_misspelt(self._template, self._arguments):
            raise UserError(
                "the chat template does not read an argument",
                where="data.chat_template_kwargs",
                why=misspelt,
                fix="correct or remove it",
            )
        self._finder = SpanFinder(self._template, [token.content for token in added], tokenizer.eos_token)
        question = self._template.try_render([PROMPT]) or "" if tokenizer.chat_template else ""
        self._special = compile_any([token.content for token in added if token.special or token.content in question])
        self._spelled: set[str] = set()  # special tokens in contents
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._is_plain = type(tokenizer)._encode_plus.__module__ == PLAIN_WRAPPER
        self._left_out: set[str] = set()
        self._unread: set[str] = set()  # keys below the top level
        self._seen_keys: set[tuple[str, str]] = (
            set()
        )  # of messages, calls and tools: it is known whether they are shown
        self._by_arguments: dict[str, Renderer] = {}

    def render_many(self, contents: Sequence[Conversation | str | Ready]) -> list[Rendered | RowRefused]:
        """One result for each content, in order; rows that cannot be masked come back as the reason."""
        chats: dict[int, Conversation] = {}
        plain: dict[int, Text | RowRefused] = {}
        results: dict[int, Rendered | RowRefused] = {}
        for index, content in enumerate(contents):
            if isinstance(content, Conversation):
                self._unread |= content.unread
            if isinstance(content, Ready):
                results[index] = attempt(self._take_ready, content)
            elif isinstance(content, str):
                plain[index] = Text(content, (), (), rest=1.0)
            elif self.plain_prompts:
                plain[index] = attempt(self._join_prompt, content)
            else:
                chats[index] = content
        rendered: dict[int, Text | RowRefused] = {}
        for renderer, indexes in self._group(chats):
            if isinstance(renderer, RowRefused):
                rendered |= dict.fromkeys(indexes, renderer)
            else:
                rendered |= zip(indexes, renderer._apply_template([chats[index] for index in indexes]), strict=True)
        bos = self.tokenizer.bos_token
        bare = {  # those that do not begin with the begin-of-text token: a processor adds special tokens to them
            index
            for index, text in rendered.items()
            if self._placeholder is not None
            and isinstance(text, Text)
            and (bos is None or not text.text.startswith(bos))
        }
        for special in (True, False):
            group = {index: text for index, text in rendered.items() if (index in bare) == special}
            results |= self._mask(group, self._mask_chat, special=special)
        results |= self._mask(plain, self._mask_plain, special=True, offsets=self.plain_prompts)
        return [results[index] for index in range(len(contents))]

    def _group(self, chats: Mapping[int, Conversation]) -> list[tuple[Renderer | RowRefused, list[int]]]:
        """Rows by what the template is given: the run's arguments, or with those of the row in their place."""
        groups: dict[str, list[int]] = {}
        for index, conversation in chats.items():
            own = json.dumps(conversation.arguments, sort_keys=True, default=str) if conversation.arguments else ""
            groups.setdefault(own, []).append(index)
        return [
            (self._with_arguments(own, chats[indexes[0]].arguments or {}) if own else self, indexes)
            for own, indexes in groups.items()
        ]

    def _find_misspelt(self, template: ChatTemplate, arguments: Mapping[str, Any]) -> str:
        """An argument that the template does not read, and which is nearly one that it reads; "" where there is none.
        Others are remembered: rows and runs may be of several models.
        """
        for name in template.find_unread(arguments):
            near = nearest_name(name, template.find_arguments())
            if near is not None:
                return f"the template reads no {name}: did you mean {near}?"
            self._unread_arguments.add(name)
        return ""

    def _with_arguments(self, key: str, arguments: Mapping[str, Any]) -> Renderer | RowRefused:
        """This renderer with arguments of single rows; the newest ``MAX_ARGUMENTS`` are kept."""
        renderer = self._by_arguments.pop(key, None)
        if renderer is None:
            try:
                complete = complete_arguments({**self._arguments, **arguments}, self._date)
            except UserError as error:
                return RowRefused(f"chat_template_kwargs of the row cannot be used: {'; '.join(error.details)}")
            if misspelt := self._find_misspelt(self._template, arguments):
                return RowRefused(f"chat_template_kwargs of the row: {misspelt}")
            renderer = copy.copy(self)
            renderer._template = ChatTemplate(self.tokenizer, complete)
            renderer._finder = self._finder.with_template(renderer._template)
        self._by_arguments[key] = renderer
        if len(self._by_arguments) > MAX_ARGUMENTS:
            del self._by_arguments[next(iter(self._by_arguments))]
        return renderer

    def has_markers(self, content: Conversation | str) -> bool:
        """Whether what people wrote in a row spells special tokens, or others that the template ends turns with, which
        the tokenizer will take for the tokens themselves: a message may become several. They are remembered.
        """
        if self._special is None:
            return False
        whole = content if isinstance(content, str) else [content.messages, content.tools]
        found = {token for text in walk(whole) if isinstance(text, str) for token in self._special.findall(text)}
        self._spelled |= found
        return bool(found)

    def notes(self) -> list[str]:
        """What a user should know about the template, once rows were rendered."""
        return [
            *self._finder.notes(),
            *(f"the chat template leaves out {what}: it is not part of the samples" for what in sorted(self._left_out)),
            *(f"the chat template does not read the argument {name}" for name in sorted(self._unread_arguments)),
            *(
                f"contents spell the special token {token}, which the tokenizer takes for the token itself"
                for token in sorted(self._spelled)[:MAX_KEYS]
            ),
            *(f"a key that is not read: {what}" for what in sorted(self._unread)[:MAX_KEYS]),
        ]

    def _apply_template(self, conversations: Sequence[Conversation]) -> list[Text | RowRefused]:
        """Text and spans of each; those without tools are rendered in one call."""
        seen = [
            [self._template.prepare(message) for message in conversation.messages] for conversation in conversations
        ]
        together = [
            index
            for index, conversation in enumerate(conversations)
            if not conversation.tools and conversation.messages
        ]
        texts = dict(zip(together, self._template.render_many([seen[index] for index in together]), strict=True))
        return [
            attempt(self._locate, conversation, messages, texts.get(index))
            for index, (conversation, messages) in enumerate(zip(conversations, seen, strict=True))
        ]

    def _locate(self, conversation: Conversation, messages: Sequence[Message], text: str | RowRefused | None) -> Text:
        """The row (or its rendered ``text``) as text with weighted spans and images. Raises RowRefused."""
        try:
            if isinstance(text, RowRefused):
                raise text
            if text is None:
                text = self._template.render(messages, conversation.tools or None)
        except RowRefused as refused:
            if any(message.get("tool_calls") for message in messages) and not self._template.shows_calls:
                raise RowRefused(f"{NO_CALLS} ({refused})") from refused
            raise
        self._note_left_out(messages, conversation.tools, text)
        for of, key in find_keys(messages, conversation.tools) - self._seen_keys:
            self._seen_keys.add((of, key))
            bare, bare_tools = without_key(messages, conversation.tools, of, key)
            if self._template.try_render(bare, bare_tools or None) == text:
                self._unread.add(f"{key} of {of}")
        weights = self._weigh_turns(conversation)
        rest = conversation.weight if self._train_on == "all" else 0.0
        turns = [turn for turn, weight in weights.items() if weight != rest]
        spans = self._finder.find(messages, conversation.tools or None, text, turns) if turns else ()
        located = Text(text, spans, tuple(weights[turn] for turn in turns), rest)
        if self._placeholder is None:
            return located
        return put_images(located, self._placeholder, [image.text for image in conversation.images])

    def _note_left_out(self, messages: Sequence[Message], tools: list[Any] | None, text: str) -> None:
        """Remembers what a row carries that its text does not show. A template may rewrite a content."""
        for message in messages:
            content, role = message.get("content"), message["role"]
            if not isinstance(content, str) or content.strip() in text:
                continue
            if role in ("system", "developer", "tool") and self._template.leaves_out(role):
                self._left_out.add(f"messages of the role {role}")
            elif role == "assistant" and message.get("tool_calls") and visible(message) not in text:
                self._left_out.add("text beside a tool call")
        if hides_thinking(messages, text):
            self._left_out.add("the thinking of answers")
        if tools and not any(
            str(tool.get("function", tool).get("name")) in text for tool in tools if isinstance(tool, dict)
        ):
            self._left_out.add("the definitions of tools")

    def _weigh_turns(self, conversation: Conversation) -> dict[int, float]:
        """The weight of each assistant turn by its place. Raises RowRefused for weights without effect."""
        turns = [turn for turn, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if self._train_on != "all":
            turns = [turn for turn in turns if turn >= conversation.num_prompt]
        chosen = turns[-1:] if self._train_on == "last" else turns
        if not turns and self._train_on != "all":
            raise RowRefused("no assistant message: this row has no loss tokens")
        for turn, message in enumerate(conversation.messages):
            if turn in chosen or ("weight" not in message and "train" not in message):
                continue
            weight, default = weight_of(message), 1.0 if self._train_on == "all" or turn in turns else 0.0
            if weight != default and (weight or self._train_on == "all"):
                whole = PROMPT_ALONE if turn < conversation.num_prompt else WEIGHTED_ALONE[self._train_on]
                raise RowRefused(f"message {turn + 1} ({message['role']}) has weight {weight:g}, but {whole}")
        weights = {
            turn: conversation.weight * weight_of(conversation.messages[turn]) if turn in chosen else 0.0
            for turn in turns
        }
        if max([conversation.weight, *weights.values()]) > MAX_WEIGHT:
            raise RowRefused(f"a weight is larger than {MAX_WEIGHT:.3g}")
        return weights

    def _join_prompt(self, conversation: Conversation) -> Text:
        messages = conversation.messages
        if [message["role"] for message in messages] != ["user", "assistant"]:
            raise RowRefused(
                "without a chat template a row must be one prompt and one completion (give model.chat_template)"
            )
        prompt, completion = messages[0]["content"] or "", messages[1]["content"] or ""
        weights = self._weigh_turns(conversation)
        rest = conversation.weight if self._train_on == "all" else 0.0
        return Text(prompt + completion, ((len(prompt), len(prompt) + len(completion)),), (weights[1],), rest)

    def _mask(
        self,
        texts: Mapping[int, Text | RowRefused],
        mask: Callable[[Text, Any], Rendered],
        *,
        special: bool,
        offsets: bool = True,
    ) -> dict[int, Rendered | RowRefused]:
        """Each text encoded, with the tokenizer's own special tokens or without, and masked."""
        results: dict[int, Rendered | RowRefused] = {
            index: text for index, text in texts.items() if isinstance(text, RowRefused)
        }
        kept = {index: text for index, text in texts.items() if isinstance(text, Text)}
        encodings = self._encode([text.text for text in kept.values()], special, offsets)
        for (index, text), encoding in zip(kept.items(), encodings, strict=True):
            results[index] = encoding if isinstance(encoding, RowRefused) else attempt(mask, text, encoding)
        return results

    def _encode(self, texts: Sequence[str], special: bool, offsets: bool) -> list[Any]:
        """An encoding of ``tokenizers`` for each text, or RowRefused; with offsets if they are asked for."""
        if not texts:
            return []
        try:
            with panics_as_errors():
                if not self._is_plain:
                    return self.tokenizer(list(texts), add_special_tokens=special, verbose=False).encodings
                backend = self.tokenizer.backend_tokenizer
                if backend.truncation is not None:
                    backend.no_truncation()
                if backend.padding is not None:
                    backend.no_padding()
                backend.encode_special_tokens = self.tokenizer.split_special_tokens
                encode = backend.encode_batch if offsets else backend.encode_batch_fast
                return encode(list(texts), add_special_tokens=special)
        except Exception as error:  # one of the texts: which?
            if len(texts) == 1:
                return [RowRefused(f"the tokenizer refuses this text: {error}")]
            return [encoding for text in texts for encoding in self._encode([text], special, offsets)]

    def _mask_chat(self, text: Text, encoding: Any) -> Rendered:
        if self._bos is not None and encoding.ids[:2] == [self._bos, self._bos]:
            raise RowRefused("the chat template writes the begin-of-text token twice")
        ids = np.array(encoding.ids, dtype=np.int32)
        weights = np.full(len(ids), text.rest, dtype=np.float32)
        num_straddling = 0
        if text.spans or text.images:
            starts, ends = widen(encoding)
            for (start, end), weight in zip(text.spans, text.weights, strict=True):
                inside = (starts >= start) & (ends <= end) & (ends > starts)
                for token in np.flatnonzero((starts < start) & (ends > start) & (ends <= end)):
                    inside[token] = bool(text.text[start : ends[token]].strip())
                if end > start and (not inside.any() or ends[inside].max() != end):
                    raise RowRefused(ACROSS_THE_END)
                weights[inside] = weight
                num_straddling += int(((starts < start) & (ends > start)).sum())
            for start, end in text.images:
                weights[(starts < end) & (ends > start)] = 0
        return finish(ids, weights, num_straddling)

    def _mask_plain(self, text: Text, encoding: Any) -> Rendered:
        """A text or prompt + completion, with eos at the end. A token across the border carries the first trained
        characters (``A: `` + ``42`` is often one token `` 42``), so here it is trained."""
        if self._eos is None:
            raise UserError(
                "the tokenizer has no end-of-text token",
                fix="set eos_token in the model folder's tokenizer_config.json",
            )
        kept = without_doubled(encoding.ids, encoding.special_tokens_mask)
        ids = np.array(encoding.ids, dtype=np.int32)[kept]
        starts, ends = (bounds[kept] for bounds in widen(encoding))
        ((first, _),), (weight,) = (text.spans, text.weights) if text.spans else (((0, 0),), (text.rest,))
        weights = np.full(len(ids), text.rest, dtype=np.float32)
        weights[(ends > first) & (ends > starts) if first else slice(None)] = weight
        if len(ids) == 0 or ids[-1] != self._eos:
            ids, weights = np.append(ids, np.int32(self._eos)), np.append(weights, np.float32(weight))
        weights[-1] = weight
        return finish(ids, weights, int(((starts < first) & (ends > first)).sum()))

    def _take_ready(self, content: Ready) -> Rendered:
        """The ids and mask that a row brings. Raises RowRefused for ids that the tokenizer does not have, and for
        weights that are too large."""
        if isinstance(content, ReadyTokens):
            ids, weights = content.ids, content.trained
            if (outside := np.flatnonzero((ids < 0) | (ids >= len(self.tokenizer)))).size:
                raise RowRefused(
                    f"input_ids holds {ids[outside[0]]} at place {outside[0]}, outside of the tokenizer's "
                    f"{len(self.tokenizer):,} tokens"
                )
            if content.weights is not None:
                weights = content.trained * content.weights
        else:
            encoded = [(self.tokenizer.encode(text, add_special_tokens=False), label) for text, label in content.parts]
            ids = np.array([number for numbers, _ in encoded for number in numbers])
            weights = np.repeat([label for _, label in encoded], [len(numbers) for numbers, _ in encoded]).astype(
                np.bool_
            )
        if content.weight != 1:
            weights = weights * content.weight
        if weights.max(initial=0) > MAX_WEIGHT:
            raise RowRefused(f"a weight is larger than {MAX_WEIGHT:.3g}")
        weights = weights if weights.dtype == np.bool_ else weights.astype(np.float32)
        return finish(ids.astype(np.int32), weights, 0)
