"""The lock of a run's folder where another machine had it: one launch at a time, whatever the file system knows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.launch.run import lock as folder_lock
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.lock import FolderLock, take_over

HOLD = """
import sys, time
from manyhands.launch.run.lock import FolderLock
from manyhands.launch.run.folder import RunFolder
lock = FolderLock(RunFolder(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(folder_lock, "TOUCH_S", 0.1)
    monkeypatch.setattr(folder_lock, "QUIET_S", 2.0)
    return RunFolder(tmp_path)


@pytest.mark.ci
def test_the_lock_of_a_process_that_is_gone_is_taken_after_a_while(folder: RunFolder) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder.path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="continues without it") as refused:
        take_over(folder, 4.0)
    assert f"process {holder.pid}" in refused.value.why and refused.value.exit_code == 1
    holder.kill()
    holder.wait()
    begin = time.monotonic()
    take_over(folder, 30.0).release()
    assert 2.0 <= time.monotonic() - begin < 20


@pytest.mark.ci
def test_a_holder_that_beats_keeps_it_where_the_file_system_has_no_locks(folder: RunFolder) -> None:
    lock = FolderLock(folder)
    lock.start_heartbeat()
    assert lock._fd is not None
    folder_lock.fcntl.flock(lock._fd, folder_lock.fcntl.LOCK_UN)  # as if it were known on the other machine alone
    with pytest.raises(UserError, match="continues without it") as refused:
        take_over(folder, 5.0)
    assert "still updates it" in refused.value.why
    lock.release()
    before = os.stat(folder.lock_file).st_mtime_ns
    time.sleep(0.5)
    assert os.stat(folder.lock_file).st_mtime_ns == before, "released: nothing touches it any more"
    take_over(folder, 30.0).release()
