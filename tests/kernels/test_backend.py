"""Kernels are tested once on a device, also by the process that takes a killed rank's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manyhands.core.files import write_json
from manyhands.kernels import backend
from manyhands.kernels.backend import Backend, adopt_choices, cached_choice, list_choices, offer_choices
from manyhands.launch.run_folder import RunFolder


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_FOUND", {})
    monkeypatch.setattr(backend, "_OFFERED", {})


def test_each_device_is_cached_choice_and_what_another_process_has_found_is_not_tested_again() -> None:
    tested: list[int] = []

    @cached_choice(Backend)
    def choose(device: torch.device, dtype: torch.dtype) -> Backend:
        tested.append(device.index)
        return Backend("eager", "Triton is slow today") if device.index else Backend("triton")

    devices = [torch.device("cuda", index) for index in (0, 1, 0, 1)]
    chosen = [choose(device, torch.bfloat16) for device in devices]
    assert tested == [0, 1] and chosen == 2 * [Backend("triton"), Backend("eager", "Triton is slow today")]

    found = json.loads(json.dumps(list_choices()))
    backend._FOUND.clear()
    offer_choices(found)
    assert choose(devices[1], torch.bfloat16).name == "eager" and tested == [0, 1, 1], "an offer alone changes nothing"
    adopt_choices()
    assert choose(devices[0], torch.bfloat16) == Backend("triton") and tested == [0, 1, 1]
    assert choose(devices[0], torch.float16) == Backend("triton") and tested == [0, 1, 1, 0], "of another dtype"


STANDS_BY = """
import sys
from pathlib import Path
from manyhands.launch.run_folder import RunFolder
from manyhands.worker.standby import import_all
import_all(RunFolder(Path(sys.argv[1])))
from manyhands.kernels import backend
print(sorted(backend._OFFERED), sorted(backend._FOUND))
"""


def test_a_process_that_stands_by_is_offered_what_its_rank_has_found(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.ranks.mkdir()
    for rank in range(3):
        write_json(folder.kernels(rank), {f"choose-{rank}": ["triton", ""]})
    folder.kernels(2).write_text("[")  # by a full disk
    for rank, expected in ((1, "['choose-1'] []"), (2, "[] []"), (3, "[] []")):
        command = [sys.executable, "-c", STANDS_BY, str(tmp_path)]
        environment = os.environ | {"RANK": str(rank)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        assert ended.stdout.strip() == expected
