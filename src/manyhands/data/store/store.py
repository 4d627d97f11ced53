"""Samples on disk: written once in segments, then read one by one by every rank. Knows no tokenizer, no torch, and no
stream but by its declaration.

A store is a folder. Each stream of the samples (``streams.py``) is a file ``NAME.bin`` of its items, end to end for all
samples, and a table ``NAME_checksums.npy`` (uint32); one with a length of its own has ``NAME_offsets.npy`` (int64,
samples + 1) besides, which bounds its samples. A stream with a default is there only where some sample carries it. One
entry a sample: ``num_loss_tokens.npy`` (int32), ``loss_weights.npy`` (float64), ``lines.npy`` (int32),
``continued.npy`` (bool: the sample continues the one before), ``hashes.npy`` (uint64, of the streams with a
length of their own) and ``sources.npy`` (int16). ``train.npy`` and ``validation.npy`` (int64) list the samples of each
set, ``meta.json`` says how the store was made and declares its streams.

Nothing is taken on trust. ``meta.json`` holds a hash of itself and of every file. Whoever prepares a run hashes them
all (``check_tokens``); every process that opens the store hashes the tables it reads; and what a sample holds of a
stream has a checksum (CRC-32) that is compared whenever it is read, so that damage on another machine's disk, or while
the run lasts, is an error and not another sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.core.errors import UserError
from manyhands.core.files import hash_in_pieces, write_atomically
from manyhands.data.batch.order import EVALUATION_STREAM, SampleOrder, permute
from manyhands.data.store.streams import (
    IMAGES,
    PACKED_BY,
    SHARED,
    TOKENS_OF_IMAGE,
    UNITS,
    Stream,
    exchange_answer,
    is_weighted,
    read_streams,
)

HASH_BYTES = 32  # at the end of a file beside a store
FORMAT_VERSION = 8
SAMPLE_TABLES = ("num_loss_tokens", "loss_weights", "sources", "train", "validation")  # that a process reads


class StreamFile:
    """The items of a stream, read by the sample.

    Read, not mapped: the pages of a mapping count as this process's memory once it has been through the samples, a page
    fault reads 4 KiB where a sample has more, and a file that was cut short would be a bus error.
    """

    def __init__(self, path: Path, stream: Stream, offsets: np.ndarray, checksums: np.ndarray) -> None:
        """``offsets`` int64 (samples + 1) count items, ``checksums`` uint32 (samples); of all samples of the store."""
        self.path, self.stream = path, stream
        self._file, self._item_bytes = path.open("rb", buffering=0), stream.item_bytes
        self._offsets, self._checksums = offsets, checksums

    def read(self, index: int) -> np.ndarray:
        """The items of one sample, not to be written to. UserError where they are not what was written."""
        start = int(self._offsets[index]) * self._item_bytes
        num_bytes = int(self._offsets[index + 1]) * self._item_bytes - start
        raw = os.pread(self._file.fileno(), num_bytes, start)  # safe in threads: no position
        if len(raw) != num_bytes:
            raise damaged_while_open(self.path, "it was cut short")
        if zlib.crc32(raw) != self._checksums[index]:
            raise damaged_while_open(self.path, f"sample {index:,} of the file is not what was written")
        return self.stream.from_bytes(raw)


@dataclass(frozen=True, eq=False)
class SampleSet:
    """Some samples of a store, numbered from 0; one entry a sample in each array.

    ``lengths`` int32 are tokens; ``num_loss_tokens`` int32; ``loss_weights`` float64 are the sums of their weights;
    ``sources`` int16 are positions in ``meta["sources"]``; ``places`` int64 are positions in the store. In a store with
    images ``num_images``, ``image_units`` and ``image_tokens`` int64 are what the images of a sample take, else None.
    ``num_shared`` int64: tokens of a sample that are in its prompt again (``SHARED``); ``shares_prompts``: lengths are
    without them.
    """

    lengths: np.ndarray
    num_loss_tokens: np.ndarray
    loss_weights: np.ndarray
    sources: np.ndarray
    places: np.ndarray
    seed: int
    _files: tuple[StreamFile, ...]
    num_images: np.ndarray | None = None
    image_units: np.ndarray | None = None
    image_tokens: np.ndarray | None = None
    num_shared: np.ndarray | None = None
    shares_prompts: bool = False

    def share_prompts(self) -> SampleSet:
        """The same with lengths as a pack has them in which each prompt is once."""
        assert self.num_shared is not None and not self.shares_prompts
        return replace(self, lengths=(self.lengths - self.num_shared).astype(np.int32), shares_prompts=True)

    @property
    def whole_lengths(self) -> np.ndarray:
        """Tokens, with the prompt of each answer."""
        return self.lengths + self.num_shared if self.shares_prompts and self.num_shared is not None else self.lengths

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        return tuple(file.stream for file in self._files)

    @property
    def has_weights(self) -> bool:
        """Whether some loss token of the store weighs other than 1."""
        return is_weighted(self.streams)

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """The streams of one sample by name, not to be written to. UserError where they are not what was written.

        A number of ``pair_numbers`` is the prompt of one sample with the answer of another.
        """
        if index >= self.num_samples:
            asked, answered = divmod(index - self.num_samples, self.num_samples)
            return exchange_answer(self.sample(asked), self.sample(answered), int(self.lengths.max()))
        place = int(self.places[index])
        return {file.stream.name: file.read(place) for file in self._files}

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of samples, also of those of two."""
        if not len(numbers) or int(numbers.max()) < self.num_samples:
            return self.lengths[numbers]
        return np.array([len(self.sample(int(number))[PACKED_BY]) for number in numbers], dtype=np.int32)

    def take_tokens(self, max_tokens: int | None, among: np.ndarray | None = None) -> np.ndarray:
        """Numbers of samples, sorted, that together have at most ``max_tokens`` tokens: the samples of the seeded
        order, each taken if it still fits; None takes all. ``among``: some samples' numbers, None all. Raises
        UserError where not even the shortest fits."""
        among = np.arange(self.num_samples, dtype=np.int64) if among is None else among
        if max_tokens is None:
            return among
        taken, lengths = [], self.whole_lengths
        allowed = set(among.tolist())
        left, shortest = max_tokens, int(lengths[among].min()) if len(among) else 0
        for index in permute(self.num_samples, self.seed, EVALUATION_STREAM):
            if left < shortest:
                break
            if int(index) in allowed and lengths[index] <= left:
                taken.append(int(index))
                left -= int(lengths[index])
        if not taken and len(among):
            raise UserError(
                f"no validation sample fits into evaluate.max_tokens = {max_tokens:,}",
                why=f"the shortest has {shortest:,} tokens",
                fix="raise evaluate.max_tokens",
            )
        return np.array(sorted(taken), dtype=np.int64)


