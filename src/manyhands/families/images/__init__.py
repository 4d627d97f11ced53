"""Kinds of images, one class and file each: how an image becomes inputs of a model's forward pass.

A family names its kind (``ImageLayout.kind``); what one family alone does is a class in that family's file. Nothing
outside compares kinds: callers use the methods of ``ImageKind``.
"""

from manyhands.families.images.anyres import AnyRes
from manyhands.families.images.kind import PIXELS, ImageEntry, ImageKind, ImageShape, stack_squares
from manyhands.families.images.patches import Patches, PatchRows
from manyhands.families.images.sized import Sized

__all__ = [
    "PIXELS",
    "AnyRes",
    "ImageEntry",
    "ImageKind",
    "ImageShape",
    "PatchRows",
    "Patches",
    "Sized",
    "stack_squares",
]
