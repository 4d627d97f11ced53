"""A planned run folder for any number of fake workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from manyhands.launch.run.folder import RunFolder
from manyhands.planner.types import Plan
from tests.launch.builders import make_config, make_plan


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., tuple[RunFolder, Plan]]:
    """``planned("end", "kill")``: a folder whose rank 0 will end well and whose rank 1 will be killed."""

    def build(*acts: str) -> tuple[RunFolder, Plan]:
        folder = RunFolder(tmp_path / "runs" / "demo")
        folder.create()
        plan = make_plan(len(acts))
        folder.write_config(make_config())
        folder.write_plan(plan)
        (folder.path / "fake.json").write_text(json.dumps(acts))
        return folder, plan

    return build
