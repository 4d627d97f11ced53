"""Decisions about the machine: device, number of processes, their variables; notes on hardware that is not present.
Pure.
"""

from __future__ import annotations

import math

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.facts.types import Facts, Figure, GpuKind, HostFacts
from manyhands.planner.layout import Device
from manyhands.planner.types import Reason, reason

HASH_SEED = "42"  # of Python's sets of strings: the same order in every process and launch
# As launch scripts for AMD's GPUs set them: scratch memory of kernels stays with its queue (no pause to give it back
# and take it again), copies go by the copy engines (the default), RCCL gets fine-grained memory over PCIe.
AMD_ENVIRONMENT = {"HSA_NO_SCRATCH_RECLAIM": "1", "HSA_ENABLE_SDMA": "1", "HSA_FORCE_FINE_GRAIN_PCIE": "1"}


def choose_device(config: RunConfig, facts: Facts) -> tuple[Device, Reason]:
    """The GPUs, else the CPU. UserError where GPUs are asked for and there are none, or where there are some and none
    can be used, unless parallel.device is cpu: a run never falls back to the CPU in silence.
    """
    host, asked = facts.host, config.parallel.device
    num_gpus, unusable = count_gpus(facts), host.unusable_gpus
    if unusable is not None and asked != "cpu":
        raise UserError(
            f"this machine has {unusable.found}, but none can be used",
            where=f"parallel.device: {asked}",
            why=unusable.why,
            fix=f"{unusable.fix}; or set parallel.device=cpu to train on the CPU",
        )
    if host.lost_gpus and asked != "cpu":
        _refuse_lost(config, facts, num_gpus)
    gpus = [{"name": gpu.name, "bytes": gpu.memory_bytes} for gpu in host.gpus]
    if not host.is_here and asked == "cpu":
        raise UserError(
            "the plan is for GPUs, but parallel.device is cpu",
            where="parallel.device",
            fix="remove parallel.device, or plan without naming GPUs",
        )
    if asked == "cuda" and not num_gpus:
        raise UserError(
            "parallel.device is cuda, but no GPU is visible",
            where="parallel.device",
            why="there is no GPU or no driver, or CUDA_VISIBLE_DEVICES hides them",
            fix="set parallel.device=cpu, or run `manyhands gpu-info`",
        )
    if asked == "auto":
        device: Device = "cuda" if num_gpus else "cpu"
        return device, reason("device", device=device, num_gpus=num_gpus, gpus=gpus, asked=False, is_here=host.is_here)
    return asked, reason("device", device=asked, num_gpus=num_gpus, gpus=gpus, asked=True)


def _refuse_lost(config: RunConfig, facts: Facts, num_gpus: int) -> None:
    """UserError where GPUs that do not answer are needed: as many as asked for, or allowed, do not answer without them,
    or they are among those of several machines.
    """
    asked, least, lost = config.parallel.gpus, config.launch.min_gpus, facts.host.lost_gpus
    needed = least or (num_gpus + len(lost) if asked == "auto" else asked)
    if facts.num_left is not None or (num_gpus >= needed and not facts.hosts):
        return
    fix = "reset or replace it (restart the machine)"
    if num_gpus and not facts.hosts:
        fix += f", or train on the others: {how_to_go_on(num_gpus)}"
    raise UserError(lost[0], why="it has failed, or fallen off the bus", fix=fix, details=lost[1:])


def choose_world_size(config: RunConfig, facts: Facts, device: Device) -> tuple[int, Reason]:
    """Processes: given by whoever launched us, else as asked, else one a GPU, else one."""
    asked, given, num_gpus = config.parallel.gpus, facts.world_size, count_gpus(facts)
    check_nodes(config, facts)
    if facts.num_left is not None:
        size, source = facts.num_left, "left"
    elif given is not None:
        if asked not in ("auto", given) and not _is_enough(config, given):
            raise UserError(
                f"parallel.gpus is {asked}, but {given} processes were launched",
                where="parallel.gpus",
                fix=f"set parallel.gpus to {given} or auto, or launch {asked} processes",
            )
        size, source = given, "launched"
    elif asked != "auto" and device == "cuda" and asked > num_gpus and _is_enough(config, num_gpus):
        size, source = num_gpus, "fewer"
    elif asked != "auto":
        if device == "cuda" and asked > num_gpus:
            least = f", or launch.min_gpus={num_gpus} to train on fewer" if num_gpus else ""
            raise UserError(
                f"parallel.gpus is {asked}, but {num_gpus} GPU{'s are' if num_gpus != 1 else ' is'} visible",
                where="parallel.gpus",
                fix=f"set parallel.gpus to {num_gpus} or auto, or parallel.device=cpu{least}",
            )
        size, source = asked, "asked"
    else:
        size, source = (num_gpus, "gpus") if device == "cuda" else (facts.host.num_nodes, "cpu")
    if config.parallel.strategy == "single" and size > 1:
        raise UserError(
            f"parallel.strategy: single is one process, but there are {size} (parallel.gpus: {asked})",
            where="parallel.strategy",
            fix="set parallel.strategy to auto, ddp or fsdp, or parallel.gpus to 1",
        )
    return size, reason("processes", size=size, source=source, asked=asked)


def _is_enough(config: RunConfig, num: int) -> bool:
    """Whether so many GPUs, fewer than asked for, are allowed."""
    asked, least = config.parallel.gpus, config.launch.min_gpus
    return asked != "auto" and least is not None and least <= num < asked


