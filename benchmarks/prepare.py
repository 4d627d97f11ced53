"""What preparing 1 GB of conversations costs: rows and tokens a second, memory of all processes, and what a rank adds.

    python benchmarks/prepare.py --model FOLDER --folder SCRATCH [--megabytes 1000 --rows 500000 --output
    benchmarks/results/prepare.jsonl]

Memory is the proportional set size (PSS) of all processes of the preparation, sampled every half second: a page that k
k processes share counts 1/k in each. The tokenizer's own rate is ``encode_batch`` alone, with offsets and the list of
ids of each text, by as many processes of one thread as there are cores, all at once: what one gets alone is more than
what each gets beside the others. They take rows of the same file, rendered beforehand, 200 texts at a time, before the
preparation and again after it. Neither reading, rendering nor loading is in it. Where others work on the machine too,
the rates by CPU seconds (of the preparation: of all processes, starting included) are the ones to compare. Nothing but
the result is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

SAMPLE_EVERY_S = 0.5
NUM_READERS = 4
ENCODED_ROWS = 4000  # by each process
COMMON = """the a of to and in that is was he for it with as his on be at by had not are but from or have an they which
one you were all her she there would their we him been has when who will no more if out so up said what its about than
into them can only other time new some could these two may first then do any like my now over such our man me even most
made after also"""
PREPARE = """
import sys, time
from manyhands.config.schema import RunConfig
from manyhands.data.tokenize.prepare import prepare
start = time.monotonic()
config = RunConfig.model_validate_json(sys.argv[1])
facts = prepare(config, sys.argv[2], lambda line: print(line, file=sys.stderr, flush=True))
print(facts.model_dump_json())
print(time.monotonic() - start)
"""
READ = """
import json, sys
import numpy as np
from manyhands.data.store.store import TokenStore
def memory():
    lines = open("/proc/self/smaps_rollup").read().split("\\n")
    names = ("Pss", "Anonymous")
    return {name: int(line.split()[1]) / 1024 for line in lines for name in names if line.startswith(name + ":")}
before = memory()
store = TokenStore.open(sys.argv[1])
total = 0
for index in np.random.default_rng(int(sys.argv[2])).integers(0, store.train.num_samples, 20_000):
    sample = store.train.sample(int(index))
    total += int(sample["tokens"][sample["mask"]].sum())
print("ready", flush=True)
sys.stdin.readline()
after = memory()
print(json.dumps({name: round(after[name] - before[name], 1) for name in after}), flush=True)
sys.stdin.read()
"""
ENCODE = """
import itertools, json, sys, time
from manyhands.data.tokenize.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
first, num_samples = int(sys.argv[3]), int(sys.argv[4])
rows = [json.loads(line)["messages"] for line in itertools.islice(open(sys.argv[2]), first, first + num_samples)]
texts = tokenizer.apply_chat_template(rows, tokenize=False)
print("ready", flush=True)
sys.stdin.readline()
start = time.process_time()
num_tokens = sum(len(encoding.ids) for at in range(0, len(texts), 200)
                 for encoding in tokenizer.backend_tokenizer.encode_batch(texts[at:at + 200], add_special_tokens=False))
print(json.dumps([num_tokens, time.process_time() - start]), flush=True)
sys.stdin.read()
"""


def write_rows(path: Path, num_samples: int, num_bytes: int) -> None:
    """Conversations of one to four turns whose lengths have a long tail; words mixed of a common and a rare part."""
    draw = random.Random(0)
    common = COMMON.split()
    rare = ["".join(draw.choices("etaoinshrdlucmfwypvbgk", k=draw.randint(4, 10))) for _ in range(30_000)]
    mean_words = num_bytes / num_samples / 5.0
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_samples):
            num_turns = draw.choice((1, 1, 2, 4))
            messages = []
            for turn in range(2 * num_turns):
                share = draw.lognormvariate(-0.32, 0.8) * mean_words / (2 * num_turns)
                words = draw.choices(common, k=max(2, int(share * 0.9))) + draw.choices(
                    rare, k=max(1, int(share * 0.1))
                )
                messages.append(
                    {"role": ("user", "assistant")[turn % 2], "content": " ".join(words) + f" ({number}.{turn})"}
                )
            file.write(json.dumps({"messages": messages}) + "\n")


class PeakMemory(threading.Thread):
    """PSS of a process and all below it, in MiB: the largest sum seen, and how many processes there were then."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._ended = pid, threading.Event()
        self.peak_mib, self.num_processes = 0.0, 0

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            try:
                sizes = [
                    _read_pss(process.pid)
                    for process in (psutil.Process(self._pid), *psutil.Process(self._pid).children(recursive=True))
                ]
            except psutil.Error:
                continue
            if sum(sizes) > self.peak_mib:
                self.peak_mib, self.num_processes = sum(sizes), len(sizes)

    def end(self) -> None:
        self._ended.set()
        self.join()


