"""What each key of a run file changes; the table that names them all is ``tests/test_every_key.py``."""

import pytest

pytest.register_assert_rewrite(
    *(f"tests.keys.{name}" for name in ("rows", "model", "training", "work", "left", "template", "cluster", "table"))
)
