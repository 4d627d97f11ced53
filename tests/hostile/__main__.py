"""Hostile files: everything that is read from disk, with random faults put into it.

    python -m tests.hostile --count 1000000 --jobs 2 --record benchmarks/results/hostile.jsonl
    python -m tests.hostile --count 5000 --kinds manifest,adapter --seed 7
    python -m tests.hostile --kinds run --case 4711       # one case again, with its traceback

A case fails if what reads the file ends in anything but a result or a ``UserError``, takes longer than ``LIMIT_S``,
needs more than ``LIMIT_BYTES`` of memory, or writes outside of the case's folder. Case n of a kind is a function of
(kind, seed, n). The exit code says whether any case failed. Rows of data files that hypothesis makes up have a test of
their own (``tests/data/test_broken.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from tests.hostile.kinds import KINDS, Kind, arrange, make_places

LIMIT_S, BLOCKED_S = 10.0, 300.0  # of CPU time, which a busy machine does not lengthen; and by the clock
LIMIT_BYTES = 3 << 30  # beyond what the process has when it begins
WRITES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.truncate")


class TooSlow(BaseException):
    """No handler of the product's catches it."""


class Outside(BaseException):
    """Something was written where no case may write."""


_ALLOWED: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _ALLOWED or event not in WRITES:
        return
    if event == "open" and not (
        isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    ):
        return
    path = arguments[1] if event in ("os.rename", "os.symlink") else arguments[0]
    if isinstance(path, int) or "__pycache__" in str(path):
        return
    folder = arguments[-1] if event in ("os.remove", "os.rmdir", "os.mkdir") else -1  # an open one that it is below
    place = os.path.join(f"/proc/self/fd/{folder}" if folder >= 0 else "", os.fsdecode(path))
    if not os.path.realpath(place).startswith(_ALLOWED[0]):
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
    parser.add_argument("--count", type=int, default=10_000, help="cases, divided among the kinds by their shares")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case of each kind, with its traceback")
    parser.add_argument("--place", type=Path, help="a folder for the valid files, made if it is not there")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--part", type=int, default=0, help="which of them this is")
    parser.add_argument("--record", type=Path, help="JSON lines to append what each kind came to")
    asked = parser.parse_args()
    asked.names = [name.strip() for name in asked.kinds.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        place = asked.place or Path(temporary) / "place"
        if not (place / "templates").exists():
            place.mkdir(parents=True, exist_ok=True)
            make_places(place)
        others = [start_part(part, place) for part in range(1, asked.jobs)] if asked.part == 0 else []
        failed = try_all(asked, place, Path(temporary) / "case")
        return max([int(failed), *(other.wait() for other in others)])


def start_part(part: int, place: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.hostile", *sys.argv[1:], "--place", place, "--part", str(part)]
    )


def try_all(asked: argparse.Namespace, place: Path, work: Path) -> bool:
    """Whether any case of this process's part failed."""
    signal.signal(signal.SIGALRM, _too_slow)
    signal.signal(signal.SIGPROF, _too_slow)
    faulthandler.enable()
    sys.addaudithook(_audit)
    found: Counter[str] = Counter()
    shares = sum(KINDS[name].share for name in asked.names)
    for name in asked.names:
        kind, began = KINDS[name], time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            kind.read(arrange(place, replace(kind, change=lambda _, raw: raw), name, asked.seed, 0, work))  # valid
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, hard))
        numbers = range(asked.part, round(asked.count * kind.share / shares), asked.jobs)
        failed = 0
        for number in numbers if asked.case is None else [asked.case]:
            (work.parent / "last").write_text(f"{name} {number}")  # a case that ends the process leaves it there
            error = try_case(kind, arrange(place, kind, name, asked.seed, number, work))
            if error is None:
                continue
            failed += 1
            key = f"{name}: {where_of(error)}"
            if not found[key]:
                again = f"--kinds '{name}' --seed {asked.seed} --case {number}"
                print(f"{key}: {str(error)[:200]!r} ({again})", flush=True)
            if asked.case is not None:
                traceback.print_exception(error)
            found[key] += 1
        row = {"kind": name, "seed": asked.seed, "part": asked.part, "cases": len(numbers), "failed": failed}
        row |= {"seconds": round(time.monotonic() - began), "when": datetime.date.today().isoformat()}
        print(f"{name}: {len(numbers):,} cases, {failed:,} failed, {row['seconds']} s", flush=True)
        if asked.record is not None:
            with asked.record.open("a") as record:
                record.write(json.dumps(row) + "\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
