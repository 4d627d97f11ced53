"""The page and a browser for it: Debian's Chromium, driven by playwright's package."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.runs import free_port

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of ``manyhands ui`` on the folder. It must end without a complaint."""
    command = [sys.executable, "-m", "manyhands", "ui", str(folder), "--port", str(free_port())]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield next(word for word in server.stdout.readline().split() if word.startswith("http"))
    server.send_signal(signal.SIGINT)
    _, errors = server.communicate(timeout=15)
    assert "ERROR" not in errors and "Traceback" not in errors, errors


def launch(driver: Any) -> Any:
    options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    return driver.chromium.launch(executable_path=CHROMIUM, args=options)
