"""Hostile files: everything that is read from disk, with random faults put into it.

    python -m tests.hostile --count 100000                 # of all kinds; the exit code says whether any case failed
    python -m tests.hostile --count 5000 --kinds manifest,adapter --seed 7
    python -m tests.hostile --kinds plan --case 4711       # one case again, with its traceback

A case fails if what reads the file ends in anything but a result or a ``UserError``, takes longer than ``LIMIT_S``,
needs more than ``LIMIT_BYTES`` of memory, or writes outside of the case's folder. Case n of a kind is a function of
(kind, seed, n). Rows of data files have a test of their own (``tests/data/test_broken.py``), as chat templates do
(``tests/data/test_template_bounds.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from manyhands.config.dialects.translation import Around
from manyhands.config.load import load_run
from manyhands.core.errors import UserError

LIMIT_S, BLOCKED_S = 10.0, 300.0  # of CPU time, which a busy machine does not lengthen; and by the clock
LIMIT_BYTES = 3 << 30  # beyond what the process has when it begins

NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, -(2**63) - 1, 1e308, -0.0, 1e-320, float("inf"), float("nan")),
    *("", " ", "\x00", "\ud800", "a" * 5000, "é\u202e", "1e5", "null", "auto", "../../../etc/passwd", "/dev/zero", "-"),
    *([], {}, [[]], [None], {"": None}, {"a": {"a": {"a": 1}}}, [1] * 2000, "[" * 900, "{" * 900, "%s%n", "*", "&a"),
)
TOKENS = tuple(
    b'\x00 \xff \xef\xbb\xbf \xff\xfe {{{{ ]]]] "" :: - ,, &a *a !!python/object:os.system'.split()
    + b"NaN 1e999 -0 \r \x1b[2J".split()
)


def change_bytes(rng: random.Random, raw: bytes) -> bytes:
    """One to four faults: bits, missing, repeated, moved and foreign bytes, an early end."""
    found = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        end = min(len(found), at + rng.choice((1, 1, 2, 8, 64, 1024)))
        kind = rng.randrange(6)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[at:end]
        elif kind == 2:
            found[at:at] = found[at:end] * rng.choice((1, 1, 3))
        elif kind == 3:
            found[at:at] = rng.choice(TOKENS)
        elif kind == 4:
            del found[at:]
        else:
            found[at:end] = rng.randbytes(end - at)
    return bytes(found)


def change_values(rng: random.Random, value: Any) -> Any:
    """One to three faults in a tree of plain values: another value, a missing, renamed or further key."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return copy.deepcopy(rng.choice(NASTY))
        inside, key = rng.choice(places)
        kind = rng.randrange(5)
        if kind == 0 and isinstance(inside, dict):
            inside[rng.choice(("x", "", str(key) + "s", "name", "__class__"))] = inside.pop(key)
        elif kind == 1:
            del inside[key]
        elif kind == 2 and isinstance(inside, dict):
            other_inside, other = rng.choice(places)
            with contextlib.suppress(LookupError):
                inside[key] = json.loads(json.dumps(other_inside[other]))
        else:
            inside[key] = copy.deepcopy(rng.choice(NASTY))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield value, key
            yield from _places(inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value[:50]):
            yield value, index
            yield from _places(inner)


def change_json(rng: random.Random, raw: bytes) -> bytes:
    if rng.random() < 0.4:
        return change_bytes(rng, raw)
    return json.dumps(change_values(rng, json.loads(raw))).encode("utf-8", "surrogatepass")


def change_yaml(rng: random.Random, raw: bytes) -> bytes:
    if rng.random() < 0.4:
        return change_bytes(rng, raw)
    changed = change_values(rng, yaml.safe_load(raw))
    with contextlib.suppress(yaml.YAMLError, UnicodeError):
        return yaml.safe_dump(changed, allow_unicode=True).encode()
    return json.dumps(changed).encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Kind:
    """One kind of file: ``files`` below the folder of ``make``, of which a case changes one; ``read`` gets the
    folder.
    """

    files: tuple[str, ...]
    change: Callable[[random.Random, bytes], bytes]
    read: Callable[[Path], Any]
    folder: str = ""  # below what ``make_places`` makes; what is changed is copied from there, the rest is linked


def read_run_file(path: Path) -> Any:
    return load_run(next(path.iterdir()), ["stop.max_steps=2"], around=Around(gpus=2, folder=path)).config


def read_override(path: Path) -> Any:
    """A file of lines, as they stand behind a command."""
    lines = (path / "overrides.txt").read_text(encoding="utf-8", errors="replace").split("\n")
    return load_run(path / "run.yaml", lines).config


