"""Raw rows: JSON, one a line, appended as they come, so that what was measured survives what comes after."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def new_run() -> str:
    """A name for the rows that one call of ``manyhands bench`` measures."""
    return time.strftime("%Y%m%dT%H%M%S")


RUN = new_run()  # of rows that are of no other: one call of a script


def append(path: Path, row: dict[str, Any]) -> None:
    """Every row names the run that it is of."""
    with path.open("a") as file:
        file.write(json.dumps({"run": RUN} | row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All rows; none where there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def say(row: dict[str, Any], path: Path | None, prefix: str = "") -> None:
    """Prints a row, and appends it where a file is asked for."""
    print(prefix + json.dumps(row), flush=True)
    if path is not None:
        append(path, row)
