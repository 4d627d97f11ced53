"""From numbers of samples to the arrays of one micro-batch. Pure numpy, so that processes without torch can prepare
batches; knows no model, and no stream but by its declaration.

In a batch (T: tokens of all documents laid end to end; B x L: samples x longest sample):

| name | packed | padded |
|---|---|---|
| input_ids | (1, T) int64 | (B, L) int64, padded on the right with 0 |
| position_ids | (1, T) int64, from 0 in every document | (B, L) int64 |
| labels | (1, T) int64: the next token of the same document where that is a loss token, else -100 | (B, L) int64 |
| loss_weights | (1, T) float32, 0 where no label is; absent where every loss token weighs 1 | (B, L) float32 |
| label_positions | (m) int64: flat positions that have a label | likewise |
| any other entry of a stream along the packed one | (1, T, *item) | (B, L, *item) |
| an entry of a stream with a length of its own | (items of all samples, *item) | likewise |
| cu_ENTRY, beside such an entry | (samples + 1) int32: where each sample begins, and the end | likewise |
| cu_seq_lens | (documents + 1) int32: where documents begin, and T | absent |
| max_length | int: no document is longer | absent |
| key_positions | (keys) int64: flat positions of each document's keys, a shared prompt's before its own | absent |
| cu_seq_lens_k | (documents + 1) int32, beside it: where the keys of each document begin, and the end | absent |
| gathers_keys | True, beside them: the batch is one rank's part of a pack, keys' positions are the pack's | absent |
| row_length | int: every document has this length, with padding that is too short for one at the end | absent |
| document_lengths | (1, T) int64: length of the document that a token is of, 0 in padding; on request | (B, L) int64 |
| distinct_lengths | tuple of int: the lengths in it; stays on the host | likewise |
| sample_numbers | (1, T) int64: which sample of the set a token is of, 0 in padding; on request | (B, L) int64 |
| pixel_values, ... | in a run with images, see ``image_batch.py`` | likewise |

Padded needs no attention mask: attention is causal and the padding stands behind every sample.

Processes may collate batches ahead (``BatchWorkers``). They import no torch, open the same store, and end when their
pipe closes. A batch is a function of (samples, shape) alone, so it does not matter which process makes it, nor in which
attempt of the run: results are taken in the order in which they were asked. Knows nothing of steps, ranks or devices.
"""

import atexit
import multiprocessing
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from manyhands.core.errors import EXIT_FAILED, FAULT, UserError
from manyhands.data.batch.divide import (
    EXCHANGES_HEADS,
    GATHERS_KEYS,
    HALO_BOUNDS,
    HALO_PLACES,
    KEY_BOUNDS,
    KEY_POSITIONS,
    add_halos,
    divide_pack,
)
from manyhands.data.images.batch import ImageWork, add_images
from manyhands.data.store.streams import (
    DOCUMENTS,
    PACKED_BY,
    SHARED,
    BatchEntry,
    Sample,
    Stream,
    add_label_positions,
    cut_prompts,
    split_documents,
)

ROW_TILE = 32  # tokens that a row may be filled up by in any case
MIN_BOUNDS = 16  # entries of cu_seq_lens where their number is rounded up
DOCUMENT_LENGTHS, DISTINCT_LENGTHS, SAMPLE_NUMBERS = "document_lengths", "distinct_lengths", "sample_numbers"
# How the documents of a pack lie as rows of batches, each filled up on the right; see ``lay_out_rows``.
ROW_SHAPES, ROW_TOKENS, ROW_PLACES = "row_shapes", "row_tokens", "row_places"
NOISE_KEY = "noise_key"  # int, of a batch that is trained: of its step, for noise that is keyed by it
IGNORED = (signal.SIGINT, signal.SIGTERM)  # by processes that prepare batches

