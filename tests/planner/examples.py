"""Facts and configs of known sizes for the planner's tests."""

from __future__ import annotations

from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.facts.types import DataFacts, Facts, GpuFacts, HostFacts, LinearShape, ModelFacts, TowerFacts
from manyhands.launch.nodes.info import join_hosts

GIB = 2**30
H200_BYTES = 140 * GIB  # what NVML shows of 141 GB


STACKS = {
    "mlp.experts.gate_up_proj": LinearShape(4 * 32, 8, groups=4, active=2),
    "mlp.experts.down_proj": LinearShape(4 * 8, 16, groups=4, active=2),
}


def model_facts(
    hidden: int = 8,
    inner: int = 16,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    vocab: int = 32,
    tied: bool = True,
    **more: Any,
) -> ModelFacts:
    """A Llama of any size; the defaults are small enough to be counted by hand."""
    dim = more.pop("head_dim", hidden // heads)
    q, k = heads * dim, kv_heads * dim
    linears = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (k, hidden),
        "self_attn.v_proj": (k, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    block = sum(out * into for out, into in linears.values()) + 2 * hidden
    return ModelFacts(
        name="tiny",
        folder="/models/tiny",
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        vocab_size=vocab,
        tied_embeddings=tied,
        max_positions=131072,
        sliding_window=None,
        stored_dtype="bfloat16",
        num_parameters=layers * block + vocab * hidden * (1 if tied else 2) + hidden,
        num_block_parameters=block,
        block_linear_shapes=linears,
        block_norm_elements=2 * hidden,
        files={"config.json": "0" * 64},
        **more,
    )


def mixture() -> ModelFacts:
    """Two blocks of four experts, of 384 values each: adapters on both stacks are larger from rank 7 on."""
    dense = model_facts()
    attention = {name: shape for name, shape in dense.block_linear_shapes.items() if "mlp" not in name}
    return dense.model_copy(update={"model_type": "qwen3_moe", "block_linear_shapes": attention | STACKS})


def qwen_30b_a3b() -> ModelFacts:
    """48 blocks of 128 experts, of which a token passes through 8."""
    dense = model_facts(
        hidden=2048, inner=6144, layers=48, heads=32, kv_heads=4, vocab=151936, tied=False, head_dim=128
    )
    linears = {name: shape for name, shape in dense.block_linear_shapes.items() if "mlp" not in name}
    linears |= {
        "mlp.experts.gate_up_proj": LinearShape(128 * 1536, 2048, groups=128, active=8),
        "mlp.experts.down_proj": LinearShape(128 * 2048, 768, groups=128, active=8),
    }
    counts = {"num_parameters": 30_532_122_624, "num_block_parameters": 623_120_640}
    norms = {"block_norm_elements": 8704, "head_norm_elements": 4608}
    return dense.model_copy(update=counts | norms | {"model_type": "qwen3_moe", "block_linear_shapes": linears})


def tower_facts(
    hidden: int = 8, inner: int = 32, layers: int = 3, patches: int = 4, tokens: float = 2.0, projector: int = 100
) -> TowerFacts:
    """SigLIP or CLIP of any size, whose squares become ``tokens`` placeholders."""
    linears = {f"self_attn.{name}": (hidden, hidden) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    linears |= {"mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}
    block = sum(out * into + out for out, into in linears.values()) + 4 * hidden
    return TowerFacts(
        num_parameters=layers * block + 10 * hidden,
        num_projector_parameters=projector,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=2,
        num_block_parameters=block,
        block_linear_shapes=linears,
        patches_per_unit=patches,
        unit_values=3 * patches * 14 * 14,
        tokens_per_unit=tokens,
        projector_values=float(patches * hidden),
    )


def gemma_4b_with_images() -> ModelFacts:
    """The shape of google/gemma-3-4b-it: 896 pixels in 14 x 14 are 4,096 patches and 256 placeholders."""
    text = model_facts(
        hidden=2560,
        inner=10240,
        layers=34,
        heads=8,
        kv_heads=4,
        vocab=262208,
        head_dim=256,
    )
    tower = tower_facts(hidden=1152, inner=4304, layers=27, patches=4096, tokens=256, projector=1152 * 2560 + 1152)
    tower = tower.model_copy(update={"num_heads": 16, "unit_values": 3 * 896 * 896, "projector_values": 256.0 * 1152})
    outer = tower.num_parameters + tower.num_projector_parameters
    windows = {"sliding_window": 1024, "num_windowed_layers": 29}
    outer_facts = {"is_multimodal": True, "num_tower_parameters": outer, "tower": tower}
    return text.model_copy(update=windows | outer_facts)


def llama_8b() -> ModelFacts:
    return model_facts(hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, vocab=128256, tied=False)


def llama_1b() -> ModelFacts:
    return model_facts(hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, vocab=128256, head_dim=64)


def data_facts(num_samples: int = 1000, mean: float = 300.0, longest: int = 2000, **more: Any) -> DataFacts:
    tokens = int(num_samples * mean)
    values = {"num_validation_samples": 20, "num_validation_tokens": 6000} | more
    return DataFacts(
        folder="/cache/data",
        digest="d" * 16,
        num_samples=num_samples,
        num_tokens=tokens,
        num_loss_tokens=tokens // 2,
        max_length=longest,
        mean_length=mean,
        **values,
    )


def facts(
    model: ModelFacts | None = None,
    *,
    gpus: int = 0,
    gpu_bytes: int = H200_BYTES,
    host_bytes: int = 64 * GIB,
    **more: Any,
) -> Facts:
    each = [
        GpuFacts(index=i, name="NVIDIA H200", memory_bytes=gpu_bytes, free_bytes=gpu_bytes, compute_capability=(9, 0))
        for i in range(gpus)
    ]
    host = HostFacts(gpus=tuple(each), num_cores=8, memory_bytes=host_bytes, free_memory_bytes=host_bytes)
    return Facts(model=model or model_facts(), data=more.pop("data", data_facts()), host=host, **more)


def on_nodes(given: Facts, *hosts: HostFacts | int) -> Facts:
    """The same on several nodes: a number stands for the given host with so many GPUs."""
    whole = given.host
    nodes = tuple(
        (host if isinstance(host, HostFacts) else whole.model_copy(update={"gpus": whole.gpus[:host]})).model_copy(
            update={"name": f"gpu{number:02d}"}
        )
        for number, host in enumerate(hosts, start=1)
    )
    ranks = tuple(len(host.gpus) or 1 for host in nodes)
    update = {"host": join_hosts(nodes), "hosts": nodes, "node_ranks": ranks}
    return given.model_copy(update=update | {"world_size": sum(ranks), "local_world_size": max(ranks)})


def run_config(**keys: Any) -> RunConfig:
    """``run_config(method__name="full")``: two underscores stand for the dot."""
    mapping: dict[str, Any] = {"name": "run", "model": {"name": "tiny"}, "data": {"train": "rows.jsonl"}}
    for key, value in keys.items():
        *section, leaf = key.split("__")
        (mapping.setdefault(section[0], {}) if section else mapping)[leaf] = value
    return RunConfig.model_validate(mapping)
