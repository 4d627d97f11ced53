"""Granite 3: embeddings, residuals, attention and logits are scaled."""

from manyhands.families.family import Family

GRANITE = Family(name="Granite", model_types=("granite",), packs=True)

FAMILIES = (GRANITE,)
