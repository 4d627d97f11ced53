"""Images in a language model: each document of a pack as alone in transformers' own model, and frozen weights left
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.core.errors import UserError
from manyhands.model.structure import auto_class_of
from tests.support.images import FAMILIES, Document, count_loss_tokens, make_document, pack, reference_loss, train
from tests.support.layouts import build
from tests.support.multimodal import write_tiny_multimodal
from tests.support.tiny import tiny_plan, tiny_run

TRAINED = {"vision": "trained", "projector": "trained", "language": "trained"}
FROZEN = {"vision": "frozen", "projector": "frozen", "language": "trained"}
PROJECTOR = {"vision": "frozen", "projector": "trained", "language": "frozen"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {f: write_tiny_multimodal(tmp_path_factory.mktemp(f), family=f) for f in FAMILIES}


def documents(family: str) -> list[Document]:
    return [make_document(family, num, seed, touching=True) for seed, num in enumerate((1, 2, 0, 1))]


@pytest.mark.parametrize("attention", ["sdpa", "blockwise"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_has_the_loss_of_its_documents_alone(folders: dict[str, Path], family: str, attention: str) -> None:
    plan = tiny_plan(folders[family], parts=TRAINED, attention=attention)
    engine = build(plan, tiny_run(folders[family]))
    reference: Any = auto_class_of(folders[family]).from_pretrained(folders[family], attn_implementation="sdpa")
    packed = documents(family)
    with torch.no_grad():
        loss = engine.forward(pack(family, packed))["lm"][0]
        expected = sum(reference_loss(reference, family, document) for document in packed)
    assert float(loss) == pytest.approx(float(expected), rel=2e-6)
