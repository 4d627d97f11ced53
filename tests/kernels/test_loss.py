"""The fused loss against three plain lines in float64 or float32: values, gradients, memory, numerics."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyhands.kernels.backend import Backend
from manyhands.kernels.loss import choose_backend, chunk_rows, cross_entropy, linear_cross_entropy
from manyhands.kernels.loss.reference import softmax_rows

SCALED = [(1.0, None), (0.25, None), (1.0, 3.0), (0.5, 2.0)]  # of logits: a scale, and a cap


def draw(num_rows: int, size: int, num_words: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_rows + size + num_words)
    hidden = torch.randn(num_rows, size, generator=generator, dtype=torch.float64)
    weight = torch.randn(num_words, size, generator=generator, dtype=torch.float64) * 2 / size**0.5
    labels = torch.randint(0, num_words, (num_rows,), generator=generator)
    weights = torch.rand(num_rows, generator=generator)
    return hidden.to(device, dtype), weight.to(device, dtype), labels.to(device), weights.to(device)


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, weights: Any, scale: float, cap: float | None
) -> torch.Tensor:
    logits = F.linear(hidden, weight) * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    losses = F.cross_entropy(wide, labels, reduction="none")
    return (losses if weights is None else losses * weights).sum()


def with_gradients(
    function: Any, hidden: torch.Tensor, weight: torch.Tensor, *args: Any, divisor: float = 7.0
) -> list[torch.Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total = function(hidden, weight, *args)
    (total / divisor).backward()
    return [total.detach(), hidden.grad, weight.grad]  # type: ignore[list-item]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("scale", "cap", "weighted", "backend"),
    [
        *((*pair, weighted, "eager") for pair in SCALED for weighted in (False, True)),
        *((1.0, None, False, "compile"), (0.5, 2.0, True, "compile")),
    ],
)
def test_float64_agrees_with_three_plain_lines(scale: float, cap: float | None, weighted: bool, backend: str) -> None:
    hidden, weight, labels, weights = draw(37, 12, 53, torch.float64)
    weights = weights if weighted else None  # type: ignore[assignment]
    expected = with_gradients(plain, hidden, weight, labels, weights, scale, cap)

    def fused(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = dict(
            weights=weights, logit_scale=scale, softcap=cap, backend=backend, max_logits=10 * 53
        )
        return linear_cross_entropy(h, w, labels, **options)[0]

    for found, wanted in zip(with_gradients(fused, hidden, weight), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_rows, size, num_words", [(0, 8, 11), (1, 1, 2), (1, 8, 1), (5, 3, 257), (300, 16, 64)])
@pytest.mark.parametrize("max_logits", [1, 64 * 130, None])
def test_odd_shapes_and_chunks(num_rows: int, size: int, num_words: int, max_logits: int | None) -> None:
    hidden, weight, labels, weights = draw(num_rows, size, num_words, torch.float64)
    expected = with_gradients(plain, hidden, weight, labels, weights, 1.0, None)
    found = with_gradients(
        lambda h, w: linear_cross_entropy(h, w, labels, weights=weights, max_logits=max_logits)[0], hidden, weight
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("num_words", [3, 64, 67, 135])
@pytest.mark.parametrize("max_logits", [64 * 67, None])
def test_a_vocabulary_of_any_size_in_bfloat16(num_words: int, max_logits: int | None) -> None:
    """Words beyond a multiple of 64 are a product of their own where the size is no multiple of 8."""
    hidden, weight, labels, weights = draw(150, 48, num_words, torch.bfloat16)
    expected = with_gradients(plain, hidden.float(), weight.float(), labels, weights, 1.0, None)
    found = with_gradients(
        lambda h, w: linear_cross_entropy(h, w, labels, weights=weights, max_logits=max_logits)[0], hidden, weight
    )
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other).norm() <= 6e-3 * other.norm()


@pytest.mark.parametrize("frozen", ["head", "body", "both", "no_grad"])
def test_only_wanted_gradients_are_made(frozen: str) -> None:
    hidden, weight, labels, _ = draw(9, 4, 10, torch.float32)
    hidden.requires_grad_(frozen in ("head", "no_grad"))
    weight.requires_grad_(frozen in ("body", "no_grad"))
    with torch.set_grad_enabled(frozen != "no_grad"):
        total, _ = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(total, plain(hidden, weight, labels, None, 1.0, None))
    assert total.requires_grad == (frozen in ("head", "body"))
    if total.requires_grad:
        total.backward()
    assert (hidden.grad is not None) == (frozen == "head")
    assert (weight.grad is not None) == (frozen == "body")


def test_tied_weight_gets_both_shares() -> None:
    ids, labels = torch.tensor([1, 5, 5, 2]), torch.tensor([5, 5, 2, 0])
    found = []
    for function in (
        lambda h, w: linear_cross_entropy(h, w, labels)[0],
        lambda h, w: plain(h, w, labels, None, 1.0, None),
    ):
        embedding = nn.Embedding(8, 6, dtype=torch.float64)
        embedding.weight.data.copy_(torch.linspace(-1, 1, 48).reshape(8, 6))
        function(torch.tanh(embedding(ids)), embedding.weight).backward()
        found.append(embedding.weight.grad)
    torch.testing.assert_close(*found)


def test_hits_are_arg_max_and_negative_targets_count_nothing() -> None:
    hidden, weight, labels, _ = draw(40, 8, 6, torch.float32)
    labels[::3] = (hidden @ weight.t()).argmax(1)[::3]
    total, hits = linear_cross_entropy(hidden, weight, labels, metrics=True)
    assert hits.item() == ((hidden @ weight.t()).argmax(1) == labels).sum().item() >= 14
    assert linear_cross_entropy(hidden, weight, labels)[1].item() == 0
    padded = torch.cat([labels, torch.full((3,), -100)])
    more, more_hits = linear_cross_entropy(
        torch.cat([hidden, hidden[:3]]).requires_grad_(), weight, padded, metrics=True
    )
    torch.testing.assert_close(more.detach(), total)
    assert more_hits == hits
    more.backward()


def test_backward_twice_and_sums_of_losses() -> None:
    hidden, weight, labels, _ = draw(6, 4, 9, torch.float64)
    hidden.requires_grad_()
    total, _ = linear_cross_entropy(hidden, weight, labels)
    total.backward(retain_graph=True)
    first = hidden.grad.clone()  # type: ignore[union-attr]
    total.backward()
    torch.testing.assert_close(hidden.grad, 2 * first)


@pytest.mark.parametrize(
    "num_rows, num_words, trained",
    [(8192, 128256, False), (16384, 128256, True), (4097, 262144, True), (100, 50257, False)],
)
def test_chunks_are_bounded_even_and_whole_tiles(num_rows: int, num_words: int, trained: bool) -> None:
    step = chunk_rows(num_rows, num_words, trained)
    assert step * num_words <= (cross_entropy.MAX_LOGITS_TRAINED if trained else cross_entropy.MAX_LOGITS_FROZEN)
    last = num_rows % step or step
    assert step == num_rows or step % 128 == 0
    assert last >= step // 2


def test_logits_are_never_held_whole() -> None:
    hidden, weight, labels, _ = draw(512, 4, 1000, torch.float32)
    hidden.requires_grad_()
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                t.untyped_storage().nbytes()
                for t in torch.utils._pytree.tree_leaves(out)
                if isinstance(t, torch.Tensor)
            )
            return out

    with Watch():
        linear_cross_entropy(hidden, weight, labels, max_logits=128 * 1000)[0].backward()
    assert max(sizes) <= 1.1 * 128 * 1000 * 8  # int64 columns of one chunk at most


@pytest.mark.parametrize("scale, cap", [(1.0, None), (0.5, 5.0)])
def test_bfloat16_error_is_at_most_that_of_the_plain_path(scale: float, cap: float | None) -> None:
    errors: dict[str, list[float]] = {"plain": [0.0] * 3, "fused": [0.0] * 3}
    for num_rows, size, num_words in [(200, 64, 512), (257, 96, 333), (130, 128, 1000)]:
        hidden, weight, labels, weights = draw(num_rows, size, num_words, torch.bfloat16)
        reference = with_gradients(plain, hidden.float(), weight.float(), labels, weights, scale, cap)
        kinds = {
            "plain": lambda h, w, t=labels, q=weights: plain(h, w, t, q, scale, cap),
            "fused": lambda h, w, t=labels, q=weights, n=num_words: linear_cross_entropy(
                h, w, t, weights=q, logit_scale=scale, softcap=cap, max_logits=n * 128
            )[0],
        }
        for kind, function in kinds.items():
            for i, (found, wanted) in enumerate(zip(with_gradients(function, hidden, weight), reference, strict=True)):
                errors[kind][i] += float((found.float() - wanted).norm() / wanted.norm())
    for one, other in zip(errors["fused"], errors["plain"], strict=True):
        assert one <= 1.2 * other


def test_wrong_tensors_are_refused() -> None:
    hidden, weight, labels, weights = draw(4, 3, 5, torch.float32)
    with pytest.raises(TypeError, match="one dtype"):
        linear_cross_entropy(hidden, weight.bfloat16(), labels)
    with pytest.raises(ValueError, match=r"\(m, e\)"):
        linear_cross_entropy(hidden, weight[:, :2], labels)
    with pytest.raises(ValueError, match="shape"):
        linear_cross_entropy(hidden, weight, labels, weights=weights[:2])


def test_backend_is_stated() -> None:
    chosen = choose_backend(torch.device("cpu"), torch.float32)
    assert (chosen.name, chosen.reason) == ("eager", "the device is cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_triton_agrees_with_plain_torch(dtype: torch.dtype) -> None:
    assert choose_backend(torch.device("cuda", 0), dtype) == Backend("triton")
    from manyhands.kernels.loss.triton import softmax_rows_triton

    for num_words, cap, weighted, metrics in itertools.product(
        [1, 2, 63, 1000, 8192, 8193, 50257], [None, 5.0], [False, True], [False, True]
    ):
        logits = (torch.randn(7, num_words, device="cuda") * 5).to(dtype)
        labels = torch.randint(0, num_words, (7,), device="cuda")
        labels[3] = -100
        weights = torch.rand(7, device="cuda") if weighted else None
        outcome = []
        for function in (softmax_rows_triton, softmax_rows):
            buffer = torch.zeros(7, num_words + 3, device="cuda", dtype=dtype)[:, :num_words]
            buffer.copy_(logits)
            losses, hits = torch.empty(7, device="cuda"), torch.zeros(7, dtype=torch.bool, device="cuda")
            function(buffer, labels, weights, losses, hits if metrics else None, logit_scale=0.5, softcap=cap)
            outcome.append((buffer, losses, hits))
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(outcome[0][0], outcome[1][0], rtol=max(eps, 1e-4), atol=1e-6)
        torch.testing.assert_close(outcome[0][1], outcome[1][1], rtol=1e-5, atol=1e-5)
        assert torch.equal(outcome[0][2], outcome[1][2])


@pytest.mark.gpu
def test_gpu_sums_the_weight_gradient_in_float32() -> None:
    from manyhands.kernels.matmul import add_mm_, has_mixed_mm

    assert has_mixed_mm(torch.device("cuda", 0), torch.bfloat16)
    hidden, weight, labels, _ = draw(700, 64, 999, torch.bfloat16, "cuda")
    total = torch.zeros(999, 64, device="cuda")
    logits = torch.randn(700, 1024, device="cuda").bfloat16()[:, :999]
    add_mm_(total, logits.t(), hidden)
    torch.testing.assert_close(total, logits.float().t() @ hidden.float(), rtol=1e-4, atol=1e-3)
    reference = with_gradients(plain, hidden.float(), weight.float(), labels, None, 1.0, None)
    found = with_gradients(lambda h, w: linear_cross_entropy(h, w, labels, max_logits=999 * 256)[0], hidden, weight)
    for one, other in zip(found, reference, strict=True):
        assert float((one.float() - other).norm() / other.norm()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_words", [250, 256, 260, 280])
def test_whatever_fresh_memory_holds(num_words: int, dtype: torch.dtype) -> None:
    """Memory that nobody has written holds NaN here; some CPU kernels read beyond the columns that they are given."""
    hidden, weight, labels, weights = draw(22, 64, num_words, dtype)
    expected = with_gradients(plain, hidden.double(), weight.double(), labels, weights, 1.0, None)
    torch.use_deterministic_algorithms(True)  # fills what `empty` gives with NaN
    try:
        found = with_gradients(lambda h, w: linear_cross_entropy(h, w, labels, weights=weights)[0], hidden, weight)
    finally:
        torch.use_deterministic_algorithms(False)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip(found, expected, strict=True):
        assert torch.linalg.vector_norm(one.double() - other) <= bound * torch.linalg.vector_norm(other)
