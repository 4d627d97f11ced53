"""Host memory: optimizer states a chunk at a time, and activations through autograd's hooks, on a CPU with plain
copies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyhands.checkpoint.load import load_checkpoint
from manyhands.checkpoint.save import save_checkpoint
from manyhands.engine import activations
from manyhands.engine.activations import ActivationStore, SavedTensor, offload_activations
from manyhands.engine.apply import compile_blocks
from manyhands.engine.optimizers import StreamedOptimizer, split_parameters
from manyhands.engine.tiles import tile_mlps
from tests.support.tiny import tiny_model

CPU = torch.device("cpu")


def test_chunks_hold_about_so_many_bytes_and_keep_their_groups() -> None:
    sizes = [[100, 200], [300], [5000, 50]]
    members = [[torch.zeros(size // 4) for size in group] for group in sizes]
    chunks = split_parameters(members, 400)
    found = [[[p.numel() * 4 for p in group] for group in chunk] for chunk in chunks]
    assert found == [[[100, 200], [], []], [[], [300], []], [[], [], [5000]], [[], [], [48]]]
    assert split_parameters([[], []], 400) == [[[], []]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    matrices, rest = ([p for p in model.parameters() if (p.ndim > 1) is large] for large in (True, False))
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest}], lr=1e-2, fused=True)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_streamed_optimizer_resumes_from_a_plain_ones_checkpoint(tmp_path: Path) -> None:
    plain = small_model()
    optimizer = adamw(plain)
    take_steps(plain, optimizer, range(2))
    save_checkpoint(tmp_path / "step-000002", plain, optimizer, {}, rank=0, world_size=1)
    take_steps(plain, optimizer, range(2, 5))

    streamed = small_model()
    inner = adamw(streamed)
    host = StreamedOptimizer(inner, CPU, chunk_bytes=600)
    load_checkpoint(tmp_path / "step-000002", streamed, host)
    assert inner.state is host.state and len(host.state) == 4
    take_steps(streamed, host, range(2, 5))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), streamed.parameters(), strict=True))
    for group in host.param_groups:  # a learning rate that is set on the outer optimizer is the inner one's
        group["lr"] = 0.0
    before = [p.detach().clone() for p in streamed.parameters()]
    take_steps(streamed, host, range(5, 6))
    assert all(torch.equal(a, b) for a, b in zip(before, streamed.parameters(), strict=True))
    assert [len(group["params"]) for group in inner.param_groups] == [2, 2]


def test_activations_are_stored_once_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "PASSING_TENSORS", 0)
    monkeypatch.setattr(activations, "MAX_LEAVING_BYTES", 3000)
    monkeypatch.setattr(activations, "MAX_AHEAD_BYTES", 900)
    store = ActivationStore(CPU)
    store.begin()
    tensors = [torch.randn(100) for _ in range(10)]
    packed = [store.pack(tensor) for tensor in tensors]
    again = store.pack(tensors[-1])
    assert again is packed[-1] and all(isinstance(saved, SavedTensor) for saved in packed)
    assert store.num_packed_bytes == 10 * 400
    copies = [tensor.clone() for tensor in tensors]
    for tensor in tensors[:2]:
        tensor.zero_()  # long copied: the memory is used again
    assert torch.equal(store.unpack(packed[-1]), copies[-1])
    on_device = [saved.device is not None for saved in packed]
    assert (
        on_device == [False] * 3 + [True] * 7
    )  # the last ones had not left yet; those before are fetched when they are near
    assert torch.equal(store.unpack(packed[3]), copies[3])
    assert [saved.device is not None for saved in packed[:3]] == [False, True, True]
    assert torch.equal(store.unpack(packed[0]), copies[0])


def test_what_all_blocks_save_is_copied_once_and_reused_memory_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "PASSING_TENSORS", 0)
    monkeypatch.setattr(activations, "MAX_LEAVING_BYTES", 0)
    store = ActivationStore(CPU)
    store.begin()
    angles, packed, memory = torch.randn(100), [], bytearray(400)
    for number in range(8):  # each time another storage in the same memory, as the allocator gives it again
        own = torch.frombuffer(memory, dtype=torch.float32).fill_(number)
        packed.append((store.pack(angles), store.pack(own)))
        del own
        store.pack(torch.randn(100))  # lets the one before leave
    assert all(shared is packed[0][0] for shared, _ in packed)
    assert store.num_packed_bytes == 17 * 400
    for number, (_, own) in enumerate(packed):
        assert torch.equal(store.unpack(own), torch.full((100,), float(number)))
    store.begin()
    assert store.pack(angles) is not packed[0][0], "a later forward pass copies it again"


@pytest.mark.ci
def test_compiled_blocks_move_their_rotary_angles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "PASSING_TENSORS", 0)
    monkeypatch.setattr(activations, "MAX_LEAVING_BYTES", 0)
    copied: list[torch.Tensor] = []
    copy_out = ActivationStore._copy_out
    monkeypatch.setattr(
        ActivationStore, "_copy_out", lambda self, saved, x: (copied.append(x), copy_out(self, saved, x))
    )
    model = tiny_model("llama", num_hidden_layers=4).train()
    activations.checkpoint_blocks(model, ["except_attention"] * 4, compiled=True)
    torch._dynamo.reset()
    compile_blocks(model, dynamic=True, backend="aot_eager")
    offload_activations(model, CPU)
    model.model(input_ids=torch.arange(40)[None], use_cache=False)[0].sum().backward()
    shapes = [tuple(x.shape) for x in copied]
    assert shapes.count((1, 40, 64)) >= 4, "inputs of blocks"
    assert sum(shape[-2:] == (40, 16) and len(shape) == 3 for shape in shapes) == 2, "cosine and sine"


def test_large_tensors_lie_in_pieces_on_the_host_and_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not rounded up to a power of 2 each; strides of dense tensors stay, as kernels were compiled for them."""
    monkeypatch.setattr(activations, "PINNED_PIECE", 64)
    monkeypatch.setattr(activations, "PASSING_TENSORS", 0)
    monkeypatch.setattr(activations, "MAX_LEAVING_BYTES", 0)
    store = ActivationStore(CPU)
    store.begin()
    whole = torch.randn(3, 5, 7)
    tensors = [whole, whole.permute(2, 0, 1), whole[:, 1:3], torch.arange(41).to(torch.bfloat16), torch.empty(0)]
    packed = [store.pack(tensor) for tensor in tensors]
    assert [[piece.nbytes for piece in saved.host] for saved in packed] == [
        *([64] * 6 + [36], [64] * 6 + [36], [64, 64, 40], [64, 18], [0])
    ]
    for saved, tensor in reversed([*zip(packed, tensors, strict=True)]):
        found = store.unpack(saved)
        assert torch.equal(found, tensor) and found.stride() == torch.empty_like(tensor).stride()


