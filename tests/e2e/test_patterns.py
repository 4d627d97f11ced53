"""Weights trained by name, from the run file to the verified model, by each optimizer that a CPU has; resumed bit for
bit.
"""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.e2e.runs import Place, Spec

pytestmark = pytest.mark.slow  # whole runs in processes of their own: minutes together

PATTERNS = ("method.name=patterns", "method.train=[model.layers.1, norm]", "method.freeze=[k_proj]")
RATES = ("optimizer.learning_rates={norm: 1e-4}",)
FSDP = ("parallel.strategy=fsdp",)
OPTIMIZERS = ("muon", "adafactor")


def patterns(ranks: int, name: str, keys: tuple[str, ...], break_at: dict[str, int] | None = None) -> Spec:
    return Spec(ranks, name, keys, break_at, file="full.yaml")


def is_trained(name: str) -> bool:
    return name == "model.norm.weight" or (name.startswith("model.layers.1.") and "k_proj" not in name)


@pytest.fixture(scope="module")
def ran(place: Place) -> Place:
    keys = {name: (*PATTERNS, *RATES, f"optimizer.name={name}") for name in ("adamw", *OPTIMIZERS)}
    keys["muon"] += ("optimizer.learning_rate=4e-3",)
    place.many(
        *(patterns(1, f"p-one-{name}", keys[name]) for name in keys),
        patterns(2, "p-ddp-adamw", keys["adamw"]),
        *(patterns(2, f"p-fsdp-{name}", keys[name] + FSDP) for name in keys),
        *(patterns(2, f"p-resumed-{name}", keys[name] + FSDP, {"step": 7}) for name in keys),
        patterns(2, "p-moved", keys["muon"] + FSDP, {"step": 7}),
        *(patterns(2, f"p-resumed-{name}", keys[name] + FSDP) for name in keys),
        patterns(1, "p-moved", keys["muon"]),
    )
    return place


@pytest.mark.parametrize("name", ["p-ddp-adamw", "p-fsdp-adamw", "p-fsdp-muon", "p-fsdp-adafactor", "p-moved"])
def test_every_layout_trains_the_same(ran: Place, name: str) -> None:
    one, run = ran.run(f"p-one-{'muon' if name == 'p-moved' else name.rpartition('-')[2]}"), ran.run(name)
    assert one.losses()[-1] < 0.97 * one.losses()[0]
    assert run.losses() == pytest.approx(one.losses(), rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", *OPTIMIZERS])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(ran: Place, name: str) -> None:
    resumed, whole = ran.run(f"p-resumed-{name}"), ran.run(f"p-fsdp-{name}")
    assert resumed.course() == whole.course()
    assert (resumed.folder / "model/model.safetensors").read_bytes() == (
        whole.folder / "model/model.safetensors"
    ).read_bytes()


def test_frozen_weights_are_the_sources_and_no_part_of_a_checkpoint(ran: Place) -> None:
    saved, source = (
        load_file(folder / "model.safetensors")
        for folder in (ran.run("p-fsdp-adamw").folder / "model", ran.folder / "model")
    )
    assert saved.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(tensor, saved[name]) != is_trained(name), name
    names = set()
    for path in ran.run("p-fsdp-muon").folder.glob("checkpoints/step-000012/*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    assert names and all(
        is_trained(name.split(".", 1)[1] if name.startswith("model.m") else name.split(".", 2)[2]) for name in names
    )


def test_a_checkpoint_is_exported_as_a_whole_model(ran: Place) -> None:
    output = ran.folder / "p-exported"
    ended = ran.call("-m", "manyhands", "export", str(ran.run("p-fsdp-adamw").folder), "--output", str(output))
    assert ended.code == 0 and "logits of" in ended.output, ended.output
    assert (output / "model.safetensors").read_bytes() == (
        ran.run("p-fsdp-adamw").folder / "model/model.safetensors"
    ).read_bytes()


def test_the_log_has_the_rates_of_patterns(ran: Place) -> None:
    rows = [row for row in ran.run("p-one-muon").rows() if row["kind"] == "step"]
    assert all(row["learning_rates"]["norm"] == pytest.approx(row["learning_rate"] / 40) for row in rows)
