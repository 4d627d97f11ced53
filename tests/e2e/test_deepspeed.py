"""A run by DeepSpeed through the launcher that is killed, goes on under FSDP2 and back, and ends as if it never was."""

from __future__ import annotations

import json

import pytest

from tests.e2e.runs import NO_VERIFY, NUM_STEPS, Place, at_step, kill_once

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900)]  # five starts


def test_a_run_changes_between_zero_and_fsdp(place: Place) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is an extra: pip install 'manyhands[deepspeed]'")
    two = ("parallel.gpus=2", "evaluate.at_start=false", "evaluate.every_steps=0", "evaluate.max_new_tokens=1")
    whole = place.train("zero-whole", *two, "parallel.strategy=fsdp", plant=NO_VERIFY)
    assert whole.code == 0, whole.output
    for step, strategy in ((5, "zero3"), (9, "fsdp")):
        kill = kill_once(place.folder / f"zero-{step}", saved=step - 1)
        broken = place.train("zero", *two, f"parallel.strategy={strategy}", plant=at_step(step, kill, rank=1))
        assert broken.code != 0 and "rank 1" in broken.output, broken.output
    ended = place.train("zero", *two, "parallel.strategy=zero2", "parallel.offload=optimizer")
    assert ended.code == 0 and "resumed after step 8" in ended.output, ended.output
    assert "verified" in ended.output and "DeepSpeed's partitions, on the CPU" in ended.output
    run, reference = place.run("zero"), place.run("zero-whole")
    assert [step for step, *_ in run.course()] == list(range(1, NUM_STEPS + 1))
    assert run.losses() == pytest.approx(reference.losses(), rel=1e-5)
    assert json.loads((run.folder / "run.json").read_text())["parallel"]["strategy"] == "zero2"
