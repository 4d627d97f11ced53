"""Model types of images and text whose images cannot be trained here, each with its reason."""

from __future__ import annotations

IMAGES_REFUSED: dict[str, str] = {}
