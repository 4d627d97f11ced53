"""Errors for the user, and those of packages that only some runs need. Knows neither torch nor files.

A ``UserError`` is printed in a few short lines (what, where, why, fix) and ends the program with its exit code. Any
other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator, Mapping

from manyhands.core.text import printable

# What a launcher can act on: UserError.kind.
OUT_OF_MEMORY = "out_of_memory"
DISK_FULL = "disk_full"
DAMAGED = "damaged_checkpoint"  # an older one may be sound
FAULT = "fault"  # of a process or a connection, nothing that the user has written: another attempt may succeed

# Exit codes, as documented in docs/reference/files.md.
EXIT_FAILED = 1  # a bug, or a rank that failed
EXIT_USAGE = 2  # the run file, the data or the command line is wrong
EXIT_INTERRUPTED = 130  # Ctrl-C
EXIT_TERMINATED = 143  # SIGTERM
EXIT_SAVED = 138  # SIGUSR1, by which SLURM announces the end of a job's time: saved, to be started again


class PeerError(RuntimeError):
    """Another rank failed and reports its error; this rank just ends."""


class UserError(Exception):
    """An error that the user can fix. Parts have no capital at the start and no full stop at the end.

    ``what`` is one sentence; ``where`` a file and line, a key or a folder; ``why`` the cause; ``fix`` what to do.
    ``details`` lists single findings (broken lines, wrong keys), about twenty at most. For programs: ``kind``;
    ``data``, numbers by name; ``rank``, whose failure it is, where the launcher knows.
    """

    rank: int | None = None

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        why: str = "",
        fix: str = "",
        details: list[str] | tuple[str, ...] = (),
        exit_code: int = EXIT_USAGE,
        kind: str = "",
        data: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.fix = what, where, why, fix
        self.details = tuple(details)
        self.exit_code = exit_code
        self.kind = kind
        self.data = dict(data or {})

    def __str__(self) -> str:
        lines = [f"error: {self.what}"]
        lines += [f"  - {detail}" for detail in self.details]
        lines += [
            f"  {name}: {text}" for name, text in (("where", self.where), ("why", self.why), ("fix", self.fix)) if text
        ]
        return printable("\n".join(lines))

    def to_json(self) -> str:
        """The error as one line, as a rank sends it to the launcher."""
        parts = ("what", "where", "why", "fix", "details", "exit_code", "kind", "data")
        return json.dumps({part: getattr(self, part) for part in parts})

    @staticmethod
    def from_json(text: str) -> UserError:
        fields = json.loads(text)
        return UserError(fields.pop("what"), **fields)

    def __reduce__(self):  # keyword arguments do not survive the default pickling between processes
        return (UserError.from_json, (self.to_json(),))


def explain_foreign(error: BaseException) -> UserError | None:
    """A library's error that the user can change as a UserError, else None. A panic of Rust is a BaseException."""
    if type(error).__module__ == "pyo3_runtime":
        return UserError(
            "a library gave up on a text",
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            fix="where the tokenizer's pattern (tokenizer.json, pre_tokenizer) backtracks, correct it; else shorten the"
            " longest texts, or leave them out",
            exit_code=EXIT_FAILED,
        )
    if isinstance(error, RuntimeError) and str(error) == "Could not determine home directory.":  # pathlib's
        return UserError(
            "there is no home folder for a path that begins with ~",
            where="HOME",
            why="HOME is not set and this user id has no entry in the list of users, or ~NAME names nobody",
            fix="export HOME=/a/folder, or write the path without ~ (data.cache is ~/.cache/manyhands/data by default)",
        )
    return None


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """A panic within is a RuntimeError, which those around handle as any other error of a library."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def has_deepspeed() -> bool:
    """Whether DeepSpeed is installed; it is not imported."""
    return importlib.util.find_spec("deepspeed") is not None


def missing_deepspeed(why: str = "the package deepspeed is not installed") -> UserError:
    """The error where a strategy needs a package that is not installed."""
    return UserError(
        "parallel.strategy: zero1, zero2 and zero3 need DeepSpeed",
        where="parallel.strategy",
        why=why,
        fix="pip install 'manyhands[deepspeed]', or use parallel.strategy=fsdp, which shards what zero3 shards",
    )


def require_extras(strategy: str) -> None:
    """UserError where a run's strategy needs a package that is not installed."""
    if strategy.startswith("zero") and not has_deepspeed():
        raise missing_deepspeed()


def require_server(where: str, why: str, extra: str) -> None:
    """Raises ``UserError`` unless what the servers are made with is installed; ``extra`` of the wheel has it."""
    missing = [package for package in ("starlette", "uvicorn") if importlib.util.find_spec(package) is None]
    if missing:
        what = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise UserError(what, where=where, why=why, fix=f"pip install 'manyhands[{extra}]'")
