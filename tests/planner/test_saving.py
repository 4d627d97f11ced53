"""Whether the plan writes checkpoints beside the training: where host memory suffices, and said with its bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from manyhands.checkpoint.staging import Staging
from manyhands.core.errors import UserError
from manyhands.planner.search import plan
from tests.keys.lab import Lab, open_lab
from tests.planner.examples import GIB, data_facts, facts, llama_8b, run_config
from tests.support.plans import explain_why

ONE = llama_8b().num_parameters
LONG = data_facts(num_samples=5000, mean=3000, longest=4096)


def planned(host_gib: int = 500, gpus: int = 4, **keys):
    config = run_config(method__name="full", **{"checkpoint__every_steps": 16} | keys)
    return plan(config, facts(llama_8b(), gpus=gpus, host_bytes=host_gib * GIB, data=LONG))


def writing(made) -> list[str]:
    return [text.removeprefix("checkpoint writing: ") for text in explain_why(made) if "checkpoint writing" in text]


def test_each_rank_stages_its_share_of_masters_and_moments():
    made = planned()
    assert made.async_checkpoints and made.layout.strategy == "fsdp"
    assert made.memory.host_terms == {"staging": 12 * ONE // 4} and made.memory.host_limit == int(0.9 * 500 * GIB) // 4
    (text,) = writing(made)
    assert text == "by another process while training continues, through 22.4 GiB of host memory per rank"


def test_replicas_share_a_checkpoint_by_tensors():
    made = plan(run_config(), facts(llama_8b(), gpus=4, data=LONG))
    assert made.layout.strategy == "ddp" and made.disk is not None
    assert made.memory.host_terms["staging"] == made.disk.checkpoint_bytes // 4


def test_where_the_host_has_too_little_memory_training_waits():
    made = planned(host_gib=60)
    assert not made.async_checkpoints and not made.memory.host_terms
    (text,) = writing(made)
    assert text.startswith("while training waits, as staging needs 22.4 GiB of host memory per rank and 13.5 GiB")
    with pytest.raises(UserError, match="cannot be written while training continues") as caught:
        planned(host_gib=60, checkpoint__asynchronous=True)
    assert "staging needs 22.4 GiB" in caught.value.why


def test_what_is_offloaded_comes_first():
    assert planned(host_gib=190, gpus=1, parallel__offload="optimizer").memory.host_terms.keys() == {"optimizer"}
    both = planned(host_gib=500, gpus=1, parallel__offload="optimizer").memory.host_terms
    assert both["staging"] == 12 * ONE


def test_on_a_cpu_the_line_of_memory_includes_staging():
    made = planned(gpus=0)
    [line] = [reason for reason in made.why if reason.code == "memory"]
    assert made.memory.terms["staging"] > 0 and line.values["bytes"] == made.memory.total


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"checkpoint__asynchronous": False}, "while training waits, as asked"),
        ({"parallel__strategy": "zero2"}, "while training waits, as DeepSpeed's partitions are gathered for it"),
    ],
)
def test_training_waits_where_it_is_asked_to_and_under_zero(keys, why):
    made = planned(gpus=8, **keys)
    assert not made.async_checkpoints and writing(made) == [why]


def test_a_single_checkpoint_at_the_end_has_nothing_beside_it():
    made = planned(checkpoint__every_steps=0)
    assert not made.async_checkpoints and not writing(made) and not made.memory.host_terms
    assert planned(checkpoint__every_steps=0, checkpoint__every_minutes=5).async_checkpoints


def test_the_run_takes_as_much_less_as_it_writes_beside_the_steps():
    waits, beside = (planned(checkpoint__asynchronous=asked, checkpoint__every_steps=100) for asked in (False, True))
    assert waits.time is not None and beside.time is not None
    num = -(-waits.num_steps // 100)
    assert num > 1 and 100 * waits.time.step_s > waits.time.checkpoint_s
    assert waits.time.total_s - beside.time.total_s == pytest.approx((num - 1) * waits.time.checkpoint_s, rel=1e-4)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("saving")) as opened:
        yield opened


def test_a_run_stages_what_was_planned(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is part of the device's memory. Each of some 30 tensors is aligned to 64 bytes."""
    sizes: list[int] = []
    make_room = Staging.make_room
    monkeypatch.setattr(Staging, "make_room", lambda self: (sizes.append(self.num_bytes), make_room(self))[1])
    for method in ("full", "lora"):
        sizes.clear()
        ran = lab.run({"method.name": method, "checkpoint.every_steps": 2})
        estimate = ran.rank.plan.memory.terms["staging"]
        assert len(sizes) == 1 and estimate <= sizes[0] <= 1.1 * estimate + 64 * 100
