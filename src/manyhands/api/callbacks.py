"""Functions of the caller that see a run's rows while it trains: read from metrics.jsonl where the ranks are other
processes. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Callback = Callable[[Row], object]


@dataclass
class Callbacks:
    """By the kind of row (step, evaluation, checkpoint). The first exception of one is kept, and none is called
    afterwards: whoever runs the run ends it, and raises ``error``.
    """

    functions: Mapping[str, Callback | None] = field(default_factory=dict)
    error: BaseException | None = None

    def __bool__(self) -> bool:
        return any(function is not None for function in self.functions.values())

    def __call__(self, row: Row) -> None:
        function = self.functions.get(row["kind"])
        if function is None or self.error is not None:
            return
        try:
            function(row)
        except BaseException as error:
            self.error = error


class Follower:
    """New rows of a metrics.jsonl that another process writes; a resumed run replaces the file by a shorter one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode, self._offset = 0, 0
        self._seen: set[tuple[str, int, float]] = set()
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
        for line in text.splitlines():
            row = json.loads(line)
            key = row["kind"], row["step"], row["time"]
            if key not in self._seen:
                self._seen.add(key)
                rows.append(row)
        return rows
