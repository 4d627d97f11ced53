"""The training loop. Knows no model, parallelism or kernel: see ``types.py`` for its protocols."""
