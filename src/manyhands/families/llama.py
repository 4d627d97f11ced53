"""Llama 1 to 3, and the many models that are saved as one (SmolLM2, Vicuna, Yi, ...)."""

from manyhands.families.family import Family, KnownModule

LLAMA = Family(
    name="Llama",
    model_types=("llama",),
    sizes={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
    },
    known_modules=(KnownModule("attention", "LlamaAttention"), KnownModule("mlp", "LlamaMLP")),
    peft_targets=("q_proj", "v_proj"),
    packs=True,
)

FAMILIES = (LLAMA,)
