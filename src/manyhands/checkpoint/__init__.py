"""Checkpoints: safetensors and JSON only, for any number of ranks. Knows nothing of runs, plans or data.

A checkpoint exists when its manifest does. A save writes into ``step-000010.tmp``: shards, train_state.json, hashes,
and the manifest last; then the folder is renamed. What a killed save leaves behind never counts.
"""

from manyhands.checkpoint.load import load_checkpoint, newest_checkpoint
from manyhands.checkpoint.manifest import (
    Manifest,
    checkpoint_folder,
    clean_leftovers,
    list_checkpoints,
    prune,
    read_manifest,
)
from manyhands.checkpoint.save import save_checkpoint

__all__ = [
    "Manifest",
    "checkpoint_folder",
    "clean_leftovers",
    "list_checkpoints",
    "load_checkpoint",
    "newest_checkpoint",
    "prune",
    "read_manifest",
    "save_checkpoint",
]
