"""How fast one thread collates: ``python -m benchmarks.collate [--tokens N]``. Samples of chat length (a median of
some 350 tokens) and of pre-training (2,048 tokens), packed to 16,384 tokens and padded by eights, from a store on
disk.

Prints tokens a second of the thread's own CPU time, the best of five passes over the same samples: what else the
machine does only slows a pass down.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from manyhands.data.batch.collate import BatchShape, collate_samples
from manyhands.data.store.segment import SegmentWriter, finish_store, join_segments
from manyhands.data.store.store import TokenStore
from manyhands.data.store.streams import make_sample

PASSES = 5
PACK_TOKENS = 16_384


def draw_lengths(kind: str, num_tokens: int) -> np.ndarray:
    if kind == "blocks":
        return np.full(max(8, num_tokens // 2048), 2048)
    draw = np.random.default_rng(0).lognormal(np.log(350), 0.8, num_tokens // 450)
    return np.clip(draw, 16, 4096).astype(int)


def write_store(folder: Path, lengths: np.ndarray, weighted: bool) -> TokenStore:
    draw = np.random.default_rng(1)
    writer = SegmentWriter(folder / "segment")
    for line, length in enumerate(lengths, start=1):
        mask = np.arange(length) >= length // 3
        weights = np.where(mask, 0.5, 0).astype(np.float32) if weighted else None
        writer.append(make_sample(draw.integers(0, 150_000, length).astype(np.int32), mask, weights), line)
    writer.finish()
    join_segments(folder, [writer.folder], [0])
    meta = {"digest": "d", "seed": 0, "sources": [{"weight": 1.0}]}
    finish_store(folder, np.arange(len(lengths)), np.array([], np.int64), meta)
    return TokenStore.open(folder)


def cut(lengths: np.ndarray, packed: bool) -> list[np.ndarray]:
    """Numbers of samples for each micro-batch."""
    if not packed:
        return [np.arange(start, min(start + 8, len(lengths))) for start in range(0, len(lengths), 8)]
    packs: list[list[int]] = [[]]
    room = PACK_TOKENS
    for number, length in enumerate(lengths.tolist()):
        if length > room:
            packs.append([])
            room = PACK_TOKENS
        packs[-1].append(number)
        room -= length
    return [np.array(pack) for pack in packs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    num_tokens = parser.parse_args().tokens
    for kind, weighted in (("chats", False), ("chats", True), ("blocks", False)):
        with tempfile.TemporaryDirectory() as folder:
            lengths = draw_lengths(kind, num_tokens)
            train = write_store(Path(folder) / "store", lengths, weighted).train
            for packed in (True, False):
                shape, units, seconds = BatchShape(packed=packed, tile=128 if packed else 1), cut(lengths, packed), []
                for _ in range(PASSES):
                    begin = time.thread_time()
                    for numbers in units:
                        collate_samples(train, numbers, shape)
                    seconds.append(time.thread_time() - begin)
                row = {"samples": kind, "weighted": weighted, "packed": packed}
                print(json.dumps(row | {"tokens_per_s": round(int(lengths.sum()) / min(seconds))}), flush=True)


if __name__ == "__main__":
    main()
