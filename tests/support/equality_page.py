"""The measured part of docs/equality.md, from the rows of benchmarks/results/equality*.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

PAGE = ROOT / "docs/equality.md"
LAYOUTS = ROOT / "benchmarks/results/equality.jsonl"
FAMILIES = ROOT / "benchmarks/results/equality-families.jsonl"
# Largest deviations of loss and gradient norm, relative to one process.
BOUNDS = {"float32": 1e-5, "float64": 1e-9, "bfloat16": 1e-3}
NORM_BOUNDS = {"float32": 1e-5, "float64": 1e-9, "bfloat16": 2e-2}
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def replace(rows: Sequence[Row], path: Path = LAYOUTS) -> None:
    """Puts ``rows`` in place of those of the same place, method, dtype and family, and writes the page."""

    def group(row: Row) -> list[Any]:
        return [row.get(name) for name in ("place", "method", "dtype", "family")]

    measured = [group(row) for row in rows]
    kept = [row for row in read(path) if group(row) not in measured]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *rows]), encoding="utf-8")
    PAGE.write_text(write_page(PAGE.read_text(encoding="utf-8"), read(LAYOUTS), read(FAMILIES)), encoding="utf-8")


def write_page(page: str, layouts: Sequence[Row], families: Sequence[Row]) -> str:
    """``page`` with its measured part from the rows."""
    lines = ["| where | dtype | methods | comparisons | largest deviation: loss | bound | gradient norm | bound |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    right = [row for row in layouts if not row["planted"]]
    for place, dtype in dict.fromkeys((row["place"], row["dtype"]) for row in right):
        own = [row for row in right if (row["place"], row["dtype"]) == (place, dtype)]
        values = [place, dtype, ", ".join(dict.fromkeys(row["method"] for row in own)), str(len(own))]
        values += [f"{max(row['loss'] for row in own):.1e}", f"{BOUNDS[dtype]:g}"]
        values += [f"{max(row['norm'] for row in own):.1e}", f"{NORM_BOUNDS[dtype]:g}"]
        lines.append("| " + " | ".join(values) + " |")
    planted = [row for row in layouts if row["planted"]]
    seen = [row for row in planted if row["loss"] > BOUNDS[row["dtype"]] and row["norm"] > NORM_BOUNDS[row["dtype"]]]
    lines += [
        "",
        f"Planted faults: {len(seen)} of {len(planted)} exceeded both bounds. The smallest deviation that one",
    ]
    lines += [f"of them caused: {min(row['loss'] for row in planted):.1e} of the loss, "]
    lines[-1] += f"{min(row['norm'] for row in planted):.1e} of the norm."
    loss, gradients = (max(row[f"packed_{name}"] for row in families) for name in ("loss", "gradients"))
    lines += ["", f"Families that pack, within {loss:.1e} of the loss and {gradients:.1e} of the gradients:"]
    lines += [", ".join(row["family"] for row in families) + "."]
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + rest.partition(END)[2]
