"""Axolotl's run files: what becomes of each key (``run.py``), of model and method, of data, of chat templates."""
