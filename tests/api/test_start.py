"""What ``mh.train`` refuses before anything is started, and what reaches the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import manyhands as mh


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """A run that its launcher refuses, as there is no such model."""
    return {"name": "none", "model": {"name": str(tmp_path / "none")}, "data": {"train": "none.jsonl"},
            "output": {"dir": str(tmp_path / "runs")}}  # fmt: skip


@pytest.mark.parametrize("hooks", [(), ["module:name"]], ids=["", "hooks"])
def test_a_fresh_run_reaches_the_launcher(keys: dict[str, Any], hooks: Any) -> None:
    with pytest.raises(mh.UserError, match="none' is no folder"):
        mh.train(keys, fresh=True, hooks=hooks)
