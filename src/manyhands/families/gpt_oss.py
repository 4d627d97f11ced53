"""gpt-oss: heads with sinks, every other layer with a window, and experts whose projections have biases."""

from manyhands.families.family import Experts, Family

GPT_OSS = Family(
    name="gpt-oss",
    model_types=("gpt_oss",),
    head_dim=64,
    flags={"attention_bias": True},
    sinks=True,
    experts=Experts(router="router.weight", inner="intermediate_size", biases=True, transposed=True),
)

FAMILIES = (GPT_OSS,)
