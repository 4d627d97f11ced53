"""The table in docs/claims.md is what the planner says."""

from __future__ import annotations

from pathlib import Path

from benchmarks.vision_tables import table, write_shape

CLAIMS = Path(__file__).parents[2] / "docs" / "claims.md"


def test_the_table_of_the_guide_is_the_planners(tmp_path: Path) -> None:
    model = write_shape(tmp_path)
    assert model.num_tower_parameters == model.tower.num_parameters + model.tower.num_projector_parameters
    text = CLAIMS.read_text(encoding="utf-8")
    assert text[text.index("| trained |") :].partition("\n\n")[0].splitlines() == list(table(model))
