"""Variables that guides set: what they mean here, or that they mean nothing."""

from __future__ import annotations

import pytest

from manyhands.core.errors import UserError
from manyhands.launch.environment import apply_variables
from tests.launch.builders import make_config


def test_nccl_timeout_is_the_runs_timeout_unless_the_run_sets_its_own():
    config, notes = apply_variables(make_config(), {"NCCL_TIMEOUT": "1800"})
    assert config.parallel.timeout_s == 1800 and "taken as parallel.timeout_s" in notes[0]
    config, notes = apply_variables(make_config(**{"parallel.timeout_s": 300}), {"NCCL_TIMEOUT": "1800"})
    assert config.parallel.timeout_s == 300 and "has no effect" in notes[0]


@pytest.mark.parametrize("text", ["long", "-5", "0", "1.5"])
def test_nccl_timeout_that_is_no_number_of_seconds(text):
    with pytest.raises(UserError, match="not a number of seconds"):
        apply_variables(make_config(), {"NCCL_TIMEOUT": text})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "passed to torch: its default is on as well"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "disables torch's NCCL watchdog"),
        ("UNSLOTH_FORCE_SINGLE_GPU", "1", "is not read: parallel.gpus=1"),
        ("UNSLOTH_COMPILE_MAXIMUM", "1", "is not read: parallel.compile=true"),
    ],
)
def test_what_changes_nothing_is_said(name, value, said):
    config, notes = apply_variables(make_config(), {name: value})
    assert config == make_config() and len(notes) == 1 and said in notes[0]


def test_nothing_is_said_of_variables_that_are_not_set():
    assert apply_variables(make_config(), {"NCCL_DEBUG": "INFO"}) == (make_config(), [])


def test_a_start_applies_them(tmp_path, monkeypatch):
    """Up to the first file that it would write: the folder is one that cannot be made."""
    from manyhands.launch.run.prepare import prepare_run

    monkeypatch.setenv("NCCL_TIMEOUT", "1800")
    (tmp_path / "file").write_text("")
    said: list[str] = []
    with pytest.raises(UserError):
        prepare_run(make_config(**{"output.dir": str(tmp_path / "file")}), report=said.append)
    assert "NCCL_TIMEOUT=1800 is taken as parallel.timeout_s" in said[0]
