"""A sharded model is written as one process would write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.export.adapter import export_adapter
from manyhands.export.model import export_model
from tests.export.tiny import METHOD, adapt, make_model, save_source
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed


def test_two_ranks_write_the_same_files_as_one_process(world: Ranks, tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", make_model())
    assert world.run("tests.export.export_ranks:write", tmp_path / "two", source, world_size=2) == [
        (True, 28),
        (False, 0),
    ]
    model = adapt(make_model())
    export_model(tmp_path / "single" / "model", model, source, "bfloat16", rank=0)
    export_model(tmp_path / "single" / "merged", model, source, "float32", rank=0, merge=True)
    export_adapter(tmp_path / "single" / "adapter", model, METHOD, str(source), rank=0)
    ours, theirs = (
        {p.relative_to(tmp_path / d): p.read_bytes() for p in (tmp_path / d).rglob("*") if p.is_file()}
        for d in ("single", "two")
    )
    assert ours == theirs
    assert len(ours) > 10


def test_a_full_disk_on_rank_0_ends_the_export_on_both(world: Ranks, tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", make_model())
    texts = world.run("tests.export.export_ranks:write_on_a_full_disk", tmp_path, source, world_size=2)
    assert len(texts) == 2 and all(
        text.startswith("No space left on device") and text.endswith("; False") for text in texts
    ), texts
