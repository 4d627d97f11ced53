"""What a sample is made of: named streams, each declared once. Pure numpy; knows no files, no tokenizer, no model.

A sample is a mapping from names of streams to arrays ``(n, *item_shape)``. A stream has a length of its own, or shares
that of the stream it lies along. Its declaration says how it is stored (``store.py``) and which entries of a batch it
becomes (``collate.py``); neither of them names a stream. What a language model needs stands at the end of this file,
and only there: which stream decides how much fits into a pack, the streams of text, the loss tokens of a sample, and
its images.

A store holds no pixels. Of each image it has the place of its file, or its encoded bytes where the row held these; a
hash of the encoded bytes; its size; and how many units and tokens it takes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

IGNORED = -100  # the label of a position that has none
PAD_ID = 0

Sample = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class BatchEntry:
    """One entry of a batch, made of one stream.

    A stream along the packed one: item p of a document stands at the document's position p, with ``shifted`` at
    position p - 1 (that of its label; the last position of a document has none). Other positions, padding, and those
    where the bool stream ``where`` is false, hold ``fill``. A stream with a length of its own: the items of all samples
    end to end, and beside them ``cu_NAME`` (samples + 1) int32, where each sample's begin; nothing is padded.
    """

    name: str
    dtype: str
    fill: float = 0
    shifted: bool = False
    where: str = ""


@dataclass(frozen=True)
class Stream:
    """A stream's name, its items on disk (little-endian ``dtype``, ``item_shape``), whose length it shares (``along``;
    empty: its own), and what it becomes in a batch.

    ``default_from``: written only where some sample carries it; the others then hold the values of that stream.
    ``identifies``: samples that differ in it are not the same.
    """

    name: str
    dtype: str
    item_shape: tuple[int, ...] = ()
    along: str = ""
    default_from: str = ""
    entries: tuple[BatchEntry, ...] = ()
    identifies: bool = True

    @property
    def owner(self) -> str:
        """The stream whose length this one has."""
        return self.along or self.name

    @cached_property
    def item_dtype(self) -> np.dtype:
        return np.dtype(self.dtype)

    @cached_property
    def item_bytes(self) -> int:
        return self.item_dtype.itemsize * math.prod(self.item_shape)

    def to_bytes(self, values: np.ndarray) -> bytes:
        """``values (n, *item_shape)`` as they lie on disk. Raises ValueError for items of another shape, TypeError
        for those of another kind."""
        if values.shape[1:] != self.item_shape:
            raise ValueError(f"items of the stream {self.name} have shape {values.shape[1:]}, not {self.item_shape}")
        return values.astype(self.dtype, casting="same_kind", copy=False).tobytes()

    def from_bytes(self, raw: bytes) -> np.ndarray:
        """The reverse: ``(n, *item_shape)``, not to be written to."""
        values = np.frombuffer(raw, dtype=self.item_dtype)
        return values.reshape(-1, *self.item_shape) if self.item_shape else values


def check_streams(streams: Iterable[Stream]) -> tuple[Stream, ...]:
    """The streams themselves; ValueError where their declarations contradict each other."""
    streams = tuple(streams)
    by_name = {stream.name: stream for stream in streams}
    if len(by_name) < len(streams) or PACKED_BY not in by_name:
        raise ValueError(f"streams need names of their own, and one of them is {PACKED_BY}")
    names = [entry.name for stream in streams for entry in stream.entries]
    if len(set(names)) < len(names):
        raise ValueError(f"two streams become the same entry of a batch: {sorted(names)}")
    for stream in streams:
        if not stream.name.isidentifier():
            raise ValueError(f"{stream.name!r} cannot name a stream: it becomes part of a file's name")
        if stream.along and (stream.along not in by_name or by_name[stream.along].along):
            raise ValueError(f"{stream.name} lies along {stream.along}, which is no stream with a length of its own")
        for name in filter(None, [stream.default_from, *(entry.where for entry in stream.entries)]):
            if name not in by_name or by_name[name].owner != stream.owner:
                raise ValueError(f"{stream.name} refers to {name}, which is no stream of the same length")
        if stream.default_from and (not stream.along or by_name[stream.default_from].default_from):
            raise ValueError(f"{stream.name} cannot take its default from {stream.default_from}")
        if stream.owner != PACKED_BY and any(entry.shifted or entry.where for entry in stream.entries):
            raise ValueError(f"{stream.name} is not along {PACKED_BY}: its entries cannot be shifted or left out")
    return streams


def describe_streams(streams: Iterable[Stream]) -> list[dict[str, Any]]:
    """The declarations as JSON values: they stand in a store's description, and in its name."""
    described = [asdict(stream) for stream in streams]
    for values in described:
        if values["identifies"]:  # as stores say that were written before there was such a field
            del values["identifies"]
    return described


