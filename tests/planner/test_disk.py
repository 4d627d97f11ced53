"""What a run writes, compared with what there is room for: by hand, and with a real checkpoint and result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from safetensors import safe_open

from manyhands.core.errors import UserError
from manyhands.planner.search import plan
from tests.keys.lab import Lab, open_lab
from tests.planner.examples import GIB, facts, llama_8b, run_config


def disk_of(free: int | None = None, **keys):
    given = facts(llama_8b(), gpus=8).model_copy(update={"free_disk_bytes": free})
    return plan(run_config(**{"checkpoint__every_steps": 5} | keys), given).disk


def test_checkpoints_hold_masters_and_moments_and_the_result_the_model():
    full, one = disk_of(method__name="full"), llama_8b().num_parameters
    assert (full.checkpoint_bytes, full.num_checkpoints, full.result_bytes) == (12 * one, 3, 2 * one)
    lora = disk_of(method__rank=16)
    adapter = 41_943_040  # 16 (in + out) over the linear layers of 32 blocks
    assert (lora.checkpoint_bytes, lora.result_bytes) == (12 * adapter, 4 * adapter)
    assert disk_of(output__merge=True, method__rank=16).result_bytes == 4 * adapter + 2 * one
    assert disk_of(checkpoint__every_steps=0, method__name="full").num_checkpoints == 1
    assert disk_of(checkpoint__keep_best=True, checkpoint__keep_last=4, method__name="full").num_checkpoints == 6
    every = {"checkpoint__every_steps": 1, "checkpoint__keep_last": "all"}
    assert disk_of(**every, stop__max_steps=9, method__name="full").num_checkpoints == 9


def test_a_disk_without_room_is_refused_with_what_to_do():
    need = disk_of(method__name="full").total + 2**24
    assert disk_of(free=need, method__name="full").total == need - 2**24
    with pytest.raises(UserError, match="not enough disk space for this run: it needs 28") as caught:
        disk_of(free=need - 1, method__name="full")
    assert "checkpoint.keep_last=1" in caught.value.fix and "3 checkpoints of" in caught.value.why
    assert disk_of(free=need // 2, method__name="full", checkpoint__every_steps=0).total < need // 2 < 200 * GIB


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("disk")) as opened:
        yield opened


def num_bytes(folder) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    return total


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"method.name": "full"},
        {"method.name": "full", "optimizer.name": "adafactor"},
        {"method.name": "full", "output.dtype": "bfloat16"},
    ],
    ids=str,
)
def test_the_estimate_is_what_a_run_writes(lab: Lab, keys) -> None:
    ran = lab.export(keys)
    disk, name = ran.rank.plan.disk, "adapter" if not keys else "model"
    (checkpoint,) = (ran.folder / "checkpoints").iterdir()
    assert num_bytes(checkpoint) == pytest.approx(disk.checkpoint_bytes, rel=0.01)
    assert num_bytes(ran.folder / name) == pytest.approx(disk.result_bytes, rel=0.01)
    assert disk.free_bytes > 0