Arrays = dict[str, Any]  # name -> array, or int
# What every batch of text may hold. Any other entry is an input of the model's forward pass, under its own name.
TEXT_ENTRIES = frozenset(
    {
        "input_ids",
        "position_ids",
        "labels",
        "loss_weights",
        "label_positions",
        "cu_seq_lens",
        "max_length",
        "row_length",
        KEY_POSITIONS,
        KEY_BOUNDS,
        GATHERS_KEYS,
        EXCHANGES_HEADS,
        HALO_BOUNDS,
        HALO_PLACES,
        "has_images",
        DOCUMENT_LENGTHS,
        DISTINCT_LENGTHS,
        SAMPLE_NUMBERS,
        ROW_SHAPES,
        ROW_TOKENS,
        ROW_PLACES,
        NOISE_KEY,
        DOCUMENTS.name,
        f"cu_{DOCUMENTS.name}",
    }
)


class Samples(Protocol):
    """What is read of a ``SampleSet``."""

    @property
    def streams(self) -> tuple[Stream, ...]: ...

    def sample(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class BatchShape:
    """What shape the samples of a micro-batch are given. The defaults add nothing to them.

    ``tile``: a pack is padded to a multiple of so many tokens. ``tokens``: every pack has exactly so many. ``longest``:
    no sample of the run is longer; given, ``max_length`` is the same in every batch, and ``cu_seq_lens`` has a power of
    two of entries (the last ones repeat T), at least as many as ``documents`` and the padding need, so that compiled
    code meets few shapes. ``row_length``: all samples of the run have this length, which batches then say, padding
    included. ``images``: how the samples' images become entries of the batch; None in a run without images.
    ``tells_documents``: the batch says of each token how long its document is, and of which sample it is; a pack also
    how its documents lie as rows. ``shares_prompts``: a pack has the prompt of several answers once (``SHARED``), and
    says which keys each of its documents sees. ``context``: ranks that divide each pack, of which ``context_rank`` gets
    its part; with ``exchanges_heads`` attention sees the whole pack.
    """

    packed: bool
    tile: int = 1
    tokens: int | None = None
    longest: int | None = None
    documents: int = 0
    row_length: int | None = None
    images: ImageWork | None = None
    tells_documents: bool = False
    shares_prompts: bool = False
    context: int = 1
    context_rank: int = 0
    exchanges_heads: bool = False

    @property
    def can_cut(self) -> bool:
        """Whether a sample may be cut: images may lie anywhere in it."""
        return self.images is None


def collate_samples(sample_set: Samples, numbers: Sequence[int] | np.ndarray, shape: BatchShape) -> Arrays:
    """One micro-batch; no samples at all give one row of padding (two tokens, or what ``shape`` asks) without labels.

    Each document of a sample becomes one of the pack, or a row. Padding of a pack is one more document, without labels,
    at position 0. ValueError where the samples do not fit.
    """
    samples = [sample_set.sample(int(number)) for number in numbers]
    divided = [split_documents(sample, sample_set.streams) for sample in samples]
    shared = [0] * sum(map(len, divided))  # tokens before each document that are those of its sample's first one
    if shape.shares_prompts:
        shared = [count for sample in samples for count in sample[SHARED.name].tolist()]
        divided = [cut_prompts(sample, each) for sample, each in zip(samples, divided, strict=True)]
        samples = [{**each, DOCUMENTS.name: each[DOCUMENTS.name] - each[SHARED.name]} for each in samples]
    documents = [document for each in divided for document in each]
    lengths = [len(document[PACKED_BY]) for document in documents]
    if shape.packed:
        size, starts, batch = _size_pack(lengths, shape)
    else:
        size, batch = (max(1, len(lengths)), max(lengths, default=2)), {}
        starts = [index * size[1] for index in range(len(lengths))]
    batch["position_ids"] = _count_positions(size, lengths, starts, shape.packed, shared)
    if shape.shares_prompts:
        batch["max_length"] = max([batch["max_length"], *map(sum, zip(lengths, shared, strict=True))])
        firsts = np.repeat(np.cumsum([0, *map(len, divided)])[:-1], list(map(len, divided)))
        batch |= list_keys(batch["cu_seq_lens"], shared, [starts[first] for first in firsts])
    if shape.tells_documents:
        batch |= _tell_documents(size, lengths, np.repeat(numbers, list(map(len, divided))), starts, shape.packed)
    for stream in sample_set.streams:
        for entry in stream.entries:
            if stream.owner == PACKED_BY:
                batch[entry.name] = _place(stream, entry, documents, size, starts)
            else:
                parts = [sample[stream.name] for sample in samples]
                blank = np.empty((0, *stream.item_shape), dtype=stream.dtype)
                batch[entry.name] = np.concatenate([blank, *parts]).astype(entry.dtype)
                batch[f"cu_{entry.name}"] = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    if shape.images is not None:
        batch |= add_images(shape.images, samples, divided, batch, starts, shape.packed)
    if shape.context > 1:
        bounds = batch["cu_seq_lens"].tolist()
        batch = divide_pack(batch, shape.context_rank, shape.context, exchanges_heads=shape.exchanges_heads)
        if shape.tells_documents:
            batch |= add_halos(bounds, shape.context_rank, shape.context)
            batch |= lay_out_rows(np.diff(batch[HALO_BOUNDS]).tolist(), int(batch[HALO_BOUNDS][-1]))
    return add_label_positions(batch)


def _place(
    stream: Stream, entry: BatchEntry, documents: Sequence[Sample], size: tuple[int, int], starts: Sequence[int]
) -> np.ndarray:
    """An entry ``(*size, *item_shape)`` of a stream along the packed one; ``starts`` are the documents' first flat
    positions."""
    out = np.full((size[0] * size[1], *stream.item_shape), entry.fill, dtype=entry.dtype)
    wide, skipped = (-1, *[1] * len(stream.item_shape)), int(entry.shifted)
    # Document by document: what a step needs of one stays in the cache, which makes it faster than all at once.
    for document, start in zip(documents, starts, strict=True):
        values = document[stream.name][skipped:]
        part = out[start : start + len(values)]
        if entry.where:
            kept = document[entry.where][skipped:]
            np.copyto(part, values, where=kept.reshape(wide) if stream.item_shape else kept)
        else:
            part[:] = values
    return out.reshape(*size, *stream.item_shape)


def list_keys(bounds: np.ndarray, shared: Sequence[int], prompts: Sequence[int]) -> Arrays:
    """The entries about keys of a pack whose documents have ``bounds``. ``shared``: tokens that a document sees before
    its own, which lie in the pack from the position in ``prompts`` on; those beyond these lists see none.
    """
    counts = [*shared, *[0] * (len(bounds) - 1 - len(shared))]
    parts = [
        part
        for start, end, count, prompt in zip(
            bounds[:-1], bounds[1:], counts, [*prompts, *[0] * (len(counts) - len(prompts))], strict=True
        )
        for part in (np.arange(prompt, prompt + count), np.arange(start, end))
    ]
    ends = bounds + np.cumsum([0, *counts])
    return {KEY_POSITIONS: np.concatenate(parts).astype(np.int64), KEY_BOUNDS: ends.astype(np.int32)}


def _count_positions(
    size: tuple[int, int], lengths: list[int], starts: Sequence[int], packed: bool, shared: Sequence[int]
) -> np.ndarray:
    """From 0 in every document, or behind the prompt that it shares, (*size) int64. The padding of a pack keeps
    position 0: positions beyond the longest
    document could outgrow a table, or change a dynamic rotary scale."""
    whole = [length + count for length, count in zip(lengths, shared, strict=True)]
    count = np.arange(max([*whole, 0 if packed else size[1]], default=0), dtype=np.int64)
    if not packed:
        return np.tile(count, (size[0], 1))
    positions = np.zeros(size, dtype=np.int64)
    for length, start, end in zip(lengths, starts, whole, strict=True):
        positions[0, start : start + length] = count[end - length : end]
    return positions


def _tell_documents(
    size: tuple[int, int], lengths: list[int], numbers: Sequence[int] | np.ndarray, starts: Sequence[int], packed: bool
) -> Arrays:
    """The entries about each token's document; padding of a row is taken for its document's."""
    length_of, number_of = (np.zeros(size, dtype=np.int64) for _ in range(2))
    for length, number, start in zip(lengths, numbers, starts, strict=True):
        span = slice(start, start + (length if packed else size[1]))
        length_of.reshape(-1)[span], number_of.reshape(-1)[span] = length, int(number)
    distinct = tuple(np.unique(length_of).tolist())
    told: Arrays = {DOCUMENT_LENGTHS: length_of, DISTINCT_LENGTHS: distinct, SAMPLE_NUMBERS: number_of}
    return told | lay_out_rows(lengths, size[1]) if packed else told


def lay_out_rows(lengths: Sequence[int], total: int) -> Arrays:
    """Documents of a pack of ``total`` tokens as rows of a few batches, for layers that work on rows one by one.

    ``row_shapes``: (rows, tokens of each) of every batch. ``row_tokens`` int64: for all their places, end to end, which
    token of the pack lies there; behind a document's end its last one again. ``row_places`` (total) int64: the place of
    each token; what pads the pack has the first one. A batch holds documents that are at least 3/4 as long as its
    longest, or at most ``ROW_TILE`` tokens shorter, so that little is computed for nothing, in few calls.
    """
    lengths = list(lengths) or [total]
    starts = [0, *accumulate(lengths)]
    shapes: list[tuple[int, int]] = []
    tokens, places, num_places = [], np.zeros(total, dtype=np.int64), 0
    for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
        length, start = lengths[document], starts[document]
        if not shapes or shapes[-1][1] - length > max(ROW_TILE, shapes[-1][1] // 4):
            shapes.append((0, length))
        num_rows, longest = shapes[-1]
        shapes[-1] = (num_rows + 1, longest)
        tokens.append(start + np.minimum(np.arange(longest), length - 1))
        places[start : start + length] = num_places + np.arange(length)
        num_places += longest
    return {ROW_SHAPES: tuple(shapes), ROW_TOKENS: np.concatenate(tokens), ROW_PLACES: places}


def _size_pack(lengths: list[int], shape: BatchShape) -> tuple[tuple[int, int], list[int], Arrays]:
    """((1, T), where each document begins, the entries of the batch that say so)."""
    bounds = [0, *accumulate(lengths)]
    num_tokens = bounds[-1]
    total = shape.tokens if shape.tokens is not None else -(-max(num_tokens, 2) // shape.tile) * shape.tile
    if num_tokens > total:
        raise ValueError(f"{num_tokens} tokens do not fit into {total}")
    ends = bounds if num_tokens == total else [*bounds, total]
    max_length = max([*lengths, total - num_tokens])
    if shape.longest is not None:
        max_length = max(shape.longest, shape.tokens or shape.tile)
        num_bounds = max(MIN_BOUNDS, 1 << (max(len(ends), shape.documents + 2) - 1).bit_length())
        ends = ends + [total] * (num_bounds - len(ends))
    batch: Arrays = {"cu_seq_lens": np.array(ends, dtype=np.int32), "max_length": max_length}
    if shape.row_length is not None and shape.row_length <= total and set(lengths) <= {shape.row_length}:
        batch["row_length"] = shape.row_length  # padding may be cut anywhere: nothing of it is trained
    return (1, total), bounds[:-1], batch


OpenSamples = Callable[[], Mapping[str, Samples]]  # called once in each process; pickled to get there


def open_store_samples(folder: str | Path, attached: Sequence[tuple[Stream, Path]] = ()) -> Mapping[str, Samples]:
    """The sample sets of a token store and of what is ``attached`` to it, by name."""
    from manyhands.data.store.store import TokenStore

    store = TokenStore.open(folder)
    for stream, path in attached:
        store = store.attach(stream, path)
    return {"train": store.train, "validation": store.validation}


class BatchWorkers:
    """``num_workers`` processes, started once and used by every stream of batches until ``close``."""

    def __init__(self, open_samples: OpenSamples, num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would carry threads' locks and the device's state along
        self._lock = threading.Lock()
        self._pipes: list[Connection] = []
        self._processes = []
        self._busy: dict[int, int] = {}  # process -> the ticket whose result it owes; it gets no other before
        self._done: dict[int, Any] = {}
        self._dropped: set[int] = set()
        self._next_ticket = 0
        for number in range(num_workers):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(open_samples, theirs), name=f"{number}-manyhands-collate", daemon=True
            )
            before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # inherited until it ignores them
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        atexit.register(self.close)  # before multiprocessing's own, which would wait for processes that wait for us

    @property
    def num_workers(self) -> int:
        return len(self._pipes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def collate(self, name: str, shape: BatchShape, units: Iterable[np.ndarray]) -> Generator[Arrays, None, None]:
        """The batches of sample set ``name``, one for each unit of sample numbers, in order; ``num_workers`` units
        are in work at once.

        Raises what collation raised, and UserError where a process has died.
        """
        tickets: deque[int] = deque()
        try:
            for rows in units:
                tickets.append(self._submit((name, rows, shape)))
                if len(tickets) == self.num_workers:
                    yield self._receive(tickets.popleft())
            while tickets:
                yield self._receive(tickets.popleft())
        finally:
            with self._lock:
                self._dropped.update(ticket for ticket in tickets if self._done.pop(ticket, None) is None)

    def close(self) -> None:
        """Ends the processes. Nothing can be asked afterwards."""
        atexit.unregister(self.close)
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def _submit(self, task: tuple[str, np.ndarray, BatchShape]) -> int:
        with self._lock:
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            number = ticket % self.num_workers
            self._collect(number)
            try:
                self._pipes[number].send(task)
            except OSError:
                raise self._why_dead(number) from None
            self._busy[number] = ticket
            return ticket

    def _receive(self, ticket: int) -> Arrays:
        with self._lock:
            if ticket not in self._done:
                self._collect(ticket % self.num_workers)
            result = self._done.pop(ticket)
        if isinstance(result, BaseException):
            raise result
        return result

    def _collect(self, number: int) -> None:
        """Takes the result that process ``number`` owes, if it owes one: another stream may have asked for it."""
        ticket = self._busy.pop(number, None)
        if ticket is None:
            return
        try:
            result = self._pipes[number].recv()
        except (EOFError, OSError):
            raise self._why_dead(number) from None
        if ticket in self._dropped:
            self._dropped.discard(ticket)
        else:
            self._done[ticket] = result

    def _why_dead(self, number: int) -> UserError:
        process = self._processes[number]
        process.join(timeout=5.0)
        code = process.exitcode
        how = (
            f"was killed by signal {-code} ({signal.Signals(-code).name})"
            if code is not None and code < 0
            else f"ended with code {code}"
        )
        return UserError(
            f"a process that prepares batches {how}",
            where=f"data.workers, process {process.pid}",
            why="something outside the run ended it; where memory is short, the system does",
            fix="start again: the run resumes from its newest checkpoint; or lower data.workers (0: one thread "
            "of the rank itself)",
            exit_code=EXIT_FAILED,
            kind=FAULT,
        )


def _serve(open_samples: OpenSamples, pipe: Connection) -> None:
    # Ctrl-C and a cluster's SIGTERM reach the whole group; the rank finishes its step and saves, and needs its batches.
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    sample_sets: Mapping[str, Samples] | None = None
    while True:
        try:
            name, rows, shape = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            sample_sets = open_samples() if sample_sets is None else sample_sets
            result: Any = collate_samples(sample_sets[name], rows, shape)
        except Exception as error:
            result = _portable(error)
        try:
            pipe.send(result)
        except OSError:
            return


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
