"""Streams the rows of one part of a source through rendering and the length policy into a segment. Knows no cache, no
sets.

What a part gives depends on its rows alone, not on the process, the parts beside it or the size of a chunk.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from manyhands.config.schema import DataSection
from manyhands.config.tasks import JUDGED, TASKS
from manyhands.core.errors import UserError
from manyhands.data.chat.render import Rendered, Renderer
from manyhands.data.images.files import BadImage
from manyhands.data.images.open import ImageOpener
from manyhands.data.images.rows import parts_of
from manyhands.data.read.columns import PLACEHOLDERS, Columns
from manyhands.data.read.files import FilePart, Findings, Row
from manyhands.data.read.formats import (
    Content,
    Conversation,
    Format,
    Pair,
    Ready,
    ReadyTokens,
    Segments,
    check_format,
    detect_format,
    row_weight,
    to_conversation,
)
from manyhands.data.read.messages import MAX_WEIGHT, RowRefused
from manyhands.data.read.sources import ResolvedSource, read_part, take_rows
from manyhands.data.store.segment import SegmentWriter
from manyhands.data.store.streams import (
    DOCUMENTS,
    LABELS,
    MASK,
    SHARED,
    TEXT,
    TOKENS,
    WEIGHTS,
    WITH_IMAGES,
    Sample,
    StoredImage,
    join_documents,
    make_sample,
    share_prompt,
    to_streams,
)
from manyhands.data.tokenize.long_text import LONG_CHARACTERS, LongText, read_documents
from manyhands.data.tokenize.summary import Outcome
from manyhands.data.tokenize.tokenizer import find_placeholders

CHUNK_ROWS = 1000
# Some 2 million tokens; the tokenizer takes some 140 bytes a character, all at once.
MAX_CONVERSATION_CHARACTERS = 8 << 20


@dataclass(frozen=True)
class RowToRender:
    """A row on its way: what is rendered, and what its loss is multiplied by if it is a text."""

    row: Row
    content: Content
    weight: float = 1.0


class PartTokenizer:
    """Tokenizes parts, one after the other, with one tokenizer. ``formats`` are those of the sources, by
    ``choose_format``.

    ``chunk_characters`` are tokenized at once: many keep the tokenizer's threads busy, few bound the memory. ``notes``:
    on the tokenizer, for the user.
    """

    def __init__(
        self,
        data: DataSection,
        task: str,
        tokenizer: Any,
        sources: Sequence[ResolvedSource],
        formats: Sequence[Format | None],
        chunk_characters: int,
        images: ImageOpener | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._data, self._task, self._sources, self._formats = data, task, sources, formats
        self._chunk_characters, self._images, self._notes = chunk_characters, images, notes
        self._has_template = bool(tokenizer.chat_template)
        self._renderer = Renderer(
            tokenizer,
            plain_prompts=True,
            chat_template_kwargs=data.chat_template_kwargs,
            train_on=data.train_on,
            date=data.date,
            placeholder=None if images is None else images.placeholder,
        )
        self._long_text = LongText(tokenizer)
        self._columns = [Columns(source.fields, source.ignore, images is not None) for source in sources]
        self._placeholders = find_placeholders(tokenizer)
        self._placeholder_ids = np.array(tokenizer.convert_tokens_to_ids(list(self._placeholders)), dtype=np.int64)
        self._kinds: dict[tuple[int, frozenset[str]], Format | RowRefused] = {}
        self._streams = TEXT if images is None else WITH_IMAGES
        self._streams += (DOCUMENTS, SHARED) if TASKS[task].num_documents > 1 else ()
        self._streams += (DOCUMENTS, LABELS) if not set(JUDGED).isdisjoint(TASKS[task].formats) else ()
        # Of the rows that are being written: their source, and what becomes of them.
        self._number, self._source = 0, sources[0]
        self._outcome: Outcome
        self._writer: SegmentWriter

    def run(self, part: FilePart, source: int, folder: Path, on_chunk: Callable[[], None] = lambda: None) -> Outcome:
        """Writes the segment ``folder`` of all rows of a part. Faults of rows are gathered in what is returned."""
        unreadable = Findings()
        outcome = self.run_rows(self.read(part, source, unreadable), source, folder, on_chunk)
        outcome.unreadable = unreadable
        return outcome

    def read(self, part: FilePart, source: int, unreadable: Findings) -> Iterator[Row]:
        """The rows of a part. A text to be split may come in pieces, used up before the next row is asked for."""
        streams = part.kind == "text" and self._sources[source].too_long == "split"
        return take_rows(part, read_documents(part, unreadable)) if streams else read_part(part, unreadable)

    def run_rows(
        self, rows: Iterable[Row], source: int, folder: Path, on_chunk: Callable[[], None] = lambda: None
    ) -> Outcome:
        """Writes the segment ``folder`` of rows of one source."""
        self._number, self._source = source, self._sources[source]
        self._outcome, self._writer = outcome, writer = Outcome(), SegmentWriter(folder, self._streams)
        try:
            for chunk in self._gather(self._convert(rows)):
                documents = [documents_of(item.content) for item in chunk]
                rendered = iter(self._renderer.render_many([content for each in documents for content in each]))
                for item, contents in zip(chunk, documents, strict=True):
                    results = [next(rendered) for _ in contents]
                    try:
                        self._take(item, contents, results)
                    except RowRefused as refused:
                        outcome.refused.add(item.row.file, item.row.line, str(refused))
                on_chunk()
            writer.finish()
        finally:
            writer.close()
        outcome.num_samples, outcome.num_tokens = writer.num_samples, writer.num_items[TOKENS.name]
        outcome.notes = [*self._notes, *self._renderer.notes(), *([] if self._images is None else self._images.notes())]
        return outcome

    def _convert(self, rows: Iterable[Row]) -> Iterator[RowToRender | None]:
        """Rows to be rendered in chunks. A long text takes another way, and its place in order: None goes before it."""
        source, columns, outcome = self._source, self._columns[self._number], self._outcome
        unread: set[str] = set()
        left_out: set[str] = set()
        for given in rows:
            row = columns.keep(given, left_out)
            try:
                format = self._formats[self._number] or self._tell(row)
                columns.check(row, format, unread)
                if format not in outcome.formats:
                    outcome.formats.append(format)
                weight = row_weight(row, source.fields) if format == "text" else 1.0
                if weight > MAX_WEIGHT:
                    raise RowRefused(f"a weight is larger than {MAX_WEIGHT:.3g}")
                text = row.fields.get(source.fields.get("text", "text")) if format == "text" else None
                if is_long(text):
                    yield None
                    self._take_long(row, text, weight)
                    continue
                content = to_conversation(
                    row,
                    format,
                    source.fields,
                    roles=source.roles,
                    drop_system=source.drop_system,
                    images=self._images is not None,
                )
                if self._images is not None and isinstance(content, Conversation):
                    content = self._images.open(content, row.file)
                elif self._images is not None and isinstance(content, Pair):  # whose images stand in its prompt
                    chosen = self._images.open(content.chosen, row.file)
                    content = Pair(chosen, replace(content.rejected, images=chosen.images))
                if (characters := count_conversation(content)) > MAX_CONVERSATION_CHARACTERS:
                    if source.too_long == "drop":
                        outcome.num_too_long += 1
                        continue
                    limit = f"at most {MAX_CONVERSATION_CHARACTERS:,} can be tokenized at once; divide it"
                    raise RowRefused(f"a conversation of {int(characters):,} characters, {limit}")
                if columns.leaves_media:
                    outcome.num_rows_with_placeholders += find_any(PLACEHOLDERS, content) is not None
                yield RowToRender(row, content, weight)
            except RowRefused as refused:
                outcome.refused.add(row.file, row.line, str(refused))
            except BadImage as bad:
                outcome.num_bad_images += 1
                outcome.bad_images.add(row.file, row.line, str(bad))
        outcome.unread, outcome.left_out = sorted(unread), sorted(left_out)

    def _tell(self, row: Row) -> Format:
        """The format of one row among others; RowRefused where it has none that can be trained."""
        key = (self._number, frozenset(name for name, value in row.fields.items() if value is not None))
        if key not in self._kinds:
            try:
                format = detect_format([row], self._source.fields, self._task)
                check_format(format, self._task, self._has_template, "")
                self._kinds[key] = format
            except UserError as error:
                self._kinds[key] = RowRefused(f"{error.what}{f' ({error.why})' if error.why else ''}")
        kind = self._kinds[key]
        if isinstance(kind, RowRefused):
            raise RowRefused(str(kind))
        return kind

    def _gather(self, items: Iterable[RowToRender | None]) -> Iterator[list[RowToRender]]:
        chunk: list[RowToRender] = []
        characters = 0
        for item in items:
            if item is not None:
                chunk.append(item)
                characters += count_held(item.content)
            if chunk and (item is None or len(chunk) >= CHUNK_ROWS or characters >= self._chunk_characters):
                yield chunk
                chunk, characters = [], 0
        if chunk:
            yield chunk

    def _take(
        self,
        item: RowToRender,
        contents: Sequence[Conversation | str | Ready],
        results: Sequence[Rendered | RowRefused],
    ) -> None:
        """Applies its source's length policy to a rendered row by its longest document. Raises RowRefused."""
        row, outcome, too_long, max_length = item.row, self._outcome, self._source.too_long, self._data.max_length
        documents, images = [], stored_images(item.content)
        for content, result in zip(contents, results, strict=True):
            if isinstance(result, RowRefused):
                raise result
            # What a template shows besides contents (reasoning, tool calls, definitions of tools) is seen in the ids.
            self._check_placeholders(content, result.ids)
            outcome.num_straddling_tokens += result.num_straddling
            weights = result.weights
            if item.weight != 1:
                weights = (result.trained if weights is None else weights) * np.float32(item.weight)
            documents.append(make_sample(result.ids, result.trained, weights))
        outcome.num_rows_with_markers += any(
            not isinstance(content, Ready) and self._renderer.has_markers(content) for content in contents
        )
        lengths = [len(document[TOKENS.name]) for document in documents]
        longest = max(lengths)
        if min(lengths) < self._data.min_length:
            outcome.num_too_short += 1
            return
        if longest > max_length and too_long == "truncate":
            if not all(document[MASK.name][1:max_length].any() for document in documents):
                raise RowRefused(
                    f"no loss token is left after cutting at {max_length:,} tokens: raise data.max_length, or set "
                    "data.too_long: drop"
                )
            cut = documents[0][TOKENS.name][max_length:]
            if images and self._images is not None and (cut == self._images.token_id).any():
                raise RowRefused(
                    f"{_describe_long(longest, images)}: cutting at {max_length:,} would leave a part of an image, "
                    "which cannot be trained"
                )
            documents = [{name: values[:max_length] for name, values in document.items()} for document in documents]
            outcome.num_truncated += 1
        elif longest > max_length and too_long == "split" and isinstance(item.content, str):
            self._split(row, [documents[0][TOKENS.name]], item.weight)
            return
        elif longest > max_length and too_long == "drop":
            outcome.num_too_long += 1
            return
        elif longest > max_length:
            outcome.longest = max(outcome.longest, longest)
            outcome.too_long.add(row.file, row.line, _describe_long(longest, images))
            return
        sample = documents[0]
        if isinstance(item.content, Pair):
            check_pair(documents)
            sample = {**join_documents(documents), **share_prompt(documents)}
        elif isinstance(item.content, Conversation) and item.content.label is not None:
            if WEIGHTS.name in sample:
                raise RowRefused("every answer weighs 1: leave out the weights of messages")
            sample = {**join_documents(documents), LABELS.name: np.array([item.content.label])}
        self._append({**sample, **(to_streams(images) if images else {})}, row.line)

    def _append(self, sample: Sample, line: int, continued: bool = False) -> None:
        """Every sample of a run with images has their streams, be they empty."""
        ids, without = sample[TOKENS.name], {} if self._images is None else to_streams([])
        if self._images is not None:
            ids = ids[ids != self._images.token_id]  # features stand in the place of this token's embedding
        self._outcome.largest_id = max(self._outcome.largest_id, int(ids.max(initial=-1)))
        self._writer.append({**without, **sample}, line, continued)

    def _check_placeholders(self, content: Conversation | str | Ready, ids: np.ndarray) -> None:
        """RowRefused for what is wrong with the placeholders of a row, in its texts and among its ids."""
        images = stored_images(content)
        if self._images is not None and isinstance(content, Conversation):
            expected, found = sum(image.num_tokens for image in images), int((ids == self._images.token_id).sum())
            if found != expected:
                raise RowRefused(
                    f"{found:,} placeholders for images are in its tokens, and its images take {expected:,}"
                )
        if (placeholder := find_any(self._placeholders, content)) is not None:
            raise _refuse_placeholder(placeholder)
        if not images:
            self._refuse_ids(ids)

    def _refuse_ids(self, ids: np.ndarray) -> np.ndarray:
        """The ids themselves; RowRefused where a placeholder is among them."""
        if self._placeholders and (found := np.isin(self._placeholder_ids, ids)).any():
            raise _refuse_placeholder(self._placeholders[int(found.argmax())])
        return ids

    def _take_long(self, row: Row, pieces: str | Iterable[str], weight: float) -> None:
        """A text of which only a window is tokenized at one time: all its tokens are trained."""
        outcome, max_length, too_long = self._outcome, self._data.max_length, self._source.too_long
        encoded = map(self._refuse_ids, self._long_text.encode(pieces))
        if too_long == "split":
            self._split(row, encoded, weight)
            return
        kept, num_tokens = [], 0
        for ids in encoded:
            if num_tokens < max_length:
                kept.append(ids)
            num_tokens += len(ids)
        if num_tokens < self._data.min_length:
            outcome.num_too_short += 1
        elif num_tokens <= max_length or too_long == "truncate":
            self._append(_make_text(np.concatenate(kept)[:max_length], weight), row.line)
            outcome.num_truncated += num_tokens > max_length
        elif too_long == "drop":
            outcome.num_too_long += 1
        else:
            outcome.longest = max(outcome.longest, num_tokens)
            outcome.too_long.add(row.file, row.line, _describe_long(num_tokens, ()))

    def _split(self, row: Row, stretches: Iterable[np.ndarray], weight: float) -> None:
        """Blocks share one token: the last target of one is the first input of the next, so no target is lost."""
        max_length, num_blocks = self._data.max_length, 0
        left = np.empty(0, dtype=np.int32)
        for stretch in stretches:
            left = np.concatenate([left, stretch])
            while len(left) > max_length:
                self._append(_make_text(left[:max_length], weight), row.line, num_blocks > 0)
                left, num_blocks = left[max_length - 1 :], num_blocks + 1
        if not num_blocks and len(left) < self._data.min_length:
            self._outcome.num_too_short += 1
            return
        self._append(_make_text(left, weight), row.line, num_blocks > 0)
        self._outcome.num_split += num_blocks > 0


