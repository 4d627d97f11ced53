"""Optimizers: what the plan and other packages know of each (``registry.py``), and those that no library has."""
