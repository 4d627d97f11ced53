"""From files to batches: sources, formats, rendering, token store, order, packs. Torch-free up to ``batches``."""
