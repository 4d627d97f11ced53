"""Tests of model types whose images torchvision prepares. ``python -m tests.support.torchvision ARGUMENTS`` is pytest
in a process that has it, from the folder that MANYHANDS_TORCHVISION names: transformers looks for it once.

A build for CUDA beside a torch without it cannot load its operators, of which none prepares images: they are declared
instead.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import pytest

TYPES = ("llama4", "lfm2_vl", "gemma4_unified", "cohere2_vision", "kimi_k25", "muse_glimmer")
"""Model types whose images are prepared by torchvision, as the tests' models have them."""
OPERATORS = ("nms", "qnms")  # that its modules describe as they are imported
_declared: list[Any] = []  # they go with this


def provide(folder: str) -> None:
    import torch

    sys.path.insert(0, folder)
    if torch.version.cuda is None:
        library = torch.library.Library("torchvision", "DEF")
        for name in OPERATORS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
    importlib.import_module("torchvision")


def is_there() -> bool:
    return importlib.util.find_spec("torchvision") is not None


MISSING = pytest.mark.skipif(
    not is_there(), reason="without torchvision: tests/data/test_torchvision.py runs it in a process that has it"
)


def params(*marks: Any) -> list[Any]:
    """``TYPES`` as parameters of a test."""
    return [pytest.param(name, marks=(*marks, MISSING)) for name in TYPES]


if __name__ == "__main__":
    provide(os.environ["MANYHANDS_TORCHVISION"])
    sys.exit(pytest.main(sys.argv[1:]))
