"""How a causal model's head turns hidden states into logits, read from its config: a weight, a scale, a cap.

No table of families: what is read is compared with the model's own logits (``agrees``) before it is trusted. Knows
transformers' names of fields, and nothing of training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manyhands.kernels.loss.cross_entropy import linear_cross_entropy

DIFFERS = 0.02  # root mean square of the difference of centered logits over that of the logits: bfloat16 gives 0.004


@dataclass(frozen=True)
class Head:
    """logits = softcap * tanh(logit_scale * hidden weight^T / softcap); no bias."""

    module: nn.Linear
    logit_scale: float = 1.0
    softcap: float | None = None

    def loss(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None = None,
        metrics: bool = False,
        by_row: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``linear_cross_entropy`` of (m, e) and (m), with the weight as it is now: gathered, if inside its sharded
        unit.
        """
        weight = self.module.weight  # not kept: a sharded unit puts another tensor here for its forward pass
        weight = weight.to(hidden.dtype)  # a head trained beside frozen weights is a float32 master
        settings: dict[str, Any] = dict(logit_scale=self.logit_scale, softcap=self.softcap, metrics=metrics)
        return linear_cross_entropy(hidden, weight, labels, weights=weights, by_row=by_row, **settings)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (m, v) of (m, e) in float32 or wider, as the loss sees them: for comparisons on a few rows."""
        logits = nn.functional.linear(hidden, self.module.weight.to(hidden.dtype))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def read_head(model: Any) -> Head | str:
    """The head of a transformers causal model, or in words why it is none that can be fused.

    Fields read: ``final_logit_softcapping`` (a cap), ``logit_scale`` (multiplied), ``logits_scaling`` (divided by).
    """
    module = model.get_output_embeddings()
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return f"the head is a {type(module).__name__}, not a linear layer of torch"
    if module.bias is not None:
        return "the head has a bias"
    if module._forward_hooks or module._forward_pre_hooks:
        return "the head has hooks"
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return Head(module, scale, float(cap) if cap else None)


def agrees(head: Head, hidden: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether ``head`` gives the model's own ``logits`` (m, v) for ``hidden`` (m, e), m > 0. Waits for the device."""
    found, wanted = head.logits(hidden), logits.detach()
    if found.shape != wanted.shape:
        return False
    wanted = wanted.to(found.dtype)
    spread = (wanted - wanted.mean(1, keepdim=True)).square().mean().sqrt()
    difference = (found - wanted).square().mean().sqrt()
    return bool(difference <= DIFFERS * spread)
