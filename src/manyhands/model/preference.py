"""Losses of preference tuning: of two answers to one prompt the chosen one is to become likelier than the rejected one.

With log p and log q the log-probabilities of an answer's loss tokens under the model and under the reference (the model
before training), n their number and c, r the chosen and the rejected answer:

| loss | reward of an answer | loss of a pair, x = reward of c - reward of r | source |
|---|---|---|---|
| sigmoid | beta (log p - log q) | -(1 - e) log s(x) - e log s(-x) | DPO (1), smoothed by e as cDPO (2) |
| robust | the same | (-(1 - e) log s(x) + e log s(-x)) / (1 - 2 e) | robust DPO (3) |
| hinge | the same | max(0, 1 - x) | SLiC-HF (4) in DPO's form, RSO (5) |
| ipo | beta (log p - log q) / n | ((x / beta) - 1 / (2 beta))^2 | IPO (6), averaged as its authors advise |
| sigmoid_norm | the same | as sigmoid | length-normalized DPO (7) |
| cpo | beta log p | as sigmoid | CPO (8) |
| simpo | beta log p / n | as sigmoid, of x - margin | SimPO (9) |
| orpo | log odds, log p / n - log(1 - exp(log p / n)) | -beta log s(x) | ORPO (10) |

s is the logistic function, e ``preference.label_smoothing``. To it comes ``preference.sft_weight`` times the
cross-entropy of the chosen answers over all their tokens in the global batch (RPO (11), CPO, ORPO). Reference and
margin are of no weight in the gradient: only log p is differentiated.

(1) Rafailov et al. 2023, arXiv:2305.18290, equation 7. (2) Mitchell 2023, https://ericmitchell.ai/cdpo.pdf, equation 3.
(3) Chowdhury et al. 2024, arXiv:2403.00409. (4) Zhao et al. 2023, arXiv:2305.10425. (5) Liu et al. 2023,
arXiv:2309.06657. (6) Azar et al. 2023, arXiv:2310.12036, equation 17. (7) Lambert et al. 2024 (Tulu 3),
arXiv:2411.15124, equation 6. (8) Xu et al. 2024, arXiv:2401.08417. (9) Meng et al. 2024, arXiv:2405.14734, equation 6.
(10) Hong et al. 2024, arXiv:2403.07691, equations 6 and 7. (11) Pang et al. 2024, arXiv:2404.19733.

KTO (12) trains single answers that are good or bad. With r = log p - log q of an answer to its prompt and z the mean
of r over all samples of the step, each with its prompt and the answer of another, at least 0 and without gradient, the
loss is w (1 - s(beta (r - z))) of a good answer and w' (1 - s(beta (z - r))) of a bad one.

(12) Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8.

Shapes: p pairs, 2 p documents, chosen and rejected in turn; n samples of one document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from manyhands.config.schema import PreferenceSection
from manyhands.data.store.streams import REFERENCE
from manyhands.model.loss import Answers, LossModel, Terms


def compute_preference(
    settings: PreferenceSection, model: LossModel, batch: Mapping[str, Any], hidden: torch.Tensor, metrics: bool
) -> Terms:
    """The term "preference" of a micro-batch of pairs, its weight their number, and with ``sft_weight`` the term "sft".

    ``metrics`` adds "preferred" and "margin" over pairs: whose chosen answer has the larger reward, and by how much.
    """
    answers = model.answers(batch, hidden)
    reference = batch[REFERENCE.name] if settings.needs_reference else None
    rewards = compute_rewards(settings, answers, reference)  # (2 p)
    margins = rewards[0::2] - rewards[1::2]  # (p)
    num_pairs = torch.tensor(len(margins), device=hidden.device)
    found = {"preference": (compute_losses(settings, margins).sum(), num_pairs)}
    if settings.sft_share:
        found["sft"] = (-answers.log_probabilities[0::2].sum(), answers.num_tokens[0::2].sum())
    if metrics:
        found |= {"preferred": ((margins > 0).sum(), num_pairs), "margin": (margins.detach().sum(), num_pairs)}
    return found


def compute_rewards(settings: PreferenceSection, answers: Answers, reference: torch.Tensor | None) -> torch.Tensor:
    """The reward of each answer (2 p), as the table has it; ``reference`` (2 p) are its log q."""
    values = answers.log_probabilities
    if reference is not None:
        values = values - reference
    if settings.loss in ("ipo", "sigmoid_norm", "simpo", "orpo"):
        values = values / answers.num_tokens
    if settings.loss == "orpo":
        return values - torch.log1p(-torch.exp(values))
    return settings.beta * values


def compute_losses(settings: PreferenceSection, margins: torch.Tensor) -> torch.Tensor:
    """The loss of each pair (p) from its margin (p), the difference of rewards."""
    beta, smoothing = settings.beta, settings.label_smoothing
    match settings.loss:
        case "hinge":
            return F.relu(1 - margins)
        case "ipo":
            return (margins / beta - 1 / (2 * beta)).square()
        case "orpo":
            return -beta * F.logsigmoid(margins)
        case "robust":
            right, wrong = F.logsigmoid(margins), F.logsigmoid(-margins)
            return ((smoothing - 1) * right + smoothing * wrong) / (1 - 2 * smoothing)
        case "simpo":
            margins = margins - settings.margin
    return (smoothing - 1) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)


def compute_kto(
    settings: PreferenceSection, model: LossModel, batch: Mapping[str, Any], hidden: torch.Tensor, metrics: bool
) -> Terms:
    """The term "kto" of a micro-batch of judged answers, its weight their number.

    ``batch`` has ``label`` (n) bool, and ``kl``, the step's value of ``compute_kl``. ``metrics`` adds the mean reward
    of good and of bad answers, and the KL.
    """
    rewards = model.answers(batch, hidden).log_probabilities - batch[REFERENCE.name]  # (n)
    good, num_samples = batch["label"], torch.tensor(len(rewards), device=hidden.device)
    kl = batch.get("kl", rewards.new_zeros(())).clamp(min=0)
    beyond = settings.beta * torch.where(good, rewards - kl, kl - rewards)
    weights = torch.where(good, settings.desirable_weight, settings.undesirable_weight)
    found = {"kto": ((weights * torch.sigmoid(-beyond)).sum(), num_samples)}
    if metrics:
        scaled = settings.beta * rewards.detach()
        found |= {
            "desirable_reward": ((scaled * good).sum(), good.sum()),
            "undesirable_reward": ((scaled * ~good).sum(), (~good).sum()),
            "kl": (kl * num_samples, num_samples),
        }
    return found


def compute_kl(model: LossModel, batch: Mapping[str, Any], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of log p - log q of the answers, their number)."""
    rewards = model.answers(batch, hidden).log_probabilities - batch[REFERENCE.name]
    return rewards.sum(), torch.tensor(len(rewards), device=hidden.device)
