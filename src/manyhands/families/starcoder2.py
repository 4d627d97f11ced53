"""StarCoder2: biases everywhere, an MLP without a gate."""

from manyhands.families.family import Family

STARCODER2 = Family(
    name="StarCoder2",
    model_types=("starcoder2",),
    tied=True,
    flags={"use_bias": True},
    norm_bias=True,
    qkv_bias="use_bias",
    output_bias="use_bias",
    mlp_bias="use_bias",
    mlp=("c_fc", "c_proj"),
    packs=True,
)

FAMILIES = (STARCODER2,)
