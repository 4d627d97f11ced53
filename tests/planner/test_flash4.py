"""FlashAttention 4 in plans: the estimated step with the package, and the hint without it."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.facts import host
from manyhands.facts.types import Facts
from manyhands.launch.nodes.info import join_hosts
from manyhands.planner.search import plan
from manyhands.planner.types import Plan
from tests.planner.examples import data_facts, facts, llama_8b, run_config
from tests.support.plans import explain_why


def make_facts(length: int, *, installed: bool = False, capability: tuple[int, int] = (9, 0)) -> Facts:
    data = data_facts(num_samples=100, mean=length, longest=length, num_validation_tokens=20 * length)
    found = facts(llama_8b(), gpus=1, host_bytes=512 * 2**30, data=data)
    gpus = tuple(gpu.model_copy(update={"compute_capability": capability}) for gpu in found.host.gpus)
    return found.model_copy(update={"host": found.host.model_copy(update={"gpus": gpus, "has_flash4": installed})})


def make_plan(length: int, keys: dict[str, Any] | None = None, **changes: Any) -> Plan:
    return plan(run_config(method__name="lora", batch__samples=1, **keys or {}), make_facts(length, **changes))


def test_a_step_of_131072_tokens_takes_a_tenth_less() -> None:
    """33.8 s in place of 37.3 on an H200 (docs/lab/speed.md), products in fp8."""
    keys = {"kernels__linear": "fp8"}
    without, with_it = (make_plan(131_072, keys, installed=installed) for installed in (False, True))
    assert without.time.step_s and with_it.time.step_s
    assert with_it.time.step_s / without.time.step_s == pytest.approx(33.84 / 37.35, abs=0.02)
    assert not explain_why(with_it, "flash4")
    (line,) = explain_why(without, "flash4")
    assert "some 10% shorter (pip install 'manyhands[flash4]')" in line


@pytest.mark.parametrize(
    "length, keys, changes",
    [
        (131_072, {}, {"capability": (8, 0)}),
        (8_192, {"model__dtype": "float32"}, {}),
        (2_048, {}, {}),  # it would save 1 %
    ],
)
def test_nothing_is_said_where_it_would_not_help(length: int, keys: dict[str, Any], changes: dict[str, Any]) -> None:
    without, with_it = (make_plan(length, keys, installed=installed, **changes) for installed in (False, True))
    assert not explain_why(without, "flash4")
    if changes or keys:
        assert with_it.time == without.time


@pytest.mark.parametrize("installed", [(True, True), (True, False)])
def test_all_nodes_need_it(installed: tuple[bool, ...]) -> None:
    hosts = [make_facts(8, installed=each).host for each in installed]
    assert join_hosts(hosts).has_flash4 == all(installed)


@pytest.mark.parametrize("version", ["", "4.0.0b36"])
def test_an_installed_package_is_found(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(host, "installed_version", lambda package: asked.append(package) or version)
    assert host.read_host_facts({}).has_flash4 == bool(version) and asked == ["flash-attn-4"]
