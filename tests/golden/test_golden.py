"""Short runs give the losses that are on record: bit for bit on a CPU of a kind that is there, else within a bound."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden import runs
from tests.support.equality import Case, run_case, write_workspace
from tests.support.ranks import Ranks, ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    write_workspace(folder)
    return folder


def check(world: Ranks, folder: Path, name: str) -> None:
    hardware = runs.name_hardware(world.device)
    losses = runs.run(world, folder, name)
    compared = runs.compare(runs.read(), hardware, name, losses)
    if compared is None:
        pytest.skip(f"no losses of {name!r} on record for a device like {hardware}: python -m tests.golden")
    if compared.where != hardware:
        warnings.warn(f"{hardware}: no entry; {name!r} is compared with {compared.where}", stacklevel=1)
    assert compared.agrees, (compared, runs.to_text(losses))


@pytest.mark.distributed
@pytest.mark.parametrize("name", runs.RUNS)
def test_losses_are_those_on_record(world: Ranks, folder: Path, name: str) -> None:
    check(world, folder, name)


@pytest.mark.distributed
def test_a_mean_of_means_does_not_pass(world: Ranks, folder: Path) -> None:
    """A planted mistake of some per cent, on hardware with an entry and without."""
    method, case = runs.RUNS["full"]
    faulty = Case(case.name, case.world_size, case.keys, "mean of means")
    losses = list(run_case(world, folder, faulty, "float32", method).losses)
    entries = runs.read()
    compared = runs.compare(entries, runs.name_hardware("cpu"), "full", losses)
    elsewhere = runs.compare(entries, "cpu of another make", "full", losses)
    assert compared and elsewhere and not compared.agrees and not elsewhere.agrees and not elsewhere.is_exact


def test_one_bit_is_seen_and_a_bound_is_kept() -> None:
    entries = {"cpu A, torch 2": {"run": runs.to_text([2.0, 1.0])}, "GPU, torch 2": {"run": runs.to_text([2.0, 1.0])}}
    bit = math.nextafter(1.0, 2.0)
    for hardware, losses, agrees in (
        ("cpu A, torch 2", [2.0, 1.0], True),
        ("cpu A, torch 2", [2.0, bit], False),
        ("cpu A, torch 3", [2.0, bit], True),
        ("cpu B, torch 2", [2.0, 1.001], False),
        ("cpu B, torch 2", [2.0], False),
        ("cpu B, torch 2", [2.0, math.nan], False),
        ("GPU, torch 2", [2.0, bit], True),
        ("another GPU, torch 2", [2.0, 1.01], False),
    ):
        compared = runs.compare(entries, hardware, "run", losses)
        assert compared is not None and compared.agrees == agrees, (hardware, losses)
    assert runs.compare(entries, "cpu A, torch 2", "unknown", [1.0]) is None


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    import torch

    with ranks(min(2, torch.cuda.device_count()), "cuda") as world:
        yield world


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, (_, case) in runs.RUNS.items() if case.world_size == 1])
def test_losses_on_a_gpu_are_those_on_record(gpus: Ranks, folder: Path, name: str) -> None:
    check(gpus, folder, name)


@pytest.mark.gpu(2)
def test_losses_on_two_gpus_are_those_on_record(gpus: Ranks, folder: Path) -> None:
    check(gpus, folder, "2 ranks")
