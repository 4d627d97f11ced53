"""Functions of the caller that see a run's rows while it trains, read from metrics.jsonl where the ranks are other
processes; and the name by which another process can import a function or class of the caller's. Imports no torch.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from manyhands.core.errors import UserError
from manyhands.core.files import parse_rows
from manyhands.launch.run.folder import RunFolder

MAX_REASON = 500  # characters

Row = dict[str, Any]
Callback = Callable[[Row], object]


PARAMETERS = {"step": "on_step", "evaluation": "on_evaluate", "checkpoint": "on_checkpoint"}  # by the kind of row


@dataclass
class Callbacks:
    """Functions by kind of row. Keeps the first exception and calls none afterwards: whoever runs the run raises it."""

    functions: Mapping[str, Callback | None] = field(default_factory=dict)
    error: BaseException | None = None
    raised: str = ""  # the parameter whose function raised ``error``

    def explain(self, folder: RunFolder, log: TextIO) -> None:
        """Records why a run is asked to end, with the traceback in ``log``; not for Ctrl-C, which the status names."""
        if self.error is None or isinstance(self.error, KeyboardInterrupt):
            return
        reason = " ".join("".join(traceback.format_exception_only(self.error)).split())[:MAX_REASON]
        folder.ask_to_end(f"{self.raised} raised {reason}")
        with contextlib.suppress(OSError):
            traceback.print_exception(self.error, file=log)
            log.flush()

    def __bool__(self) -> bool:
        return any(function is not None for function in self.functions.values())

    def __call__(self, row: Row) -> None:
        function = self.functions.get(row["kind"])
        if function is None or self.error is not None:
            return
        try:
            function(row)
        except BaseException as error:
            self.error, self.raised = error, PARAMETERS[row["kind"]]


def check_functions(functions: Mapping[str, Any], hooks: Any, metrics: Any) -> None:
    """UserError for callbacks that cannot be called, and hooks and metrics that are no list and no dict."""
    for kind, function in functions.items():
        if function is not None and not callable(function):
            what = f"{PARAMETERS[kind]} is a {type(function).__name__}, not a function"
            raise UserError(what, fix="give a function of one row, a dict as in metrics.jsonl")
    if isinstance(hooks, (str, Mapping)) or not isinstance(hooks, Iterable):
        what = f"hooks is a {type(hooks).__name__}, not a list"
        raise UserError(what, fix="give a list of functions, or of their names: hooks=['module:name']")
    if metrics is not None and not isinstance(metrics, Mapping):
        what = f"metrics is a {type(metrics).__name__}, not a dict"
        raise UserError(what, fix="give functions by the name of their figure: metrics={'name': function}")


class Follower:
    """New rows of a metrics.jsonl that another process writes; a resumed run replaces the file by a shorter one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode, self._offset = 0, 0
        self._seen: set[tuple[Any, ...]] = set()
        self.read()  # what is there already was seen by whoever started the run before

    def read(self) -> list[Row]:
        """Complete lines that were not read before, in order."""
        try:
            with open(self.path, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        rows = []
        for row in parse_rows(text.decode("utf-8", "replace")):
            key = row.get("kind"), row.get("step"), row.get("time")
            if key[0] in PARAMETERS and key not in self._seen:
                self._seen.add(key)
                rows.append(row)
        return rows


def name_object(thing: Any) -> str:
    """``module:name``, or ``path/to/script.py:name`` for the main script. UserError where no rank could import it."""
    if isinstance(thing, str):
        return thing
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if module is None or not name or "<" in name:
        raise _unnamed(thing, "it has no name in a module" if "<lambda>" not in name else "a lambda has no name")
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and file is None:
        raise _unnamed(thing, "it is defined in a notebook or on a console")
    if file is not None and (module == "__main__" or _is_beside_script(module, Path(file))):
        return f"{Path(file).resolve()}:{name}"
    return f"{module}:{name}"


def _is_beside_script(module: str, file: Path) -> bool:
    """A module that only this script's own folder makes importable."""
    return "." not in module and bool(sys.path) and file.parent == Path(sys.path[0] or ".").resolve()


def _unnamed(thing: Any, why: str) -> UserError:
    return UserError(
        f"{getattr(thing, '__qualname__', type(thing).__name__)} cannot be imported by the ranks",
        why=f"{why}, and hooks and metrics run in processes of their own",
        fix="put it into a module (in a notebook: %%writefile my_hooks.py), and give it or 'my_hooks:name'",
    )
