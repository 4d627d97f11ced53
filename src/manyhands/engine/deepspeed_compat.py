"""All that is asked of DeepSpeed beyond its documented interface, and the one thing in it that is changed.

Written against 0.19.8. What is read here: the partitions of gradients (needed before the update, and in float64),
where a parameter's fragment lies in its flat partition, and how stage 3 holds a parameter. Everything else that the
engine calls is public (``initialize``, ``zero.Init``, the engine's ``backward``, ``step`` and boundary,
``deepspeed.utils.safe_get_full_*``).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from manyhands.core.errors import missing_deepspeed
from manyhands.core.world import World


def open_deepspeed(world: World) -> ModuleType:
    """The package, set up for this rank: its accelerator, its local rank, and no compiler. UserError if it is missing.

    ``__compatible_ops__`` names the extensions that DeepSpeed may build when they are first needed. One of them, shared
    memory for CPU collectives, would be built by ``initialize`` on a CPU: minutes with ninja and g++, ranks waiting on
    a lock file, which a build that was killed leaves behind for ever. None is needed here, as torch's optimizers
    update, so none is offered. There is no option for it; it can go when ``build_shm_op`` (deepspeed/comm/torch.py) has
    one.
    """
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    os.environ["LOCAL_RANK"] = str(world.local_rank)  # asked for by zero.Init and initialize
    try:
        import deepspeed
    except ImportError as error:
        raise missing_deepspeed(str(error)) from error
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.utils.logger.setLevel(logging.ERROR)
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what ``initialize`` prints of every process group and option; errors are raised."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def masters(optimizer: Any) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """This rank's flat float32 partitions, each with the options of its group; torch's optimizer steps these."""
    groups = optimizer.optimizer.param_groups
    if is_stage_3(optimizer):  # which empties the groups between two updates
        flats = optimizer.fp32_partitioned_groups_flat
        return [(flat, groups[optimizer.sub_group_to_group_id[index]]) for index, flat in enumerate(flats)]
    return [(flat, group) for group in groups for flat in group["params"]]


def gradient_parts(optimizer: Any) -> list[torch.Tensor]:
    """This rank's partitions of the reduced gradients, as the next update will read them; padding is zero.

    They are there after the backward pass of a step's last micro-batch; offloaded ones too, as ``overlap_comm`` ends
    that with a wait for the GPU.
    """
    if hasattr(optimizer, "fp32_groups_gradient_flat_partition"):  # stage 1 in bfloat16
        return list(optimizer.fp32_groups_gradient_flat_partition)
    if getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False):
        return [flat.grad for flat, _ in masters(optimizer) if flat.grad is not None]
    return [part for group in optimizer.averaged_gradients.values() if group is not None for part in group]


def drop_gradients(optimizer: Any) -> None:
    """Forgets gradients that no update will follow: what DeepSpeed does where it skips one."""
    if hasattr(optimizer, "clear_hp_grads"):  # stage 1 in bfloat16
        optimizer.zero_grad()
        optimizer.clear_hp_grads()
        return
    if not is_stage_3(optimizer):
        optimizer._release_preflattened_grad_buffers()
        optimizer.all_grad_tensors = {}
        optimizer.micro_step_id = -1  # else the next micro-batch is added to what host memory holds
    optimizer.averaged_gradients = {}
    optimizer.zero_grad()


def is_stage_3(optimizer: Any) -> bool:
    """Whether this is the optimizer of stage 3."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def copy_masters(optimizer: Any) -> None:
    """Makes the weights that compute what the masters are now. Collective."""
    if not is_stage_3(optimizer):
        optimizer.update_lp_params()
        return
    for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        optimizer.fp16_partitioned_groups_flat[index].data.copy_(flat.data)
        optimizer._unflatten_partitioned_parameters(index)


def is_sharded_weight(tensor: Any) -> bool:
    """Whether this is a parameter of stage 3, of which the model has an empty tensor while it does not compute."""
    return hasattr(tensor, "ds_id")


def is_master_sharded(tensor: Any) -> bool:
    """Whether this is a trained parameter of stages 1 and 2, of whose master each rank has a fragment, or none."""
    return hasattr(tensor, "_hp_mapping")


def fragment(
    tensor: Any, state: str | None = None, optimizer: torch.optim.Optimizer | None = None
) -> tuple[torch.Tensor, int]:
    """This rank's flat piece of a parameter's master, or of its state ``state`` in ``optimizer``, and where it begins.

    The piece shares memory with the partition. Of a frozen parameter of stage 3 it is of the weight itself. Empty where
    this rank has none of it. The states are looked up here, as DeepSpeed links its own fragments to those of the first
    group of parameters alone.
    """
    if not is_sharded_weight(tensor):
        return _fragment_of_master(tensor, state, optimizer)
    rank = torch.distributed.get_rank(tensor.ds_process_group)
    start = min(tensor.ds_numel, tensor.partition_numel() * rank)
    size = min(tensor.partition_numel(), tensor.ds_numel - start)
    if tensor.requires_grad and hasattr(tensor, "_z3_optimizer"):
        flat, _ = tensor._z3_optimizer._get_fp32_opt_state_partition(
            tensor, release_swap_buffers=False, optim_state_key=state
        )
    else:
        flat = tensor.ds_tensor
    return flat.detach().view(-1)[:size], start


def _fragment_of_master(
    tensor: Any, state: str | None, optimizer: torch.optim.Optimizer | None
) -> tuple[torch.Tensor, int]:
    mapping = tensor._hp_mapping
    if mapping is None:
        return torch.empty(0, dtype=torch.float32), 0
    start = mapping.lp_fragment_address.start
    if state is None:
        return mapping.hp_fragment.detach(), start
    assert optimizer is not None
    (flat,) = optimizer.param_groups[mapping.param_group_index]["params"]
    address = mapping.get_hp_fragment_address()
    return optimizer.state[flat][state].narrow(0, address.start, address.numel), start
