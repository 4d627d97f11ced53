"""SmolLM3: some layers have no rotary embeddings."""

from manyhands.families.family import Family

SMOLLM3 = Family(name="SmolLM3", model_types=("smollm3",), tied=True, packs=True)

FAMILIES = (SMOLLM3,)
