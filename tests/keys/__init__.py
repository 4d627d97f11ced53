"""What each key of a run file changes; the table that names them all is ``tests/test_every_key.py``."""

import pytest

pytest.register_assert_rewrite("tests.keys.rows", "tests.keys.model", "tests.keys.training", "tests.keys.work", "tests.keys.left")
