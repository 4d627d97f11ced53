"""What libraries raise for something that the user can change reaches the user as an error, never as a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.core.errors import UserError, explain_foreign, panics_as_errors

PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


def test_a_panic_of_a_rust_library_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object) -> None:
        raise PANIC('called `Result::unwrap()` on an `Err` value: RuntimeError(StackOverflow)\nat "mod.rs"')

    with pytest.raises(RuntimeError, match="PanicException: called"), panics_as_errors():
        panic()
    with pytest.raises(KeyboardInterrupt), panics_as_errors():
        raise KeyboardInterrupt
    monkeypatch.setattr("manyhands.config.keys.explain", panic)
    done = CliRunner().invoke(app, ["config", "seed"])
    assert done.exit_code == 1 and "a library gave up on a text" in done.stderr and "StackOverflow" in done.stderr
    assert explain_foreign(RuntimeError("else")) is None and explain_foreign(SystemExit(1)) is None


@pytest.mark.parametrize("named", ["~", "~no-such-user-here"])
def test_a_path_without_a_home_is_an_error(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def expand(*_: object) -> None:
        Path(f"{named}/x").expanduser()

    if named == "~":
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    monkeypatch.setattr("manyhands.config.keys.explain", expand)
    done = CliRunner().invoke(app, ["config", "seed"])
    assert done.exit_code == 2 and "where: HOME" in done.stderr and "export HOME=" in done.stderr


def test_what_a_user_error_quotes_steers_no_terminal() -> None:
    assert "\x1b" not in str(UserError("\x1b[2J", where="\x1b]0;x\x07"))
