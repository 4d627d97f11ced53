"""A new way of holding parameters is loaded, exported and optimized without a change in the product."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands
from manyhands.core import holding
from manyhands.export.tensors import iterate_whole
from manyhands.model.load import match_checkpoint, read_weights
from tests.support.tiny import tiny_model

SOURCES = Path(manyhands.__file__).parent
KNOWS_DTENSOR = {"core/holding.py", "engine/apply.py", "engine/experts.py"}


class FlatPartitions(holding.Holding):
    """As ZeRO-3 has them: the parameter itself is empty, one flat piece of it lies beside (here of a single rank)."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return hasattr(tensor, "flat")

    def local(self, tensor: Any) -> torch.Tensor:
        return tensor.flat

    def slices(self, tensor: Any) -> tuple[slice, ...]:
        raise AssertionError("a flat piece is no rectangle")

    def part_of(self, tensor: Any, full: Any) -> torch.Tensor:
        return full[:].reshape(-1)

    def gather(self, tensor: Any) -> torch.Tensor:
        return tensor.flat.view(tensor.full_shape)


@pytest.fixture
def flat() -> Iterator[None]:
    held = FlatPartitions()
    holding.register(held)
    yield
    holding.unregister(held)


@pytest.mark.usefixtures("flat")
def test_a_model_in_flat_partitions_is_loaded_and_exported(tmp_path: Path) -> None:
    stored = tiny_model("llama", seed=1)
    stored.save_pretrained(tmp_path)
    model = tiny_model("llama", seed=2)
    checkpoint = match_checkpoint(model, str(tmp_path))
    for parameter in model.parameters():
        partition(parameter)
    read_weights(model, checkpoint)
    exported = dict(iterate_whole(model, torch.float32))
    wanted = dict(stored.named_parameters())
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(exported[name], wanted[name]) for name in wanted)


def partition(parameter: Any) -> None:
    parameter.full_shape = parameter.shape
    parameter.flat = torch.full((math.prod(parameter.shape),), math.nan)
    parameter.data = torch.empty(0)


def test_a_plain_tensor_is_its_own_part() -> None:
    matrix = nn.Parameter(torch.arange(6.0).view(3, 2))
    assert holding.is_full(matrix) and holding.num_shards(matrix) == 1 and holding.first_index(matrix) == 0
    assert holding.local(matrix).data_ptr() == matrix.data_ptr() and not holding.local(matrix).requires_grad
    holding.fill_from(matrix, torch.ones(3, 2, dtype=torch.float64))
    assert matrix.tolist() == [[1, 1]] * 3
    assert holding.select_rows(matrix * torch.tensor([[1.0], [2.0], [3.0]]), [2, 0])[:, 0].tolist() == [3, 1]
    assert holding.sum_over_shards([torch.ones(2)], [matrix])[0].tolist() == [1, 1]


@pytest.mark.ci
def test_one_module_knows_how_parameters_are_held() -> None:
    """DTensor is named in ``core/holding.py`` and by the engine that makes shards; ``train`` knows no process group."""
    for path in SOURCES.rglob("*.py"):
        name, imported = path.relative_to(SOURCES).as_posix(), set(imports(path))
        dtensor = [module for module in imported if module.startswith("torch.distributed.tensor")]
        assert not dtensor or name in KNOWS_DTENSOR, f"{name} imports {dtensor}"
        if name.startswith("train/"):
            assert not [module for module in imported if module.startswith("torch.distributed")], name
            assert "to_local" not in path.read_text(encoding="utf-8"), name


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