def how_to_go_on(num_left: int) -> str:
    """What allows a run to use the GPUs that are left."""
    return f"launch.min_gpus={num_left}"


def count_gpus(facts: Facts) -> int:
    """Of all machines."""
    return sum(len(host.gpus) for host in facts.hosts) or len(facts.host.gpus) * facts.host.num_nodes


def count_nodes(facts: Facts) -> int | None:
    """Machines; None where another launcher started the processes and did not say."""
    if facts.hosts:
        return len(facts.hosts)
    return facts.host.num_nodes if facts.world_size is None else None


def check_nodes(config: RunConfig, facts: Facts) -> None:
    """UserError where the run file asks for another number of machines than there are."""
    asked, there = config.parallel.nodes, count_nodes(facts)
    if asked == "auto" or there in (None, asked):
        return
    raise UserError(
        f"parallel.nodes is {asked}, but there {'is' if there == 1 else 'are'} {there}",
        where="parallel.nodes",
        fix=f"start the run on {asked} machines (--nodes), or set parallel.nodes to {there} or auto",
    )


def explain_nodes(facts: Facts) -> tuple[Reason, ...]:
    """Which machines train together; where they differ, the least of each thing is what the plan stands on."""
    if len(facts.hosts) < 2:
        return ()
    nodes = [
        {"name": host.name, "ranks": ranks, "gpus": sorted({gpu.name for gpu in host.gpus})}
        for host, ranks in zip(facts.hosts, facts.node_ranks, strict=True)
    ]
    seen = {tuple((gpu.name, gpu.memory_bytes) for gpu in host.gpus) for host in facts.hosts}
    least = min((gpu.memory_bytes for gpu in facts.host.gpus), default=None)
    return (reason("nodes", nodes=nodes, mixed=len(seen) > 1, least_bytes=least),)


def ranks_per_machine(facts: Facts, device: Device, world_size: int) -> int:
    """Processes that share this machine: as launched, else one a visible GPU; on CPU all are taken to be on one
    machine.
    """
    if facts.local_world_size is not None:
        return min(world_size, facts.local_world_size)
    return min(world_size, len(facts.host.gpus)) if device == "cuda" else world_size


def choose_shard_ranks(config: RunConfig, facts: Facts, device: Device, world_size: int) -> int:
    """Ranks that hold one copy together where the strategy is hsdp: as asked, else those of one machine; of machines
    with different numbers their greatest common divisor.

    UserError, with the nearest numbers that work, where they do not divide the processes.
    """
    asked = config.parallel.shard_degree
    whole = math.gcd(*facts.node_ranks) or ranks_per_machine(facts, device, world_size)
    size = whole if asked == "auto" else asked
    if config.parallel.strategy != "hsdp" or world_size % size == 0:
        return size
    divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
    below, above = max(n for n in divisors if n < size), min((n for n in divisors if n > size), default=None)
    near = f"{below} or {above}" if above else str(below)
    raise UserError(
        f"parallel.shard_degree: {size} does not divide {world_size} processes",
        where="parallel.shard_degree",
        why="every copy is held by as many ranks" + (", auto takes those of one machine" if asked == "auto" else ""),
        fix=f"set parallel.shard_degree to {near}, or start another number of processes",
    )


def choose_environment(
    device: Device, host: HostFacts, local_world_size: int, *, zero: bool, deterministic: bool = False
) -> dict[str, str]:
    """Variables that every worker gets unless the user has set them; ``launch/environment.py`` sets them.
    ``local_world_size`` is that of one machine. ``zero``: DeepSpeed trains, which else takes the first accelerator that
    it finds. ``deterministic``: cuBLAS sums in a fixed order only with a workspace of its own.
    """
    # Without the first a second attempt of torch's agent reads the first one's addresses.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONHASHSEED": HASH_SEED}
    environment |= {"DS_ACCELERATOR": device} if zero else {}
    if device == "cuda":
        amd = AMD_ENVIRONMENT if host.gpus and host.gpus[0].vendor == "amd" else {}
        environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else {}
        return environment | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | amd
    num_cores = host.num_cores
    return environment | {"OMP_NUM_THREADS": str(max(1, num_cores // local_world_size))}


def explain_hardware(device: Device, host: HostFacts) -> tuple[Reason, ...]:
    """What the plan stands on where GPUs are not here, are of a kind whose figures are known, or are AMD's."""
    kind, untried = host.kind, (reason("untried"),) if any(gpu.vendor == "amd" for gpu in host.gpus) else ()
    if kind is None or device == "cpu":
        return untried if device == "cuda" else ()
    if host.is_here:
        return (figures_of(kind), *untried)
    hardware = reason(
        "hardware",
        kind=kind.name,
        num_nodes=host.num_nodes,
        num_per_node=len(host.gpus),
        memory_mib=_pair(kind.memory_mib),
        usable_mib=_pair(kind.usable_mib),
        note=kind.note,
    )
    share = len(host.gpus)
    assumed = reason(
        "assumed", cores=host.num_cores // share, host_bytes=host.memory_bytes // share, num_nodes=host.num_nodes
    )
    return hardware, figures_of(kind), assumed, *untried


def figures_of(kind: GpuKind) -> Reason:
    """Speeds of a kind of GPU with their sources, where they are known."""
    figures = {name: getattr(kind, name) for name in ("bf16_tflops", "fp8_tflops", "memory_gb_s", "link_gb_s")}
    return reason("figures", kind=kind.name, **{name: _pair(found) for name, found in figures.items() if found})


def _pair(figure: Figure) -> tuple[float, str]:
    return figure.value, figure.source
