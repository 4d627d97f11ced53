"""What routers choose: the loss that balances experts, and their load as figures of a step.

A router's logits and choices leave its block as further results, by a hook: the loss reaches routers and all before
them as autograd reaches anything, whether the block is compiled, recomputed or neither. What a recomputed router gives
is left alone, so nothing counts twice.

Shapes: n tokens, each of which goes to k of E experts; L layers with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from manyhands import families
from manyhands.core.errors import UserError
from manyhands.core.terms import LossTerm, Metric
from manyhands.data.batch.collate import DOCUMENT_LENGTHS
from manyhands.kernels.matmul import sum_dtype
from manyhands.model.loss import LossModel
from manyhands.model.structure import find_decoder, find_experts

BALANCE = "balance"


class Choice:
    """What the router of one layer gave: logits (n, E), where they are wanted, and experts (n, k) int64."""

    logits: torch.Tensor | None = None
    index: torch.Tensor | None = None


class Routing:
    """What the routers of a model give in each of its forward passes with a loss, and the load of its experts since
    ``begin``.
    """

    metrics: Sequence[str] = ("idle_experts", "largest_load")

    def __init__(self, loss_model: LossModel, *, keeps_logits: bool) -> None:
        self.is_open = False
        self.batch: Mapping[str, Any] = {}
        self.choices: list[Choice] = []
        self.given: list[tuple[torch.Tensor | None, torch.Tensor]] = []  # logits and experts by layer
        self.loads: torch.Tensor | None = None  # (L, E) float64: tokens of this rank
        model: Any = loss_model.model
        experts = find_experts(model)
        self.num_experts = max(each.num_experts for each in experts.values())
        for name, each in experts.items():
            self.choices.append(Choice())
            each.register_forward_pre_hook(partial(self._keep_index, self.choices[-1]))
            if keeps_logits:
                _find_router(model, name, each).register_forward_hook(partial(self._keep_logits, self.choices[-1]))
        loss_model.register_forward_pre_hook(self._open)
        # called by itself where a batch has images
        find_decoder(model).register_forward_hook(partial(self._close, loss_model))
        loss_model.needs_documents = True

    def begin(self) -> None:
        """Forget the load so far."""
        self.loads = None

    def read(self, all_reduce_sum: Callable[[torch.Tensor], torch.Tensor]) -> Sequence[torch.Tensor]:
        """The share of experts that no token of any rank went to since ``begin``, over all layers; and the largest
        load of an expert by the mean of its layer. Begins again.
        """
        assert self.loads is not None
        loads, self.loads = all_reduce_sum(self.loads), None
        return (loads == 0).double().mean(), (loads.amax(1) / loads.mean(1)).amax()

    def balance(self, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The balance loss of the forward pass just done, a mean over layers, as (sum over tokens, tokens).

        By document: its n tokens add ``n E / k sum_e C_e / n P_e / n``, where C_e of its n k choices are the expert e
        and P_e is the sum of the softmax of its logits. So experts used evenly give 1, one alone E / k, and what else
        is in a micro-batch does not matter. Per document and token it is the loss of Switch Transformers (equations 4
        to 6 of https://arxiv.org/abs/2101.03961) over k.
        """
        document, lengths = _count_documents(batch)
        given, self.given = self.given, []
        shares = torch.where(lengths > 0, 1 / lengths.clamp(min=1).double(), 0)
        total: Any = sum(_Balance.apply(logits, index, document, shares) for logits, index in given)
        return total / len(given), (lengths > 0).sum()

    # Where blocks are compiled this is part of their graph, which must not hang on what is no tensor: what a recomputed
    # one gives is then dropped by torch.

    def _keep_index(self, choice: Choice, experts: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self.is_open:
            choice.index = args[1]

    def _keep_logits(self, choice: Choice, router: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.is_open:
            if isinstance(output, tuple):  # with weights and experts, of which either comes first
                output = output[0] if output[0].is_floating_point() else output[2]
            choice.logits = output

    def _open(self, loss_model: nn.Module, args: tuple[Any, ...]) -> None:
        self.batch, self.is_open = args[0], True

    def _close(self, loss_model: LossModel, decoder: nn.Module, args: Any, output: Any) -> None:
        if not self.is_open or loss_model.is_reference:  # or generation
            return
        self.is_open, self.given = False, []
        for choice in self.choices:
            assert choice.index is not None
            self.given.append((choice.logits, choice.index))
            choice.logits = choice.index = None
        if torch.is_grad_enabled() and self.batch.keys() >= {"position_ids", DOCUMENT_LENGTHS}:
            self._count()

    @torch.no_grad()
    def _count(self) -> None:
        _, lengths = _count_documents(self.batch)
        chosen = torch.stack([index for _, index in self.given]).flatten(1)  # (L, n k)
        if self.loads is None:
            self.loads = chosen.new_zeros(len(chosen), self.num_experts, dtype=torch.float64)
        counted = (lengths > 0).double().repeat_interleave(chosen.shape[1] // len(lengths))
        self.loads.scatter_add_(1, chosen, counted.expand_as(chosen))


def declare_routing(loss_model: LossModel, coefficient: float) -> None:
    """Add the load of the experts to the figures of a step, and with a coefficient their balance to the loss."""
    routing = Routing(loss_model, keeps_logits=coefficient > 0)
    loss_model.figures.append(routing)
    if not coefficient:
        return

    def compute(loss_model: LossModel, batch: Mapping[str, Any], hidden: torch.Tensor, metrics: bool) -> Any:
        total, num_tokens = routing.balance(batch)
        if torch.is_grad_enabled() and loss_model.training and not total.requires_grad:
            raise UserError(
                "a router's balance loss would train nothing",
                where="moe.balance",
                why="routers are frozen, and so is all that comes before them",
                fix="name layers before the last router in method.target_modules, such as q_proj, or the routers in "
                "method.modules_to_save, or remove moe.balance",
            )
        return {BALANCE: (total, num_tokens)}

    metrics = (Metric("balance_loss", BALANCE, label="balance loss"),)
    loss_model.terms = (*loss_model.terms, LossTerm(BALANCE, coefficient, _weigh_tokens, compute, metrics))


def _weigh_tokens(samples: Any, numbers: np.ndarray) -> np.ndarray:
    """The tokens of each sample: a router sees them all, whether they have a loss of their own or not."""
    lengths: np.ndarray = samples.lengths[numbers]
    return lengths


def _find_router(model: nn.Module, name: str, experts: Any) -> nn.Module:
    """The module beside experts that has a row of weights for each of them."""
    parent = name.rpartition(".")[0]
    for own_name, module in model.get_submodule(parent).named_modules():
        sizes = {len(parameter) for parameter in module.parameters(recurse=False) if parameter.dim() == 2}
        if families.routes(own_name, experts.num_experts, {"experts": experts.num_experts}) and (
            experts.num_experts in sizes
        ):
            return module
    raise AssertionError(f"no router beside {name}")  # convert/experts.py knows the families


def _count_documents(batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token which document it is of, counted from 0, and how many tokens that has, 0 in padding: (n) int64."""
    positions, lengths = batch["position_ids"].flatten(), batch[DOCUMENT_LENGTHS].flatten()
    return (positions == 0).cumsum(0) - 1, torch.where(positions < lengths, lengths, 0)


class _Balance(torch.autograd.Function):
    """``sum_t s_t E / k sum_e C_e p_te`` over tokens t, with C the choices within t's document and p the softmax of the
    logits, (n, E), (n, k), (n), (n) -> 0-d. Keeps the logits alone, since it is there once a layer.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, index: torch.Tensor, document: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, index, document, shares)
        _, _, by_token = _Balance.parts(logits, index, document, shares)
        return by_token.sum(dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, *others = ctx.saved_tensors
        p, scaled, by_token = _Balance.parts(logits, *others)
        return (gradient.to(p.dtype) * p * (scaled - by_token[:, None])).to(logits.dtype), None, None, None

    @staticmethod
    def parts(
        logits: torch.Tensor, index: torch.Tensor, document: torch.Tensor, shares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """p (n, E), s E / k C (n, E), and the summands (n)."""
        (num_tokens, num_experts), num_chosen = logits.shape, index.shape[1]
        p = logits.softmax(-1, dtype=sum_dtype(logits.dtype))
        counts = p.new_zeros(num_tokens, num_experts)  # by document: there are no more than tokens
        places = (document[:, None] * num_experts + index).flatten()
        counts.view(-1).scatter_add_(0, places, (shares > 0).to(p.dtype).repeat_interleave(num_chosen))
        scaled = counts[document] * (shares.to(p.dtype) * num_experts / num_chosen)[:, None]
        return p, scaled, (scaled * p).sum(-1)
