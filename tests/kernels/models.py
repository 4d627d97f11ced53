"""Models with adapters for the tests of fused modules; also what ranks run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from manyhands.config.schema import MethodSection
from manyhands.convert.fused_modules import fuse_modules
from manyhands.convert.lora import apply_lora
from manyhands.core.seeds import named_generator
from manyhands.families import known_modules
from tests.support.tiny import tiny_model


def adapted(model: Any, **method: Any) -> Any:
    """Adapters on ``model``, with factors B that are not zero."""
    apply_lora(model, MethodSection(name="lora", **{"rank": 4, "alpha": 6.0, **method}), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(
                    0.05 * torch.randn(parameter.shape, generator=named_generator(1, name), dtype=parameter.dtype)
                )
    return model


def qwen2(dtype: torch.dtype = torch.float32) -> Any:
    """Qwen2 has biases on q, k and v; filled here, since they start at zero."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.2, 0.2)
    return model


def tiny(family: str, dtype: str = "float32") -> Any:
    return qwen2(getattr(torch, dtype)) if family == "qwen2" else tiny_model(family, dtype)


def token_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of a loss over all of them."""
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.double().logsumexp(-1).square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def fp8_model(family: str, method: str) -> Any:
    """A fused model whose products are in fp8, with adapters or not."""
    from manyhands.convert.fp8 import use_fp8

    model = tiny(family).train()
    use_fp8(model)
    if method == "lora":
        model = adapted(model)
    fuse_modules(model, known_modules())
    return model


def sharded_fp8_step(family: str, method: str, activation_checkpointing: bool) -> dict[str, Any]:
    """One step of it, as ``sharded_step``"""
    from manyhands.convert.fp8 import quantize_frozen

    model = fp8_model(family, method)
    shard(model, activation_checkpointing)
    return {"quantized_bytes": quantize_frozen(model)} | whole_step(model)


def sharded_step(family: str, activation_checkpointing: bool, compiled: bool) -> dict[str, Any]:
    """One step of a fused model, sharded over the ranks of the world, on the same rows on each: whole gradients."""
    model = adapted(tiny(family))
    report = fuse_modules(model, known_modules())
    shard(model, activation_checkpointing, compiled)
    return {"fused": len(report.fused)} | whole_step(model)


def shard(model: nn.Module, activation_checkpointing: bool, compiled: bool = False) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from manyhands.engine.activations import checkpoint_blocks
    from manyhands.engine.apply import compile_blocks
    from manyhands.model.structure import find_blocks

    if activation_checkpointing:
        checkpoint_blocks(model, ("full",) * len(find_blocks(model)), compiled=False)
    if compiled:
        compile_blocks(model, backend="aot_eager")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in find_blocks(model).values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole_step(model: nn.Module) -> dict[str, Any]:
    from manyhands.core.holding import gather

    logits, gradients = step(model, token_ids(2, 12))
    return {
        "logits": logits.numpy(),
        "gradients": {name: gather(gradient).numpy() for name, gradient in gradients.items()},
    }