def read_streams(described: Iterable[Mapping[str, Any]]) -> tuple[Stream, ...]:
    """The reverse of ``describe_streams``. Raises ValueError or TypeError for what it did not write."""
    return check_streams(
        Stream(
            **{
                **values,
                "item_shape": tuple(values["item_shape"]),
                "entries": tuple(BatchEntry(**entry) for entry in values["entries"]),
            }
        )
        for values in described
    )


PACKED_BY = "tokens"  # the stream whose length decides how much fits into a micro-batch

TOKENS = Stream(
    PACKED_BY,
    "<i4",
    entries=(
        BatchEntry("input_ids", "int64", PAD_ID),
        BatchEntry("labels", "int64", IGNORED, shifted=True, where="mask"),
    ),
)
MASK = Stream("mask", "?", along=PACKED_BY)  # which tokens are loss tokens
WEIGHTS = Stream(
    "weights",
    "<f4",
    along=PACKED_BY,
    default_from="mask",
    entries=(BatchEntry("loss_weights", "float32", 0.0, shifted=True, where="mask"),),
)
TEXT = check_streams((TOKENS, MASK, WEIGHTS))


def make_sample(ids: np.ndarray, mask: np.ndarray, weights: np.ndarray | None = None) -> Sample:
    """A sample of text: ``ids`` int32, ``mask`` bool, ``weights`` float32 or None (all 1), all (T)."""
    return {TOKENS.name: ids, MASK.name: mask} | ({} if weights is None else {WEIGHTS.name: weights})


# Of a sample of several documents, such as the two answers of a preference: their lengths, end to end in its tokens.
# Order and packing know samples alone, so documents of one stay together; none sees another.
DOCUMENTS = Stream("documents", "<i4", entries=(BatchEntry("documents", "int32"),))


# How many tokens each document of a sample begins with that its first one begins with too, and that need not be
# computed again: a prompt but for its last token, which predicts what differs.
SHARED = Stream("shared", "<i4", identifies=False)

# Whether the answer of a sample is a good one.
LABELS = Stream("label", "?", entries=(BatchEntry("label", "bool"),))

# Beside a store (``store.py``): the log-probability of each document under the model before training.
REFERENCE = Stream("reference", "<f8", entries=(BatchEntry("reference", "float64"),))


def join_documents(documents: Sequence[Sample]) -> Sample:
    """One sample of several documents, which hold the same streams."""
    joined = {name: np.concatenate([document[name] for document in documents]) for name in documents[0]}
    return joined | {DOCUMENTS.name: np.array([len(document[PACKED_BY]) for document in documents], dtype=np.int32)}


def share_prompt(documents: Sequence[Sample]) -> dict[str, np.ndarray]:
    """The stream ``SHARED`` of documents that follow one prompt, the tokens before the first loss token."""
    begin = min(int(document[MASK.name].argmax()) for document in documents)
    return {SHARED.name: np.array([0] + [max(0, begin - 1)] * (len(documents) - 1), dtype=np.int32)}


def cut_prompts(sample: Sample, documents: Sequence[Sample]) -> list[Sample]:
    """The documents of a sample without the tokens that ``SHARED`` counts."""
    return [
        {name: values[count:] for name, values in document.items()}
        for document, count in zip(documents, sample[SHARED.name].tolist(), strict=True)
    ]


def exchange_answer(sample: Sample, other: Sample, max_tokens: int) -> dict[str, np.ndarray]:
    """``sample``'s prompt (before its first loss token) with ``other``'s answer, cut at ``max_tokens``."""
    starts = [int(each[MASK.name].argmax()) for each in (sample, other)]
    tokens, mask = (
        np.concatenate([sample[name][: starts[0]], other[name][starts[1] :]])[:max_tokens]
        for name in (TOKENS.name, MASK.name)
    )
    return {**sample, **join_documents([make_sample(tokens, mask)])}


def split_documents(sample: Sample, streams: Iterable[Stream]) -> list[Sample]:
    """Returns what lies along the tokens, document by document; a sample of one document as it is."""
    if DOCUMENTS.name not in sample:
        return [sample]
    if (total := int(sample[DOCUMENTS.name].sum())) != len(sample[PACKED_BY]):
        raise ValueError(f"a sample of {len(sample[PACKED_BY])} tokens cannot have documents of {total} tokens")
    cuts = np.cumsum(sample[DOCUMENTS.name])[:-1]
    names = [stream.name for stream in streams if stream.owner == PACKED_BY and stream.name in sample]
    divided = (np.split(sample[name], cuts) for name in names)
    return [dict(zip(names, parts, strict=True)) for parts in zip(*divided, strict=True)]


def _predicted(sample: Sample, name: str) -> np.ndarray:
    """A stream along the tokens without the first of each document, which is predicted from nothing."""
    if DOCUMENTS.name not in sample:
        return sample[name][1:]
    return np.delete(sample[name], np.cumsum([0, *sample[DOCUMENTS.name][:-1]]))


