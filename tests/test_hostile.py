"""A few of the random faults that ``python -m tests.hostile`` puts into files: in no release by the thousand alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_files_with_random_faults_are_read_or_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.hostile", "--count", "2000", "--place", str(tmp_path / "place")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count(" cases, 0 failed") >= 20
