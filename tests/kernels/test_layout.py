"""How an operation's folder is built: references know nothing but torch, Triton kernels nothing of the choice, and what
is opaque to torch.compile is registered under the names that activation checkpointing knows.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import manyhands.kernels
from manyhands.engine import activations

ROOT = Path(manyhands.kernels.__file__).parent
FILES = sorted(ROOT.glob("*/*.py"))


def imported(file: Path) -> set[str]:
    """Names below ``manyhands.kernels`` that a file imports, inside of functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("manyhands"):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("manyhands.kernels.") for name in found}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_references_and_kernels_know_nothing_of_the_choice(file: Path) -> None:
    op, names = file.parent.name, imported(file)
    later = {
        "reference": ("triton", "select", "ops", "linear"),
        "triton": ("select",),
        "triton_rows": ("triton", "select"),
    }
    for forbidden in later.get(file.stem, ()):
        assert f"{op}.{forbidden}" not in names
    if file.stem == "reference":
        assert not {name for name in names if name.split(".")[0] in {folder.parent.name for folder in FILES}}


def test_opaque_operators_have_the_names_that_checkpointing_keeps() -> None:
    import manyhands.convert.nf4
    import manyhands.kernels.attention.flash4
    import manyhands.kernels.fp8  # noqa: F401

    text = Path(activations.__file__).read_text()
    names = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    kept = {name for name in names if isinstance(name, str) and name.startswith("manyhands::")}
    assert len(kept) >= 5
    for name in kept:
        assert hasattr(torch.ops.manyhands, name.removeprefix("manyhands::")), name