def stored_images(content: Content) -> list[StoredImage]:
    """The images of a row, in the order of its placeholders; of a pair those of its prompt, once."""
    content = content.chosen if isinstance(content, Pair) else content
    return [image.stored for image in content.images] if isinstance(content, Conversation) else []


def _describe_long(num_tokens: int, images: Sequence[StoredImage]) -> str:
    in_images = sum(image.num_tokens for image in images)
    of_images = f", {in_images:,} of them of {len(images):,} image{'s' * (len(images) != 1)}" if images else ""
    return f"{num_tokens:,} tokens{of_images}"


def _make_text(ids: np.ndarray, weight: float) -> Sample:
    """A sample whose tokens are all trained, with one weight."""
    weights = None if weight == 1 else np.full(len(ids), weight, dtype=np.float32)
    return make_sample(ids, np.ones(len(ids), dtype=np.bool_), weights)


def find_any(words: Iterable[str], content: Content) -> str | None:
    """The first of some words that occurs in the text of messages."""
    return next((word for text in texts_of(content) for word in words if word in text), None)


def _refuse_placeholder(token: str) -> RowRefused:
    return RowRefused(
        f"the text holds {token}, this model's placeholder for an image, a video or a sound, and only text "
        f"can be trained: remove it"
    )


def is_long(content: object) -> TypeGuard[str | Iterator[str]]:
    """Whether a text is too long to be tokenized whole; one that comes in pieces always is."""
    return len(content) > LONG_CHARACTERS if isinstance(content, str) else isinstance(content, Iterator)


