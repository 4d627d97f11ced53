"""Names of earlier versions: each is refused with its line and the new name, from a file and on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from manyhands.cli.config import config as show_key
from manyhands.config.keys import RENAMED_KEYS, RENAMED_SOURCE_KEYS, RENAMED_VALUES, all_keys, source_table, table
from manyhands.core.errors import UserError
from manyhands.importers.load import load_config
from tests.config.builders import minimal

VALUES = [(key, old, new) for key, values in RENAMED_VALUES.items() for old, new in values.items()]


def findings(folder: Path, path: str, value: object, *overrides: str) -> tuple[str, ...]:
    """What is wrong with a run file whose last two lines set one key of a section."""
    section, _, leaf = path.partition(".")
    mapping = minimal()
    mapping[section] = {**mapping.pop(section, {}), leaf: value}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(mapping, sort_keys=False))
    with pytest.raises(UserError) as raised:
        load_config(file, overrides)
    return raised.value.details


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_an_old_key_names_the_new_one_and_its_line(tmp_path, old, new):
    assert findings(tmp_path, old, 1)[0].endswith(f"unknown key `{old}`: renamed to `{new}`")
    last_line = (tmp_path / "run.yaml").read_text().count("\n")
    assert findings(tmp_path, old, 1)[0].startswith(f"line {last_line}: ")
    on_command_line = findings(tmp_path, "seed", -1, f"{old}=1")
    assert f"command line: unknown key `{old}`: renamed to `{new}`" in on_command_line
    with pytest.raises(UserError, match="there is no key") as raised:
        show_key(old)
    assert raised.value.fix == f"renamed to `{new}`"


@pytest.mark.parametrize(("old", "new"), RENAMED_SOURCE_KEYS.items())
def test_an_old_key_of_a_source_names_the_new_one(tmp_path, old, new):
    source = {"path": "a.jsonl", old: 1}
    found = findings(tmp_path, "data.train", [source])
    assert found[0].endswith(f"unknown key `data.train[0].{old}`: renamed to `data.train[0].{new}`")


@pytest.mark.parametrize(("key", "old", "new"), VALUES)
def test_an_old_value_names_the_new_one(tmp_path, key, old, new):
    assert f"`{key}`: got {old} (renamed to {new}), allowed: " in findings(tmp_path, key, old)[0]


def test_an_old_key_with_an_old_value_names_both_and_an_entry_keeps_its_name(tmp_path):
    assert findings(tmp_path, "parallel.recompute", "block")[0].endswith(
        "renamed to `parallel.activation_checkpointing`, and block to full"
    )
    entry = "data.template_arguments.enable_thinking"
    new = "data.chat_template_kwargs.enable_thinking"
    assert f"command line: unknown key `{entry}`: renamed to `{new}`" in findings(
        tmp_path, "seed", -1, f"{entry}=false"
    )


def test_the_tables_lead_to_what_there_is():
    keys = set(all_keys())
    assert set(RENAMED_KEYS.values()) <= keys and not RENAMED_KEYS.keys() & keys
    assert set(RENAMED_SOURCE_KEYS.values()) <= set(source_table()) and not RENAMED_SOURCE_KEYS.keys() & set(
        source_table()
    )
    for key, old, new in VALUES:
        assert f"`{new}`" in table()[key].allowed and f"`{old}`" not in table()[key].allowed, key
