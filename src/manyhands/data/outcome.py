"""What became of the rows of one part: counts, notes and faults. Travels between processes as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.data.files import Findings
from manyhands.data.sources import raise_unreadable


@dataclass
class Outcome:
    """What became of the rows of one part; travels between processes as JSON."""

    num_samples: int = 0
    num_tokens: int = 0
    num_truncated: int = 0  # rows cut at max_length
    num_split: int = 0  # documents that became several rows
    num_straddling_tokens: int = 0  # tokens across the border of a trained span
    num_rows_with_markers: int = 0  # rows whose content spells an added token
    num_rows_with_placeholders: int = (
        0  # rows whose images, videos or audio are left out, but not the marks of where they stood
    )
    longest: int = 0  # tokens of the longest row that was too long
    formats: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # columns that hold something and are not read
    left_out: list[str] = field(default_factory=list)  # those of data.ignore
    unreadable: Findings = field(default_factory=Findings)
    refused: Findings = field(default_factory=Findings)
    too_long: Findings = field(default_factory=Findings)

    COUNTS: ClassVar = (
        "num_truncated",
        "num_split",
        "num_straddling_tokens",
        "num_rows_with_markers",
        "num_rows_with_placeholders",
    )  # what stands in the store's description

    def to_meta(self) -> dict[str, Any]:
        """What a store remembers of it, once there are no faults."""
        return {
            name: getattr(self, name)
            for name in ("num_samples", "num_tokens", *self.COUNTS, "formats", "notes", "unread", "left_out")
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self), default=vars), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Outcome:
        values = json.loads(path.read_text(encoding="utf-8"))
        for name in ("unreadable", "refused", "too_long"):
            findings = Findings()
            findings.count, findings.shown, findings.stopped = (
                values[name][key] for key in ("count", "shown", "stopped")
            )
            values[name] = findings
        return Outcome(**values)

    def add(self, other: Outcome) -> None:
        """Takes in the part that follows."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(mine, Findings):
                mine.extend(value)
            elif isinstance(mine, list):
                mine += [entry for entry in value if entry not in mine]
            else:
                setattr(self, name, max(mine, value) if name == "longest" else mine + value)

    def raise_if_any(self, config: RunConfig, where: str) -> None:
        """A UserError with up to 20 faults of the rows, what cannot be read at all before what cannot be trained."""
        raise_unreadable(self.unreadable, where)
        self.refused.raise_if_any("{n} rows cannot be trained", where=where, fix="correct or remove these rows")
        max_length, too_long = config.data.max_length, config.data.too_long
        divides = (
            ", split to make several samples of each"
            if config.task == "cpt"
            else ", split to divide texts" * (config.task == "mixed")
        )
        self.too_long.raise_if_any(
            "{n} rows are longer than data.max_length",
            where=where,
            why=f"data.max_length is {max_length:,} tokens and data.too_long is {too_long}"
            f"{', which cannot divide conversations' * (too_long == 'split')}; the longest row has "
            f"{self.longest:,} tokens",
            fix=f"set data.too_long to truncate to cut them{divides if too_long == 'error' else ''}, or raise "
            f"data.max_length",
        )
        if not self.num_samples:
            raise UserError(
                "the file holds no rows",
                where=where,
                why="every line is blank",
                fix="give a file with at least one row",
            )
