"""An optimizer enters by one entry of the registry: it is configured, planned, trained, saved, resumed and imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.importers.load import config_from_mapping
from manyhands.optim.registry import OPTIMIZERS, names_in
from tests.keys.lab import Lab, open_lab
from tests.support.ranks import Ranks
from tests.training import signed


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("optimizer")) as lab:
        yield lab


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "signed", signed.SPEC)


def test_a_new_optimizer_is_planned_and_trained(lab: Lab) -> None:
    keys = {"method.name": "full", "stop.max_steps": 3, "checkpoint.every_steps": 2}
    adamw, ours = lab.run(keys), lab.run({**keys, "optimizer.name": "signed"})
    states = [ran.rank.plan.memory.terms["optimizer"] for ran in (adamw, ours)]
    assert states[0] == 2 * states[1] > 0
    assert ours.losses[0] == adamw.losses[0] and ours.losses[-1] < ours.losses[0] and ours.losses[2] != adamw.losses[2]
    assert ours.checkpoints() == [2, 3]
    resumed = lab.start({**keys, "optimizer.name": "signed"})
    assert resumed.plan.layout == ours.rank.plan.layout


def test_its_needs_are_checked(lab: Lab) -> None:
    for keys, words in (
        ({"parallel.offload": "optimizer"}, "does not support `optimizer.name: signed`"),
        ({"parallel.strategy": "zero2"}, "`optimizer.name: signed` cannot update"),
        ({"optimizer.eps": 1e-4}, "`optimizer.eps` has no effect"),
    ):
        with pytest.raises(UserError, match=words):
            lab.config({"optimizer.name": "signed", **keys})


def test_names_are_those_of_the_registry() -> None:
    with pytest.raises(UserError) as caught:
        config_from_mapping(
            {"name": "r", "model": {"name": "m"}, "data": {"train": "d"}, "optimizer": {"name": "sign"}}
        )
    assert all(f"`{name}`" in str(caught.value) for name in OPTIMIZERS if name != "signed")


def test_tools_name_it_as_its_entry_says() -> None:
    assert names_in("transformers")["signed_momentum"] == ("signed", "")


@pytest.mark.distributed
def test_two_ranks_resume_to_the_same_bits(world: Ranks, tmp_path: Path) -> None:
    task = "tests.training.signed:"
    wanted = world.run(f"{task}save", tmp_path, world_size=2)[0]
    for found in (
        world.run(f"{task}resume", tmp_path, world_size=2)[0],
        signed.optimizer_ranks.resume(signed.KEYS, "single", tmp_path),
    ):
        assert found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)