def read_model(path: Path) -> Any:
    from manyhands.facts.model import read_model_facts

    return read_model_facts(path, "m", "pretrained")


def read_adapter(path: Path) -> Any:
    from manyhands.config.schema import RunConfig
    from manyhands.facts.adapter import find_adapter

    fields = {
        "name": "n",
        "model": {"name": "m"},
        "data": {"train": "r.jsonl"},
        "method": {"name": "lora", "adapter": str(path)},
    }
    return find_adapter(RunConfig.model_validate(fields), report=lambda text: None)


def read_checkpoint(path: Path) -> Any:
    from manyhands.checkpoint.manifest import check_sizes, read_manifest

    manifest = read_manifest(path)
    check_sizes(path, manifest)
    return manifest


def read_run_folder(path: Path) -> Any:
    from manyhands.launch.run_folder import RunFolder

    folder = RunFolder(path)
    folder.read_config()
    plan = folder.read_plan()
    return folder.read_status(), folder.ran_out_of_memory(plan), folder.newest_plan_number(), folder.read_failures()


def read_store(path: Path) -> Any:
    from manyhands.data.store import TokenStore

    store = TokenStore.open(path)
    return [store.train.sample(number) for number in range(min(3, store.train.num_samples))]


KINDS: dict[str, Kind] = {
    "run": Kind(("run.yaml",), change_yaml, read_run_file, "native"),
    "override": Kind(("overrides.txt",), change_bytes, read_override, "overridden"),
    "dialect": Kind(
        ("axolotl.yaml", "llamafactory.yaml", "trl.yaml", "deepspeed.yaml", "synth.toml.json"),
        change_yaml, read_run_file, "dialects",
    ),
    "model": Kind(("config.json", "model.safetensors"), change_json, read_model, "model"),
    "adapter": Kind(("adapter_config.json", "adapter_model.safetensors"), change_json, read_adapter, "adapter"),
    "checkpoint": Kind(("manifest.json",), change_json, read_checkpoint, "checkpoint"),
    "run folder": Kind(("run.json", "plan.json", "status.json"), change_json, read_run_folder, "runs/run"),
    "store": Kind(("meta.json",), change_json, read_store, "store"),
}  # fmt: skip

FILES = {
    "axolotl.yaml": "base_model: model\ndatasets:\n- path: rows.jsonl\n  type: chat_template\nadapter: lora\n"
    "lora_r: 8\nlora_alpha: 16\nlora_target_linear: true\nsequence_len: 512\nsample_packing: true\n"
    "micro_batch_size: 2\ngradient_accumulation_steps: 4\nnum_epochs: 1\noptimizer: adamw_torch\nlr_scheduler: cosine\n"
    "learning_rate: 0.0002\nbf16: auto\nwarmup_ratio: 0.1\nspecial_tokens: {pad_token: <pad>}\noutput_dir: ./out\n",
    "llamafactory.yaml": "model_name_or_path: model\nstage: sft\ndo_train: true\nfinetuning_type: lora\n"
    "lora_target: all\ndataset: rows\ndataset_dir: .\ntemplate: llama3\ncutoff_len: 512\noutput_dir: out\n"
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\nnum_train_epochs: 3.0\n",
    "trl.yaml": "model_name_or_path: model\ndataset_name: rows.jsonl\nuse_peft: true\nlora_r: 16\nlora_alpha: 32\n"
    "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nlearning_rate: 2.0e-4\npacking: true\n"
    "max_length: 1024\noutput_dir: out\n",
    "deepspeed.yaml": "zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}\ngradient_clipping: 1.0\n"
    "train_micro_batch_size_per_gpu: auto\nbf16: {enabled: auto}\n",
    "synth.toml.json": '{"algorithm": {"method": "supervised_finetune"}, "job": {"model": "model", "data": "r.jsonl"},'
    ' "hyperparameters": {"n_epochs": 1, "batch_size": 2}}',
}
OVERRIDES = (
    "batch.samples=8\nmethod.rank=4\ndata.train=[a.jsonl, {path: b.jsonl, weight: 2}]\noptimizer.betas=[0.9, 0.95]"
)


