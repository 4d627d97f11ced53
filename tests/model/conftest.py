from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import FAMILIES, write_tiny_model


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: write_tiny_model(root / family, family) for family in FAMILIES}