@pytest.mark.parametrize(("most", "leaving"), [(2**30, 4), (900, 2), (300, 1)])
def test_long_tensors_pass_up_to_so_many_bytes(most: int, leaving: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MAX_PASSING_BYTES", most)
    monkeypatch.setattr(activations, "MAX_LEAVING_BYTES", 300)
    store = ActivationStore(CPU)
    packed = [store.pack(torch.randn(100)) for _ in range(9)]
    assert len(store._leaving) == leaving
    monkeypatch.setattr(activations, "MAX_AHEAD_BYTES", 300)
    store.unpack(packed[5])
    assert sum(saved.device is not None for saved in packed[:5]) == leaving


@pytest.mark.parametrize("num_tensors", [0, 2, 4])
def test_some_tensors_pass_however_large(num_tensors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two blocks' are on their way while a third computes; fetched ahead is one at least."""
    monkeypatch.setattr(activations, "PASSING_TENSORS", num_tensors)
    monkeypatch.setattr(activations, "MAX_LEAVING_BYTES", 300)
    monkeypatch.setattr(activations, "MAX_AHEAD_BYTES", 300)
    store = ActivationStore(CPU)
    store.begin()
    packed = [store.pack(torch.randn(100)) for _ in range(9)]
    leaving = max(1, num_tensors)
    assert len(store._leaving) == leaving
    store.unpack(packed[8 - leaving])
    ahead = max(1, num_tensors)
    first = 8 - leaving - ahead
    assert [saved.device is not None for saved in packed] == [False] * first + [True] * (9 - first)


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_only_activations_of_the_base_move_and_with_recomputed_blocks_only_their_inputs(
    activation_checkpointing: bool,
) -> None:
    model = tiny_model("llama").train()
    plain = tiny_model("llama").train()
    if activation_checkpointing:
        for each in (model, plain):
            each.gradient_checkpointing_enable({"use_reentrant": False})
    store = offload_activations(model, CPU)
    ids = torch.arange(40)[None]
    for each in (model, plain):
        for _ in range(2):
            each(input_ids=ids, use_cache=False).logits.square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    per_pass, hidden = store.num_packed_bytes // 2, 40 * 64 * 4
    blocks = len(model.model.layers) * hidden
    if activation_checkpointing:
        assert blocks <= per_pass < 3 * blocks
    else:
        assert per_pass > 8 * blocks
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    assert store.num_packed_bytes == 2 * per_pass  # nothing is kept for no backward pass


@pytest.mark.parametrize(
    ("mode", "compiled"),
    [("full", False), ("except_attention", False), pytest.param("full", True, marks=pytest.mark.ci)],
)
def test_of_some_blocks_the_inputs_move_and_of_the_last_ones_they_stay(mode: Any, compiled: bool) -> None:
    """In every pass, each with a forward pass without gradients between; gradients are the same to the bit."""
    ids, size, layers = torch.arange(40)[None], 40 * 64 * 4, 4
    whole: dict[str, Any] = {}
    for moved in (None, 1, 4) if compiled else (None, 0, 1, 3, 4):
        model = tiny_model("llama", num_hidden_layers=layers).train()
        activations.checkpoint_blocks(model, [mode] * layers, compiled=compiled)
        if compiled:
            torch._dynamo.reset()
            compile_blocks(model, dynamic=True, backend="aot_eager")
        store = None if moved is None else offload_activations(model, CPU, moved)
        for passes in (1, 2):
            hidden = model.model(input_ids=ids, use_cache=False)[0]
            if store is not None and moved is not None:
                rest = (
                    2 * size + 40 * 4 if moved == layers else 0
                )  # of the last norm: its input, that divided, its norm
                small = store.num_packed_bytes - passes * moved * size
                assert 0 <= small <= passes * (rest + size // 4), "rotary embeddings may move too"
                assert len(store._leaving) == 0 or moved == layers, "what moved has left by the end"
            hidden.square().sum().backward()
            with torch.no_grad():
                model.model(input_ids=ids, use_cache=False)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        whole = whole or found
        assert all(torch.equal(found[name], whole[name]) for name in whole), moved


@pytest.mark.parametrize(
    ("moved", "compiled"), [(4, False), (2, False), (1, False), pytest.param(2, True, marks=pytest.mark.ci)]
)
def test_inputs_of_blocks_in_pairs_are_computed_again(moved: int, compiled: bool) -> None:
    """One input a pair is kept; its first block computes three times, each other twice; no bit changes, with dropout in
    blocks that are not compiled. Compiled with tiles, as plans have it.
    """
    ids, size, layers = torch.arange(40)[None], 40 * 64 * 4, 4
    gradients, counts = [], []
    for repeated in (0, 2) if compiled else (0, 1, 2):
        model = tiny_model("llama", num_hidden_layers=layers).train()
        calls: list[int] = []
        for index, block in enumerate(() if compiled else model.model.layers):
            block.self_attn.o_proj.register_forward_hook(lambda *_, n=index, calls=calls: calls.append(n))
            block.mlp.register_forward_pre_hook(lambda _, args: F.dropout(args[0], 0.5))
        activations.checkpoint_blocks(model, ["full"] * layers, compiled=compiled)
        if compiled:
            tile_mlps(model, 16)
            torch._dynamo.reset()
            compile_blocks(model, dynamic=True, backend="aot_eager")
        store = offload_activations(model, CPU, moved, repeated)
        torch.manual_seed(0)
        hidden = model.model(input_ids=ids, use_cache=False)[0]
        kept = moved - min(repeated, moved // 2)
        assert (store.num_packed_bytes - (2 * size if moved == layers else 0)) // size == kept
        hidden.square().sum().backward()
        with torch.no_grad():
            model.model(input_ids=ids, use_cache=False)
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        counts.append([calls.count(index) - 1 for index in range(layers)])
    assert all(torch.equal(found[name], gradients[0][name]) for found in gradients for name in gradients[0])
    if not compiled:
        assert counts == [[2, 2, 2, 2], [3, 2, 2, 2], [3, 2, 3, 2]]


@pytest.mark.gpu
def test_on_a_gpu_streamed_steps_are_the_plain_ones_and_states_are_pinned_host_memory() -> None:
    device = torch.device("cuda")
    models = [small_model().to(device) for _ in range(2)]
    plain, streamed = adamw(models[0]), StreamedOptimizer(adamw(models[1]), device, chunk_bytes=600)
    for seed in range(4):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(device)
        for model, optimizer in zip(models, (plain, streamed), strict=True):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    moments = [state["exp_avg"] for state in streamed.state.values()]
    assert len(moments) == 4 and all(moment.device.type == "cpu" and moment.is_pinned() for moment in moments)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_on_a_gpu_activations_leave_and_gradients_stay(activation_checkpointing: bool, compiled: bool) -> None:
    """Several passes in a row: memory that is used again too early would show in the gradients."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    ids = torch.arange(4096, device="cuda")[None] % 250
    peaks, gradients = [], []
    for offloads in (False, True):
        model = tiny_model("llama", **sizes).to("cuda").train()
        if activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if compiled:
            torch._dynamo.reset()
            compile_blocks(model, dynamic=None)
        if offloads:
            offload_activations(model, torch.device("cuda"))
        for step in range(3):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            hidden = model.model(input_ids=ids, use_cache=False)[0]
            if step == 2:
                peaks.append(torch.cuda.memory_allocated() - before)
            hidden.square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    if not activation_checkpointing:
        assert peaks[1] < 0.8 * peaks[0]  # what is on its way out is bounded
