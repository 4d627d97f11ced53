"""LFM2: most layers are short convolutions."""

from manyhands.families.family import Family

LFM2 = Family(name="LFM2", model_types=("lfm2",), tied=True, packs=True, mixers=("Lfm2ShortConv",))

FAMILIES = (LFM2,)
