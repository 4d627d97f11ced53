"""Granite 3: embeddings, residuals, attention and logits are scaled."""

from manyhands.families.family import Family, KnownModule

GRANITE = Family(
    name="Granite",
    model_types=("granite",),
    packs=True,
    known_modules=(KnownModule("attention", "GraniteAttention"), KnownModule("mlp", "GraniteMLP")),
)

FAMILIES = (GRANITE,)
