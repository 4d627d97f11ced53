from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import images
from tests.support.multimodal import write_tiny_multimodal
from tests.support.tiny import FAMILIES, write_tiny_model


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: write_tiny_model(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models of text and images, by their family."""
    return {f: write_tiny_multimodal(tmp_path_factory.mktemp(f), family=f) for f in images.FAMILIES}
