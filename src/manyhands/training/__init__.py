"""The training loop and what it is made of. Knows no model, no parallelism, no kernel: see ``types.py`` for its
protocols.
"""
