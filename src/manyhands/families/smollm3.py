"""SmolLM3: some layers have no rotary embeddings."""

from manyhands.families.family import Family, KnownModule

SMOLLM3 = Family(
    name="SmolLM3",
    model_types=("smollm3",),
    tied=True,
    packs=True,
    known_modules=(KnownModule("attention", "SmolLM3Attention"), KnownModule("mlp", "SmolLM3MLP")),
)

FAMILIES = (SMOLLM3,)
