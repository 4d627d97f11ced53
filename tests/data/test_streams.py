"""A stream that nobody has heard of goes from written samples through store, packing and collation to a model, with
the right values at the right positions, by its declaration alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from manyhands.core.errors import UserError
from manyhands.data.batch.batches import Batch, collate_here, iterate
from manyhands.data.batch.collate import BatchShape, BatchWorkers, open_store_samples
from manyhands.data.batch.pack import lay_out_packed, lay_out_unpacked
from manyhands.data.store.segment import SegmentWriter, finish_store, join_segments
from manyhands.data.store.store import TokenStore
from manyhands.data.store.streams import (
    MASK,
    TEXT,
    TOKENS,
    BatchEntry,
    Stream,
    check_streams,
    cut_to_loss,
    describe_streams,
    make_sample,
    read_streams,
)
from manyhands.model.inputs import batch_shape
from manyhands.model.loss import LossModel
from manyhands.planner.layout import Mesh
from manyhands.worker import batches as worker_batches

# A value a token; one a label (that of the token which is predicted); patches of a picture, of any number.
PITCH = Stream("pitch", "<f4", along="tokens", entries=(BatchEntry("pitch", "float32", fill=-1.0),))
REWARD = Stream("reward", "<f8", (2,), "tokens", entries=(BatchEntry("reward", "float64", shifted=True, where="mask"),))
PATCHES = Stream("patches", "<f2", (3,), entries=(BatchEntry("pixels", "float32"),))
STREAMS = check_streams((*TEXT, PITCH, REWARD, PATCHES))

LENGTHS = (5, 3, 8, 2, 6, 4)
NUM_PATCHES = (2, 0, 1, 3, 0, 4)


def make(number: int) -> dict[str, np.ndarray]:
    """Sample ``number``: every value says which sample and position it belongs to."""
    length = LENGTHS[number]
    places = 100 * number + np.arange(length)
    mask = places % 3 != 0
    weights = np.where(mask, 0.5, 0).astype(np.float32) if number == 4 else None
    return {
        **make_sample(places.astype(np.int32), mask, weights),
        "pitch": (places + 0.25).astype(np.float32),
        "reward": np.stack([places + 0.5, -places], axis=1),
        "patches": (10 * number + np.arange(3 * NUM_PATCHES[number])).reshape(-1, 3).astype(np.float16),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("streams") / "store", [4])


def write_store(folder: Path, cuts: list[int]) -> Path:
    bounds, segments = [0, *cuts, len(LENGTHS)], []
    for start, end in pairwise(bounds):
        writer = SegmentWriter(folder / "segments" / str(start), STREAMS)
        for number in range(start, end):
            writer.append(make(number), number + 1)
        writer.finish()
        segments.append(writer.folder)
    join_segments(folder, segments, [0] * len(segments), STREAMS)
    meta = {"digest": "d", "seed": 0, "sources": [{"weight": 1.0}]}
    finish_store(folder, np.arange(len(LENGTHS)), np.array([], np.int64), meta, STREAMS)
    (folder / "segments").rmdir()
    return folder


def test_samples_come_back_with_all_their_streams(folder: Path, tmp_path: Path) -> None:
    store = TokenStore.open(folder, check_tokens=True)
    assert store.train.streams == STREAMS
    for number in range(len(LENGTHS)):
        found, written = store.train.sample(number), make(number)
        assert found.keys() == {stream.name for stream in STREAMS}
        for name, values in written.items():
            assert np.array_equal(found[name], values) and found[name].dtype == values.dtype, name
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    for cuts in ([], [1], [4, 5], [6]):
        again = write_store(tmp_path / str(cuts), cuts)
        assert {path.name: path.read_bytes() for path in again.iterdir()} == files


class Base(torch.nn.Module):
    """Takes what a batch holds as a model's layers take it, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.seen: Batch = {}

    def forward(
        self, input_ids: Any, pitch: Any, reward: Any, pixels: Any, cu_pixels: Any, use_cache: bool, **others: Any
    ) -> tuple[torch.Tensor]:
        assert not others.keys() - {"position_ids"}
        self.seen = {"input_ids": input_ids, "pitch": pitch, "reward": reward, "pixels": pixels, "cu_pixels": cu_pixels}
        return (self.scale * torch.stack([pitch, reward[..., 0].float()], dim=-1),)


class Causal(torch.nn.Module):
    """A causal model of the kind that transformers has, with a base and a head."""

    base_model_prefix = "base"
    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.config = PretrainedConfig(vocab_size=600)
        self.config._attn_implementation = "sdpa"
        self.base, self.lm_head = Base(), torch.nn.Linear(2, 600)

    def forward(self, inputs_embeds: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.base(inputs_embeds=inputs_embeds).last_hidden_state))