def make_places(folder: Path) -> None:
    """A valid file of each kind: a tiny run is trained for two steps."""
    import subprocess

    from tests.e2e.runs import write_place

    write_place(folder)
    command = [sys.executable, "-m", "manyhands", "train", "run.yaml", "output.dir=runs", "stop.max_steps=2"]
    command += ["checkpoint.every_steps=2", "evaluate.every_steps=2", "evaluate.max_tokens=200"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, wanted in {"native": ("run.yaml",), "overridden": ("run.yaml",)}.items():
        (folder / name).mkdir()
        for file in wanted:
            shutil.copy(folder / file, folder / name / file)
    (folder / "overridden" / "overrides.txt").write_text(OVERRIDES)
    (folder / "dialects").mkdir()
    for name, text in FILES.items():
        (folder / "dialects" / name).write_text(text)
    run = folder / "runs" / "run"
    (folder / "adapter").symlink_to(run / "adapter")
    (folder / "checkpoint").symlink_to(next((run / "checkpoints").glob("step-*")))
    (folder / "store").symlink_to(next(path.parent for path in (folder / "cache").rglob("meta.json")))


def arrange(place: Path, kind: Kind, name: str, seed: int, number: int, work: Path) -> Path:
    """The folder of one case: the files of its kind, one of them changed."""
    rng = random.Random(f"{name}/{seed}/{number}")
    source = (place / kind.folder).resolve()
    chosen = rng.choice(kind.files)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for path in source.iterdir():
        if path.name != chosen and kind.read is not read_run_file:
            (work / path.name).symlink_to(path)
    raw = (source / chosen).read_bytes()
    if chosen.endswith(".safetensors"):
        size = int.from_bytes(raw[:8], "little") + 8
        raw = change_bytes(rng, raw[: size + 64]) + raw[size + 64 :]
    else:
        raw = kind.change(rng, raw)
    (work / chosen).write_bytes(raw)
    return work


class TooSlow(BaseException):
    """No handler of the product's catches it."""


class Outside(BaseException):
    """Something was written where no case may write."""


_ALLOWED: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _ALLOWED or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink"):
        return
    if event == "open" and not (
        isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    ):
        return
    path = arguments[1] if event in ("os.rename", "os.symlink") else arguments[0]
    if isinstance(path, int) or "__pycache__" in str(path):
        return
    if not os.path.realpath(os.fsdecode(path)).startswith(_ALLOWED[0]):
        raise Outside(f"{event} {path}")


def _too_slow(number: int, frame: Any) -> None:
    raise TooSlow(f"longer than {LIMIT_S:g} s of CPU time, or {BLOCKED_S:g} s by the clock")


def try_case(kind: Kind, folder: Path) -> BaseException | None:
    """What went wrong; None for a result or a UserError."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, BLOCKED_S)
    _ALLOWED[:] = [os.path.realpath(folder)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            kind.read(folder)
    except UserError as error:
        return None if str(error).strip() else AssertionError("an error without a text")
    except (Exception, SystemExit, TooSlow, Outside) as error:
        return error
    finally:
        _ALLOWED.clear()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def where_of(error: BaseException) -> str:
    """The last line of the product that it passed through: equal faults are counted together."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/manyhands/" in frame.filename]
    last = f"{frames[-1].filename.split('/manyhands/')[-1]}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {last}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="cases, divided among the kinds")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case of each kind, with its traceback")
    parser.add_argument("--place", type=Path, help="a folder for the valid files, made if it is not there")
    asked = parser.parse_args()
    names = [name.strip() for name in asked.kinds.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        place = asked.place or Path(temporary) / "place"
        if not (place / "store").exists():
            place.mkdir(parents=True, exist_ok=True)
            make_places(place)
        return try_all(asked, names, place, Path(temporary) / "case")


def try_all(asked: argparse.Namespace, names: list[str], place: Path, work: Path) -> int:
    signal.signal(signal.SIGALRM, _too_slow)
    signal.signal(signal.SIGPROF, _too_slow)
    sys.addaudithook(_audit)
    for name in names:  # with everything imported, what a case may use beyond that is known
        try_case(KINDS[name], arrange(place, KINDS[name], name, asked.seed, 0, work))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, used + LIMIT_BYTES))
    found: Counter[str] = Counter()
    for name in names:
        numbers = range(asked.count // len(names)) if asked.case is None else [asked.case]
        began = time.monotonic()
        for number in numbers:
            error = try_case(KINDS[name], arrange(place, KINDS[name], name, asked.seed, number, work))
            if error is None:
                continue
            key = f"{name}: {where_of(error)}"
            if not found[key]:
                print(f"{key}: {str(error)[:200]!r} (--kinds '{name}' --seed {asked.seed} --case {number})", flush=True)
            if asked.case is not None:
                traceback.print_exception(error)
            found[key] += 1
        seconds = time.monotonic() - began
        failed = sum(count for key, count in found.items() if key.startswith(f"{name}: "))
        print(f"{name}: {len(numbers):,} cases, {failed:,} failed, {seconds:.0f} s", flush=True)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
