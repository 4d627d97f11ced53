"""One place with a model and rows for all end-to-end tests, and the one uninterrupted run that others are compared
with.
"""

from __future__ import annotations

import pytest

from tests.e2e.runs import Ended, Place, Run, write_place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return write_place(tmp_path_factory.mktemp("e2e"))


@pytest.fixture(scope="session")
def whole(place: Place) -> tuple[Ended, Run]:
    """``manyhands train --gpus 2``: DDP, LoRA with dropout, from the first step to the verified adapter."""
    return place.train("whole", "--gpus", "2"), place.run("whole")
