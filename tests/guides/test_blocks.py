"""Every configuration block of the guides, as it is printed there, with model and data replaced by tiny ones.

The guides stand beside the repository: ``MANYHANDS_GUIDES``, or ``../shared/references``. Their keys and values are
tested without them in ``tests/importers``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.core.errors import has_deepspeed
from manyhands.planner.types import Plan
from tests.guides.conftest import FAST, ROOT, call

FOLDERS = (os.environ.get("MANYHANDS_GUIDES"), ROOT.parent / "shared/references")
GUIDES = next((Path(folder) for folder in FOLDERS if folder and Path(folder).is_dir()), None)
pytestmark = pytest.mark.skipif(GUIDES is None, reason="MANYHANDS_GUIDES names no folder with the guides")

ACCELERATE, DEEPSPEED = "--accelerate-config", "--deepspeed"
ZERO_2, ZERO_3 = ("zero2", "zero3") if has_deepspeed() else ("fsdp", "fsdp")
QLORA_4 = ("parallel.gpus=4",)
NO_WARMUP = ("schedule.warmup_steps=0",)  # the tool's default of 100 steps is longer than the run
# guide, index among its blocks, option that takes it (run files: none), overrides, what the plan must then have
BLOCKS = (
    ("sft-play", 0, "", (), {"strategy": "single"}),
    ("sft-play", 1, DEEPSPEED, ("parallel.gpus=2",), {"strategy": ZERO_3, "offload": "optimizer"}),
    ("sft-play", 2, "", (), {}),
    ("synth-ai", 0, "", (), {"strategy": ZERO_2, "world_size": 4, "reshard_after_forward": False}),
    ("synth-ai", 2, "", QLORA_4, {"world_size": 4}),
    ("synth-ai", 3, "", (), {}),
    ("synth-ai", 4, "", (), {}),
    ("synth-ai", 5, "", (), {}),
    ("theworld", 0, ACCELERATE, (), {"strategy": "single", "world_size": 1}),
    ("theworld", 1, ACCELERATE, (), {"strategy": "ddp", "world_size": 2}),
    ("theworld", 2, ACCELERATE, (), {"strategy": "fsdp", "world_size": 2}),
    ("theworld", 3, "", NO_WARMUP, {"activation_checkpointing": "full"}),
    ("theworld", 4, "", NO_WARMUP, {"activation_checkpointing": "full"}),
    ("theworld", 5, "", NO_WARMUP, {}),
    ("theworld", 6, ACCELERATE, (), {"world_size": 4}),
)
RANKS = {
    ("sft-play", 0): 2,
    ("synth-ai", 2): 4,
    ("sft-play", 1): 2,
    ("synth-ai", 0): 2,
    ("theworld", 1): 2,
    ("theworld", 2): 2,
}  # else 1
TRAINED = tuple((guide, index, RANKS.get((guide, index), 1)) for guide, index, *_ in BLOCKS)


@cache
def blocks(guide: str) -> list[tuple[str, str]]:
    """(syntax, text) of a guide's configuration files."""
    assert GUIDES is not None
    return re.findall(r"```(yaml|toml|json)\n(.*?)```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL)


def arguments(place: Path, guide: str, index: int, option: str, folder: Path) -> list[str]:
    """``train``'s arguments for a block: as the run file, or as what an option adds to the run file of ``place``."""
    syntax, text = blocks(guide)[index]
    folder.mkdir(exist_ok=True)
    file = folder / f"{guide}-{index}.{syntax}"
    file.write_text(text)
    if option:
        return ["train", str(place / "run.yaml"), option, str(file)]
    return ["train", str(file), f"model.name={place}/model", f"data.train={place}/rows.jsonl"]


def test_the_guides_have_sixteen_blocks() -> None:
    assert sum(len(blocks(guide)) for guide in ("sft-play", "synth-ai", "theworld")) == 16 == len(BLOCKS) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "index", "option", "overrides", "expected"), BLOCKS, ids=[f"{block[0]}-{block[1]}" for block in BLOCKS]
)
def test_a_block_is_planned(
    place: Path, tmp_path: Path, guide: str, index: int, option: str, overrides: tuple[str, ...],
    expected: dict[str, object],
) -> None:  # fmt: skip
    common = [f"output.dir={tmp_path}/runs", f"data.cache={place}/cache", "name=block", "data.max_length=128"]
    common += ["data.validation_fraction=0.1", *(key for key in overrides if not key.startswith("parallel.gpus"))]
    command = [*arguments(place, guide, index, option, tmp_path), *common, *overrides, "--dry-run"]
    done = CliRunner().invoke(app, command, catch_exceptions=True)
    assert done.exit_code == 0, f"{done.output}\n{done.exception}"
    layout = Plan.model_validate_json((tmp_path / "runs/block/plans/001.json").read_text()).layout
    assert {key: getattr(layout, key) for key in expected} == expected


@pytest.mark.slow
@pytest.mark.parametrize(("guide", "index", "ranks"), TRAINED, ids=[block[0] for block in TRAINED])
def test_a_block_is_trained_to_the_end(place: Path, tmp_path: Path, guide: str, index: int, ranks: int) -> None:
    option, overrides = next(block[2:4] for block in BLOCKS if block[:2] == (guide, index))
    common = [f"output.dir={tmp_path}/runs", f"data.cache={place}/cache", "name=block", "data.max_length=128"]
    common += ["data.validation_fraction=0.1", *(key for key in overrides if not key.startswith("parallel.gpus"))]
    command = [*arguments(place, guide, index, option, tmp_path), *common, f"parallel.gpus={ranks}", *FAST.split()]
    done = call(sys.executable, "-m", "manyhands", *command)
    assert done.returncode == 0, done.stdout
    run = tmp_path / "runs/block"
    assert json.loads((run / "report.json").read_text())["planned"]["world_size"] == ranks
    assert (run / "report.md").is_file() and (run / "checkpoints").is_dir()
    assert (run / "adapter/adapter_config.json").is_file() or (run / "model/config.json").is_file()
