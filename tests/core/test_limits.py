"""Limits that plan and runtime share stand once: no other module of the product assigns one of their names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from manyhands.core import limits

NAMES = {name for name in vars(limits) if name.isupper()}
ROOT = Path(limits.__file__).parents[1]


def assigned(path: Path) -> set[str]:
    targets = [t for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign) for t in node.targets]
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


@pytest.mark.ci
def test_shared_limits_are_defined_once() -> None:
    others = {path.name: assigned(path) & NAMES for path in ROOT.rglob("*.py") if path != Path(limits.__file__)}
    assert len(NAMES) > 12 and {name: found for name, found in others.items() if found} == {}


def test_an_nf4_row_holds_codes_and_statistics() -> None:
    assert (limits.NF4_ROW_VALUES, limits.NF4_CODE_BYTES) == (16_384, 8_192)
    assert (limits.NF4_STATISTICS_BYTES, limits.NF4_FLOAT_STATISTICS_BYTES) == (264, 1024)