def expected_at(number: int, position: int) -> tuple[float, list[float]]:
    sample = make(number)
    following = position + 1
    has_label = following < LENGTHS[number] and sample["mask"][following]
    return sample["pitch"][position], sample["reward"][following].tolist() if has_label else [0.0, 0.0]


@pytest.mark.parametrize("in_workers", [False, True], ids=["in process", "in worker processes"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_new_streams_reach_the_model_by_their_declaration(folder: Path, packed: bool, in_workers: bool) -> None:
    store = TokenStore.open(folder)
    shape, rows = BatchShape(packed=packed, tile=8 if packed else 1), np.array([3, 0, 5, 1, 4, 2])
    layout = lay_out_packed(rows, store.train.lengths, 2, 12) if packed else lay_out_unpacked(rows, 2, 2)
    workers = BatchWorkers(functools.partial(open_store_samples, folder), 1) if in_workers else None
    collate = (
        collate_here(store.train, shape) if workers is None else functools.partial(workers.collate, "train", shape)
    )
    seen: list[int] = []
    for rank in range(2):
        for _, batches in iterate([layout], rank, torch.device("cpu"), collate):
            for numbers, batch in zip(layout.of_rank(rank), batches, strict=True):
                check_batch(numbers.tolist(), batch, packed)
                seen += numbers.tolist()
    assert sorted(seen) == list(range(len(LENGTHS)))
    if workers is not None:
        workers.close()


def check_batch(numbers: list[int], batch: Batch, packed: bool) -> None:
    model = LossModel(Causal())
    loss_sum, weight = model(batch)["lm"]
    loss_sum.backward()
    assert weight == (batch["loss_weights"].sum() if "loss_weights" in batch else (batch["labels"] != -100).sum())
    assert (model.model.base.scale.grad.abs() > 0) == bool(numbers)
    seen = model.model.base.seen
    size = seen["input_ids"].shape
    places = {}  # of a position in the batch: (sample, its position)
    start = 0
    for index, number in enumerate(numbers):
        for position in range(LENGTHS[number]):
            places[(0, start + position) if packed else (index, position)] = (number, position)
        start += LENGTHS[number]
    assert seen["pitch"].shape == size and seen["reward"].shape == (*size, 2)
    assert seen["pitch"].dtype == torch.float32 and seen["reward"].dtype == torch.float64
    for place in np.ndindex(*size):
        if place in places:
            number, position = places[place]
            assert seen["input_ids"][place] == 100 * number + position
            pitch, reward = expected_at(number, position)
        else:
            pitch, reward = -1.0, [0.0, 0.0]
        assert seen["pitch"][place] == pitch and seen["reward"][place].tolist() == reward, place
        assert (batch["labels"][place] != -100) == (reward != [0.0, 0.0])
    patches = [patch for number in numbers for patch in make(number)["patches"].tolist()]
    assert seen["pixels"].tolist() == patches and seen["pixels"].dtype == torch.float32
    assert seen["pixels"].shape == (len(patches), 3) and seen["cu_pixels"].dtype == torch.int32
    assert seen["cu_pixels"].tolist() == np.cumsum([0, *(NUM_PATCHES[number] for number in numbers)]).tolist()


@pytest.mark.parametrize("name", ["pitch", "reward", "patches"])
def test_damage_to_any_stream_is_seen(name: str, tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", [3])
    store = TokenStore.open(folder)
    raw = bytearray((folder / f"{name}.bin").read_bytes())
    raw[-1] ^= 1
    (folder / f"{name}.bin").write_bytes(raw)
    with pytest.raises(UserError, match="token cache is damaged") as caught:
        [store.train.sample(number) for number in range(len(LENGTHS))]
    assert f"{name}.bin" in caught.value.where
    with pytest.raises(UserError, match="token cache is damaged"):
        TokenStore.open(folder, check_tokens=True)
    (folder / f"{name}.bin").write_bytes(raw[:-1])
    with pytest.raises(UserError, match="token cache is damaged"):
        TokenStore.open(folder)


def test_samples_with_other_patches_are_no_copies(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "one", STREAMS)
    for change in (0, 0, 1):
        writer.append({**make(0), "patches": make(0)["patches"] + change}, 1)
    writer.append({**make(0), "pitch": make(0)["pitch"] + 1}, 1)
    writer.finish()
    first, same, other, along = np.load(tmp_path / "one" / "hashes.npy").tolist()
    assert first == same == along != other


WRONG: dict[str, Mapping[str, Any]] = {
    "missing": {"pitch": None},
    "too short": {"pitch": np.zeros(4, np.float32)},
    "another item": {"patches": np.zeros((2, 4), np.float16)},
    "not declared": {"depth": np.zeros(5, np.float32)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_sample_that_is_not_as_declared_is_refused(wrong: str, tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "one", STREAMS)
    given = {name: values for name, values in {**make(0), **WRONG[wrong]}.items() if values is not None}
    with pytest.raises(ValueError, match=r"has no stream|items|declared"):
        writer.append(given, 1)
    writer.close()


CONTRADICTIONS: dict[str, tuple[Stream, ...]] = {
    "no tokens": (PATCHES,),
    "twice": (*TEXT, TOKENS),
    "one entry of two": (*TEXT, Stream("other", "<f4", along="tokens", entries=(BatchEntry("labels", "float32"),))),
    "along nothing": (*TEXT, Stream("other", "<f4", along="words")),
    "along a stream along another": (*TEXT, Stream("other", "<f4", along="mask")),
    "a mask of another length": (*TEXT,
                                 Stream("other", "<f4", entries=(BatchEntry("other", "float32", where="mask"),))),
    "shifted alone": (*TEXT, Stream("other", "<f4", entries=(BatchEntry("other", "float32", shifted=True),))),
    "a default of another length": (*TEXT, Stream("other", "<f4", default_from="mask")),
    "a path": (*TEXT, Stream("../other", "<f4", along="tokens")),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradicting_declarations_are_refused(case: str) -> None:
    with pytest.raises(ValueError):
        check_streams(CONTRADICTIONS[case])


def test_declarations_travel_as_json() -> None:
    assert read_streams(describe_streams(STREAMS)) == STREAMS
    assert describe_streams((TOKENS, MASK)) != describe_streams(TEXT)


def test_a_long_sample_is_cut_where_it_has_a_loss() -> None:
    """A self-test sees few tokens of a long sample, its last loss token and what lies along them; no fewer patches."""
    ids, mask = np.arange(100, dtype=np.int32), np.zeros(100, dtype=bool)
    mask[10:61] = True  # a prompt, an answer, and what follows it
    sample = {**make_sample(ids, mask, mask * 0.5), "patches": np.zeros((7, 3)), "pitch": ids / 2}
    streams = (*TEXT, PITCH, PATCHES)
    cut = cut_to_loss(sample, streams, 16)
    assert cut["tokens"].tolist() == list(range(45, 61))
    assert cut["pitch"].tolist() == [number / 2 for number in range(45, 61)]
    assert cut["mask"].all() and len(cut["weights"]) == 16 and len(cut["patches"]) == 7
    assert cut_to_loss(sample, streams, 100) is sample
    early = cut_to_loss(make_sample(ids, ids < 5), TEXT, 16)  # the loss ends before so many tokens
    assert early["tokens"].tolist() == list(range(16)) and early["mask"].sum() == 5


def test_the_batch_of_self_tests_is_small_however_long_samples_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run uncompiled: one sample of 32k tokens needed more memory there than its training."""
    monkeypatch.setattr(worker_batches, "PROBE_TOKENS", 64)
    ids = np.arange(500, dtype=np.int32)
    sample = make_sample(ids, ids >= 480, np.float32(ids >= 480))
    train = SimpleNamespace(streams=TEXT, sample=lambda _: sample, lengths=np.array([500]), num_images=None)
    data: Any = SimpleNamespace(
        order=SimpleNamespace(samples=lambda epoch, step: np.array([0])),
        store=SimpleNamespace(train=train, validation=train),
    )
    rank: Any = SimpleNamespace(
        config=None,
        world=SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu")),
        plan=SimpleNamespace(
            packing=True,
            shares_prompts=False,
            layout=SimpleNamespace(compile=False, device="cpu", pack_tokens=None, mesh=Mesh(), exchanges_heads=False),
        ),
    )
    batch = worker_batches.probe_batch(rank, data, SimpleNamespace(needs_documents=False, images=None))  # type: ignore
    assert batch["input_ids"].tolist() == [list(range(436, 500))] and int((batch["labels"] >= 0).sum()) == 20


@pytest.mark.parametrize(("compiled", "pack_tokens", "row_length"), [(False, 8, 4), (False, None, None), (True, 8, 4)])
def test_batches_of_samples_of_one_length_say_so_compiled_or_not(
    compiled: bool, pack_tokens: int | None, row_length: int | None
) -> None:
    """Attention takes the faster kernel for rows of one length by it."""
    lengths = SimpleNamespace(lengths=np.array([4, 4, 4]), num_images=None)
    layout = SimpleNamespace(
        compile=compiled, device="cpu", pack_tokens=pack_tokens, mesh=Mesh(), exchanges_heads=False
    )
    store: Any = SimpleNamespace(train=lengths, validation=lengths)
    plan, model = (
        SimpleNamespace(packing=True, shares_prompts=False, layout=layout),
        SimpleNamespace(needs_documents=False, images=None),
    )
    shape = batch_shape(None, plan, store, model)  # type: ignore[arg-type]
    assert shape.row_length == row_length
    assert shape.tokens == (pack_tokens if compiled else None)  # no padding, for which attention copies its result