def count_loss_tokens(sample: Sample) -> int:
    return int(np.count_nonzero(_predicted(sample, MASK.name)))


def sum_loss_weights(sample: Sample) -> float:
    """What the loss tokens of a sample weigh together, summed in float64; their number where none is weighted."""
    if WEIGHTS.name not in sample:
        return count_loss_tokens(sample)
    return float(_predicted(sample, WEIGHTS.name).sum(dtype=np.float64))


def is_weighted(streams: Iterable[Stream]) -> bool:
    """Whether some loss token weighs other than 1."""
    return any(stream.name == WEIGHTS.name for stream in streams)


def weights_of(sample: Sample) -> np.ndarray:
    """float32, the weight of each token's loss: 0 where it is no loss token."""
    return sample.get(WEIGHTS.name, sample[MASK.name]).astype(np.float32)


def count_first_loss_tokens(samples: Any, numbers: np.ndarray) -> np.ndarray:
    """Loss tokens of the first document of each of these samples of a store, int64."""
    firsts = (split_documents(samples.sample(int(number)), samples.streams)[0] for number in numbers)
    return np.fromiter(map(count_loss_tokens, firsts), dtype=np.int64, count=len(numbers))


def cut_to_loss(sample: Sample, streams: Iterable[Stream], num_tokens: int) -> Sample:
    """The last ``num_tokens`` tokens up to the last loss token, and what lies along them; a shorter sample, or one
    of several documents, as it is."""
    if len(sample[PACKED_BY]) <= num_tokens or DOCUMENTS.name in sample:
        return sample
    found = np.flatnonzero(sample[MASK.name])
    end = max(num_tokens, int(found[-1]) + 1 if len(found) else 0)
    along = {stream.name for stream in streams if stream.owner == PACKED_BY}
    return {name: values[end - num_tokens : end] if name in along else values for name, values in sample.items()}


def prompt_of(sample: Sample) -> np.ndarray:
    """The ids before the first loss token; of a sample that is trained from its start, the first token."""
    return sample[TOKENS.name][: max(1, int(sample[MASK.name].argmax()))]


def add_label_positions(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with ``label_positions`` (m) int64: the flat positions that have a label. Known here, they spare the
    GPU a wait."""
    return {**batch, "label_positions": np.flatnonzero(batch["labels"] != IGNORED)}


# is held by the row, bytes of its place or of itself, hash (16 bytes as 2), height, width, units, tokens
NUM_FIELDS = 8
UNITS, TOKENS_OF_IMAGE = 6, 7

IMAGES = Stream("images", "<i8", (NUM_FIELDS,))
IMAGE_SOURCES = Stream("image_sources", "u1", identifies=False)  # places and encoded images of a sample, end to end
WITH_IMAGES = check_streams((*TEXT, IMAGES, IMAGE_SOURCES))
EVERY = check_streams((*WITH_IMAGES, DOCUMENTS, SHARED, LABELS))  # that a store may have


@dataclass(frozen=True)
class StoredImage:
    """One image of a sample. ``source`` are its encoded bytes where ``held``, else its place (UTF-8); ``content`` 16
    bytes; ``size`` (height, width), turned as EXIF says."""

    held: bool
    source: bytes
    content: bytes
    size: tuple[int, int]
    num_units: int
    num_tokens: int

    @property
    def place(self) -> str:
        """A path or an address; "" where the row held the image."""
        return "" if self.held else self.source.decode()


def to_streams(images: Sequence[StoredImage]) -> dict[str, np.ndarray]:
    """The streams of a sample with these images."""
    items = np.zeros((len(images), NUM_FIELDS), dtype=np.int64)
    for item, image in zip(items, images, strict=True):
        item[2:4] = np.frombuffer(image.content, dtype="<i8")
        item[[0, 1]] = image.held, len(image.source)
        item[4:] = *image.size, image.num_units, image.num_tokens
    joined = b"".join(image.source for image in images)
    return {IMAGES.name: items, IMAGE_SOURCES.name: np.frombuffer(joined, dtype=np.uint8)}


def images_within(sample: Sample, num_tokens: int) -> tuple[StoredImage, ...]:
    """The first of a sample's images, whose placeholders are at most ``num_tokens`` together."""
    images = from_streams(sample)
    ends = accumulate(image.num_tokens for image in images)
    return tuple(image for image, end in zip(images, ends, strict=True) if end <= num_tokens)


def from_streams(sample: Sample) -> list[StoredImage]:
    """The reverse; [] for a sample of a store without images."""
    if IMAGES.name not in sample:
        return []
    images, raw, start = [], sample[IMAGE_SOURCES.name].tobytes(), 0
    for item in sample[IMAGES.name]:
        held, length, _, _, height, width, units, tokens = item.tolist()
        content = item[2:4].astype("<i8").tobytes()
        images.append(StoredImage(bool(held), raw[start : start + length], content, (height, width), units, tokens))
        start += length
    return images
