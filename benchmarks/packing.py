"""How full packs are, and how long laying them out takes: real lengths of GSM8K, and the same with a long tail.

    python benchmarks/packing.py --model SMOLLM2 --data gsm8k/train.jsonl > benchmarks/results/packing.jsonl

One JSON line for each data set, batch, number of ranks and capacity, over one epoch's full steps (at most --steps),
then one for laying out every step of a million rows. ``efficiency`` is tokens over ranks x the longest padded pack of
any rank, summed over micro-batches; ``possible`` bounds it for any layout (whole tiles, and the longest rows that
share a rank). ``before`` is the same for packs that are all padded to the capacity.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from manyhands.data.batch.order import SampleOrder
from manyhands.data.batch.pack import lay_out_packed, least_load, packing_efficiency, padded_tokens

CAPACITIES = (8192, 16_384)


def read_lengths(model: Path, data: Path) -> np.ndarray:
    """Tokens of every row of GSM8K as a conversation of two turns."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = []
    for line in data.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        lengths.append(len(tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]))
    return np.array(lengths, dtype=np.int64)


def add_tail(lengths: np.ndarray, share: float = 0.25) -> np.ndarray:
    """One row in four more is drawn log-normally (median 665) and cut to 64..4096."""
    rng = np.random.default_rng(0)
    num_tail = int(len(lengths) * share / (1 - share))
    return np.concatenate([lengths, np.clip(np.exp(rng.normal(6.5, 1.0, num_tail)), 64, 4096).astype(np.int64)])


def possible_tokens(lengths: np.ndarray, num_ranks: int) -> int:
    """What the best layout of a step would pay for, at least."""
    descending = sorted(lengths.tolist(), reverse=True)
    return num_ranks * padded_tokens(max(-(-sum(descending) // num_ranks), least_load(descending, num_ranks)))


def measure(
    name: str, lengths: np.ndarray, batch_samples: int, num_ranks: int, capacity: int, max_steps: int
) -> dict[str, object]:
    order = SampleOrder(len(lengths), 0, batch_samples=batch_samples)
    steps = [order.samples(0, index) for index in range(min(max_steps, len(lengths) // batch_samples))]
    begin = time.process_time()
    layouts = [lay_out_packed(rows, lengths, num_ranks, capacity) for rows in steps]
    seconds = time.process_time() - begin
    tokens = int(sum(lengths[rows].sum() for rows in steps))
    num_micro = sum(layout.num_micro_batches for layout in layouts)
    return {
        "data": name,
        "batch_samples": batch_samples,
        "ranks": num_ranks,
        "capacity": capacity,
        "steps": len(steps),
        "efficiency": round(packing_efficiency(layouts, lengths), 4),
        "possible": round(tokens / sum(possible_tokens(lengths[rows], num_ranks) for rows in steps), 4),
        "before": round(tokens / (num_micro * num_ranks * capacity), 4),
        "micro_batches_a_step": round(num_micro / len(steps), 2),
        "layout_ms_a_step": round(1e3 * seconds / len(steps), 3),
    }


def measure_million(lengths: np.ndarray, num_ranks: int = 8, batch_samples: int = 512) -> dict[str, object]:
    many = np.random.default_rng(1).choice(lengths, 1_000_000).astype(np.int32)
    begin = time.process_time()
    order = SampleOrder(len(many), 0, batch_samples=batch_samples)
    layouts = [
        lay_out_packed(order.samples(0, index), many, num_ranks, CAPACITIES[-1])
        for index in range(order.steps_per_epoch(0))
    ]
    seconds = time.process_time() - begin
    efficiency = round(packing_efficiency(layouts, many), 4)
    sizes = {"ranks": num_ranks, "batch_samples": batch_samples, "steps": len(layouts)}
    return {"data": "a million rows of the mix", **sizes, "efficiency": efficiency, "all_steps_s": round(seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    gsm8k = read_lengths(asked.model, asked.data)
    mix = add_tail(gsm8k)
    for name, lengths in (("gsm8k", gsm8k), ("gsm8k and a long tail", mix)):
        for batch_samples in (16, 64, 512):
            for num_ranks in (1, 2, 4, 8):
                for capacity in CAPACITIES:
                    print(
                        json.dumps(measure(name, lengths, batch_samples, num_ranks, capacity, asked.steps)), flush=True
                    )
    print(json.dumps(measure_million(mix)))


if __name__ == "__main__":
    main()