def _read_pss(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (OSError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def run_on_all_ranks(code: str, arguments: list[list[str]], **environment: str) -> list[Any]:
    """What a process for each list of arguments prints, as JSON, after all have said that they are ready; none ends
    before the last.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *own],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for own in arguments
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    results = []
    for process in processes:
        assert process.stdout is not None
        results.append(json.loads(process.stdout.readline()))
    for process in processes:
        process.communicate()
    return results


def measure_encoding(model: str, path: Path, num_samples: int) -> list[list[float]]:
    """[tokens, CPU seconds] of ``encode_batch`` in each of as many processes as there are cores, over different
    rows.
    """
    cores = len(os.sched_getaffinity(0))
    share = min(ENCODED_ROWS, num_samples // cores)
    return run_on_all_ranks(
        ENCODE,
        [[model, str(path), str(core * share), str(share)] for core in range(cores)],
        TOKENIZERS_PARALLELISM="false",
        RAYON_NUM_THREADS="1",
    )


def measure_preparation(config: dict[str, Any], model: str) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, "-c", PREPARE, json.dumps(config), model], stdout=subprocess.PIPE, text=True
    )
    memory = PeakMemory(process.pid)
    memory.start()
    output, _ = process.communicate()
    memory.end()
    if process.returncode:
        sys.exit("the preparation failed")
    facts, seconds = output.strip().splitlines()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "facts": json.loads(facts),
        "seconds": float(seconds),
        "cpu_seconds": cpu_seconds,
        "peak_mib": memory.peak_mib,
        "num_processes": memory.num_processes,
    }


def measure_readers(store: str) -> list[dict[str, float]]:
    """What each of several processes adds by opening the store and reading 20,000 rows of it, all at the same time."""
    return run_on_all_ranks(READ, [[store, str(number)] for number in range(NUM_READERS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    folder = asked.folder / "prepare-bench"
    folder.mkdir(parents=True)
    try:
        path = folder / "rows.jsonl"
        write_rows(path, asked.rows, asked.megabytes * 1_000_000)
        cores = len(os.sched_getaffinity(0))
        encoded = measure_encoding(asked.model, path, asked.rows)
        load = os.getloadavg()[0]
        data = {"train": str(path), "cache": str(folder / "cache"), "max_length": 8192, "too_long": "truncate"}
        measured = measure_preparation({"name": "bench", "model": {"name": asked.model}, "data": data}, asked.model)
        encoded += measure_encoding(asked.model, path, asked.rows)
        encode_rate = sum(tokens for tokens, _ in encoded) / sum(cpu_seconds for _, cpu_seconds in encoded)
        facts = measured["facts"]
        num_tokens = facts["num_tokens"] + facts["num_validation_tokens"]
        result = {
            "file_bytes": path.stat().st_size,
            "num_samples": facts["num_samples"] + facts["num_validation_samples"],
            "num_tokens": num_tokens,
            "cores": cores,
            "load_before": round(load, 1),
            "seconds": round(measured["seconds"], 1),
            "rows_per_s": round(asked.rows / measured["seconds"]),
            "tokens_per_s": round(num_tokens / measured["seconds"]),
            "tokens_per_cpu_s": round(num_tokens / measured["cpu_seconds"]),
            "encode_tokens_per_cpu_s": round(encode_rate),
            "share_of_encode_rate": round(num_tokens / measured["seconds"] / (encode_rate * cores), 3),
            "share_of_encode_rate_per_cpu_s": round(num_tokens / measured["cpu_seconds"] / encode_rate, 3),
            "peak_mib": round(measured["peak_mib"]),
            "num_processes": measured["num_processes"],
            "readers_added_mib": measure_readers(facts["folder"]),
        }
        print(json.dumps(result, indent=1))
        if asked.output is not None:
            with asked.output.open("a") as file:
                file.write(json.dumps(result) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
