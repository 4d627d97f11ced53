"""LLaMA-Factory's run files: what becomes of each key (``run.py``), of its data sets, of its chat formats."""
