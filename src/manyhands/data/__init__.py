"""From files to batches: sources, formats, rendering, the token store, order, packs, collation.

Torch-free up to ``batches``, so that the process that plans can use it. Knows no model.
"""