def documents_of(content: Content) -> tuple[Conversation | str | Ready, ...]:
    """What becomes one document each."""
    return (content.chosen, content.rejected) if isinstance(content, Pair) else (content,)


def check_pair(documents: Sequence[Sample]) -> None:
    """RowRefused unless both answers of a pair follow the same tokens, and differ."""
    if any(WEIGHTS.name in document for document in documents):
        raise RowRefused("every pair weighs 1: leave out the weights of messages")
    one, other = (document[TOKENS.name] for document in documents)
    if np.array_equal(one, other):
        raise RowRefused("both answers become the same tokens: neither is better")
    begins = [int(document[MASK.name].argmax()) for document in documents]
    if begins[0] != begins[1] or not np.array_equal(one[: begins[0]], other[: begins[0]]):
        raise RowRefused("the chat template writes another prompt before each of the two answers")


def count_conversation(content: Content) -> float:
    """Characters of a conversation and its tools; 0 of other content, which is not tokenized at once or is short."""
    if isinstance(content, Pair):
        return sum(map(count_conversation, documents_of(content)))
    return count_characters([content.messages, content.tools]) if isinstance(content, Conversation) else 0


def count_characters(value: Any) -> float:
    """Of all strings in a value, keys left out; a text that comes in pieces counts as endless."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(count_characters, value.values()))
    if isinstance(value, list):
        return sum(map(count_characters, value))
    return float("inf") if isinstance(value, Iterator) else 8


def count_held(content: Content) -> int:
    """Characters of a row that waits; ids, of which a row keeps each as an object, count as ten each, and images that
    the row holds by their bytes."""
    if images := stored_images(content):
        return sum(map(len, texts_of(content))) + sum(len(image.source) for image in images)
    return 10 * len(content.ids) if isinstance(content, ReadyTokens) else sum(map(len, texts_of(content)))


def texts_of(content: Content) -> list[str]:
    """What people wrote in a row."""
    if isinstance(content, Pair):
        return texts_of(content.chosen) + texts_of(content.rejected)
    if isinstance(content, str):
        return [content]
    if isinstance(content, ReadyTokens):
        return []
    if isinstance(content, Segments):
        return [text for text, _ in content.parts]
    texts = [text for message in content.messages if isinstance(text := message.get("content"), str)]
    parts = [part["text"] for message in content.messages for part in parts_of(message) if part["type"] == "text"]
    return texts + parts
