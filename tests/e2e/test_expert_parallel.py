"""A run whose experts two processes divide: the course of one process, resumed by one, and an adapter that PEFT opens
in the verification.
"""

from __future__ import annotations

import pytest
from safetensors import safe_open

from tests.e2e.runs import NUM_STEPS, Place, Spec
from tests.support.tiny import write_tiny_model


@pytest.mark.ci
def test_two_processes_divide_experts_and_one_goes_on(place: Place) -> None:
    mixture = write_tiny_model(place.folder / "mixture", "qwen3_moe", num_hidden_layers=2)
    plain = ("method.dropout=0", f"model.name={mixture}")
    divided = (*plain, "parallel.expert_degree=2", "parallel.strategy=fsdp")
    output = place.many(
        Spec(1, "experts-one", plain),
        Spec(2, "experts-two", divided),
        Spec(2, "experts-broken", divided, {"step": 7}),
        Spec(1, "experts-broken", plain),
    )
    assert "deprecated" not in output
    one = place.run("experts-one")
    names = []
    for run in (one, place.run("experts-two"), place.run("experts-broken")):
        assert run.seen() == one.seen() and len(run.seen()) == NUM_STEPS
        assert run.losses() == pytest.approx(one.losses(), rel=1e-4)
        with safe_open(run.folder / "adapter" / "adapter_model.safetensors", "pt") as file:
            names.append([(name, file.get_slice(name).get_shape()) for name in file.keys()])  # noqa: SIM118
    assert names[0] == names[1] == names[2] and any("experts" in name for name, _ in names[0])
