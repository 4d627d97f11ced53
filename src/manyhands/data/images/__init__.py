"""Images of rows: where they come from, how they are opened, processed, cached and batched."""