@dataclass(frozen=True)
class TokenStore:
    """An open store. ``digest`` names what it was made of, ``content`` what it holds: equal means equal tokens."""

    folder: Path
    train: SampleSet
    validation: SampleSet
    meta: dict[str, Any]
    attached: tuple[tuple[Stream, Path], ...] = ()  # streams beside the store, as ``attach`` got them

    @property
    def digest(self) -> str:
        return self.meta["digest"]

    @property
    def content(self) -> str:
        """16 hex digits of the hashes of all files and of what the streams become in a batch."""
        return digest_of([self.meta["files"], self.meta["streams"]])[:16]

    def divide_validation(self) -> dict[str, np.ndarray]:
        """Validation samples by set: "" of ``data.validation`` or held out, others of ``evaluate.data``; none empty."""
        sets = [source.get("set", "") for source in self.meta["sources"]]
        names = np.array(sets, dtype=object)[self.validation.sources] if self.validation.num_samples else np.array([])
        return {name: np.flatnonzero(names == name) for name in dict.fromkeys(sets) if (names == name).any()}

    @property
    def source_weights(self) -> tuple[float, ...]:
        """How often the samples of each source are taken in an epoch."""
        return tuple(source["weight"] for source in self.meta["sources"])

    @staticmethod
    def open(folder: str | Path, *, check_tokens: bool = False) -> TokenStore:
        """Opens a store; takes some 45 bytes of memory a sample. Raises UserError where files are missing or not what
        was written.

        With ``check_tokens`` every file is hashed, else only the tables: samples are checked as they are read.
        """
        folder = Path(folder)
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            if meta["version"] != FORMAT_VERSION:
                raise ValueError("it is of another version of manyhands")
            digest = meta.pop("meta_digest")
            if digest_of(meta) != digest:
                raise ValueError("meta.json is not what was written")
            streams = read_streams(meta["streams"])
            names = [*SAMPLE_TABLES, *(f"{stream.name}_checksums" for stream in streams)]
            names += [f"{stream.name}_offsets" for stream in streams if not stream.along]
            whole = (IMAGES.name, SHARED.name)  # what ranks balance by
            more = [f"{stream.name}.bin" for stream in streams if stream.name in whole]
            read = list(meta["files"]) if check_tokens else [*(f"{name}.npy" for name in names), *more]
            hashes = hash_in_pieces([folder / name for name in read])
            if wrong := [name for name in read if hashes[folder / name] != meta["files"][name]]:
                raise ValueError(f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not what was written")
            tables = {name: np.array(_load(folder, name)) for name in names}
            files = []
            for stream in streams:
                offsets, path = tables[f"{stream.owner}_offsets"], folder / f"{stream.name}.bin"
                if path.stat().st_size != stream.item_bytes * int(offsets[-1]):
                    raise ValueError(f"{path.name} was cut short")
                files.append(StreamFile(path, stream, offsets, tables[f"{stream.name}_checksums"]))
            sums = _sum_images(folder, tables)
            if (shared := tables.get(f"{SHARED.name}_offsets")) is not None:
                items = np.fromfile(folder / f"{SHARED.name}.bin", dtype=SHARED.item_dtype)
                sums["num_shared"] = _add_up(items, shared)
            train, validation = (
                _take_samples(tables, tables[name], meta["seed"], tuple(files), sums)
                for name in ("train", "validation")
            )
        except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
            raise UserError(
                "the token cache is damaged",
                where=str(folder),
                why=str(error),
                fix="delete this folder; it is made again",
            ) from error
        return TokenStore(folder, train, validation, meta)

    @cached_property
    def num_places(self) -> int:
        """Samples of the store, those of neither set included."""
        return len(_load(self.folder, "sources"))

    def share_prompts(self) -> TokenStore:
        """The store with ``SampleSet.share_prompts`` of both sets."""
        return replace(self, train=self.train.share_prompts(), validation=self.validation.share_prompts())

    def attach(self, stream: Stream, path: Path) -> TokenStore:
        """The store with a further stream from ``write_beside``. UserError where the file is not what was written."""
        values = read_beside(stream, path, self.num_places)
        if values is None:
            raise damaged_while_open(path, "it is not what was written")
        checksums = np.array([zlib.crc32(row.tobytes()) for row in values], dtype=np.uint32)
        offsets = np.arange(self.num_places + 1, dtype=np.int64) * values.shape[1]
        file = StreamFile(path, stream, offsets, checksums)
        train, validation = (replace(each, _files=(*each._files, file)) for each in (self.train, self.validation))
        return replace(self, train=train, validation=validation, attached=(*self.attached, (stream, path)))

    def order_samples(
        self,
        seed: int,
        batch_samples: int | None = None,
        batch_loss_tokens: int | None = None,
        batch_packs: int | None = None,
        pack_tokens: int | None = None,
    ) -> SampleOrder:
        """The order of training samples over a run, sources by weight. Raises ValueError as SampleOrder."""
        train = self.train
        return SampleOrder(
            train.num_samples,
            seed,
            batch_samples,
            batch_loss_tokens,
            train.num_loss_tokens,
            sources=train.sources,
            weights=self.source_weights,
            batch_packs=batch_packs,
            pack_tokens=pack_tokens,
            lengths=train.lengths,
            as_given=self.meta.get("order") == "as_given",
        )

    @property
    def lines(self) -> np.ndarray:
        """The source line of each sample, by its place in the store."""
        return _load(self.folder, "lines")

    def line(self, number: int) -> int:
        """The source line of a training sample."""
        return int(self.lines[self.train.places[number]])

    def file_number(self, number: int) -> int:
        """Which file of its source, counted from 0, a training sample is from."""
        return find_file(self.meta["made"], _load(self.folder, "sources"), int(self.train.places[number]))


def pair_numbers(samples: SampleSet, prompts: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Numbers of samples that have the prompt of one sample and the answer of another."""
    return samples.num_samples * (1 + prompts.astype(np.int64)) + answers


def cycle_answers(samples: SampleSet, numbers: np.ndarray) -> np.ndarray:
    """The same of each of these samples with the answer of the one before it, the first one with that of the last."""
    return pair_numbers(samples, numbers, np.roll(numbers, 1))


def find_file(made: Sequence[Mapping[str, Any]], sources: np.ndarray, place: int) -> int:
    """Which file of its source the sample at a place of a store is from. ``made``: what became of each source."""
    ends = np.cumsum(made[int(sources[place])]["samples_of_files"])
    return int(np.searchsorted(ends, place - int(np.searchsorted(sources, sources[place])), side="right"))


def write_beside(stream: Stream, path: Path, values: np.ndarray) -> None:
    """Writes ``values (places, items)`` of a stream beside a store, by one rename of a finished file."""
    raw = values.astype(stream.dtype).tobytes()
    write_atomically(path, raw + hashlib.sha256(raw).digest())


def read_beside(stream: Stream, path: Path, num_places: int) -> np.ndarray | None:
    """The reverse, ``(places, items)``; None where there is no such file or it is not what was written."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    values, digest = raw[:-HASH_BYTES], raw[-HASH_BYTES:]
    if hashlib.sha256(values).digest() != digest or len(values) % (num_places * stream.item_bytes):
        return None
    return stream.from_bytes(values).reshape(num_places, -1)


def _take_samples(
    tables: dict[str, np.ndarray],
    places: np.ndarray,
    seed: int,
    files: tuple[StreamFile, ...],
    sums: Mapping[str, np.ndarray],
) -> SampleSet:
    offsets = tables[f"{PACKED_BY}_offsets"]
    lengths = (offsets[places + 1] - offsets[places]).astype(np.int32)
    counts, weights, sources = (tables[name][places] for name in ("num_loss_tokens", "loss_weights", "sources"))
    more = {name: summed[places] for name, summed in sums.items()}
    return SampleSet(lengths, counts, weights, sources, places, seed, files, **more)


def _sum_images(folder: Path, tables: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the images of each sample of a store add up to, by name; {} for a store without images."""
    offsets = tables.get(f"{IMAGES.name}_offsets")
    if offsets is None:
        return {}
    items = np.fromfile(folder / f"{IMAGES.name}.bin", dtype=IMAGES.item_dtype).reshape(-1, *IMAGES.item_shape)
    units, tokens = (_add_up(items[:, field], offsets) for field in (UNITS, TOKENS_OF_IMAGE))
    return {"num_images": np.diff(offsets), "image_units": units, "image_tokens": tokens}


def _add_up(items: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The sum of each sample's items, int64."""
    found: np.ndarray = np.diff(np.concatenate([[0], np.cumsum(items, dtype=np.int64)])[offsets])
    return found


def digest_of(value: Any) -> str:
    """SHA-256, in hex, of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def damaged_while_open(path: Path, why: str) -> UserError:
    """For a process that reads samples: only one that prepares a run can make the cache again."""
    return UserError(
        "the token cache is damaged",
        where=f"{path} on {socket.gethostname()}",
        why=why,
        fix="start again: the cache is checked, and made again where it is damaged; on another machine, copy it again",
    )


def _load(folder: Path, name: str) -> np.ndarray:
    """A table, mapped: pages that are only looked at are shared by all processes."""
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
