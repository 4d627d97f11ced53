"""The machines as the run finds them, before the model is built: warnings within three seconds, and nothing kept.

``python -m manyhands.worker.health``: the matmul rates of this machine's GPUs as one JSON line, for ``doctor``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from manyhands.core.collective_errors import run_on_all_ranks
from manyhands.facts.gpu_kinds import kind_of_all
from manyhands.facts.health import (
    HealthFinding,
    HostHealth,
    judge_host,
    judge_link,
    judge_speed,
    judge_versions,
    read_health,
)
from manyhands.facts.host import read_host_facts
from manyhands.facts.types import Figure, GpuKind
from manyhands.launch.environment import ATTEMPT
from manyhands.launch.nodes.info import host_name
from manyhands.worker.rank import Rank

SIDE = 4096  # of the matrices: 96 MiB in all, freed before the model is built
WARM_S, TIMED_S = 0.2, 0.3
LINK_BYTES, LINK_ROUNDS = 2**26, 5


def check_machines(rank: Rank) -> None:
    """Rank 0 shows what might slow the run down or end it. Nothing here ends it. After a restart it is known, and the
    driver would answer late, as it takes back what the ranks of before have held; on a full GPU there is no room yet.
    """
    is_gpu, is_restart = rank.world.device.type == "cuda", int(os.environ.get(ATTEMPT, 1)) > 1
    rate = matmul_tflops(rank.world.device) if is_gpu and not is_restart else None
    link = all_reduce_gb_s(rank.world.device) if is_gpu and not is_restart and rank.world.world_size > 1 else None
    health = None if is_restart or rank.world.local_rank else read_health(host_name(), rank.folder.path)
    found = run_on_all_ranks(lambda: (host_name(), rate, health))
    if not rank.world.is_first or is_restart:
        return
    kind = _kind() if is_gpu else None
    for finding in judge_all(found, kind, link):
        rank.process.print(f"warning: {finding.text}" + (f" -> {finding.fix}" if finding.fix else ""))


def _kind() -> GpuKind | None:
    """Of this machine's GPUs; with the rate that ``doctor --calibrate`` has measured here, if it has."""
    host = read_host_facts()
    kind, calibration = kind_of_all(host.gpus), host.calibration
    if kind is None or calibration is None:
        return kind
    here = Figure(value=calibration.matmul_tflops, source=f"measured: here, {calibration.when}")
    return kind.model_copy(update={"bf16_tflops": here})


def judge_all(
    found: list[tuple[str, float | None, HostHealth | None]], kind: GpuKind | None, link_gb_s: float | None
) -> Iterator[HealthFinding]:
    """By rank: its machine's name, its GPU's rate, and the machine's health from its first rank."""
    names = [name for name, _, _ in found]
    several = len(set(names)) > 1
    hosts = [health for _, _, health in found if health is not None]
    for health in hosts:
        for one in judge_host(health, names.count(health.name)):
            yield one._replace(text=f"{health.name}: {one.text}") if several else one
    yield from judge_versions(hosts)
    places = [f"rank {rank}'s GPU" + (f" on {name}" if several else "") for rank, name in enumerate(names)]
    rates = {place: rate for place, (_, rate, _) in zip(places, found, strict=True) if rate is not None}
    known = kind.bf16_tflops if kind is not None else None
    yield from judge_speed(rates, known, kind.name if kind is not None else "")
    if kind is not None and not several:
        yield from judge_link(link_gb_s, kind.link_gb_s, kind.name)


def matmul_tflops(device: torch.device) -> float:
    """bfloat16, large square matrices, for ``TIMED_S`` after a start that is not counted."""
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    begin, count = 0.0, 0
    for duration in (WARM_S, TIMED_S):
        torch.cuda.synchronize(device)
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < duration:
            for _ in range(8):
                torch.matmul(a, b, out=out)
            count += 8
            torch.cuda.synchronize(device)
    rate = 2 * SIDE**3 * count / (time.perf_counter() - begin) / 1e12
    del a, b, out
    torch.cuda.empty_cache()
    return rate


def all_reduce_gb_s(device: torch.device) -> float:
    """Bus bandwidth of an all-reduce over all ranks, as nccl-tests count it: 2 (n - 1) / n of its bytes. Collective."""
    data, size = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device), dist.get_world_size()
    for _ in range(2):  # makes the communicator, which training needs anyway
        dist.all_reduce(data)
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(LINK_ROUNDS):
        dist.all_reduce(data)
    torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - begin) / LINK_ROUNDS
    del data
    torch.cuda.empty_cache()
    return 2 * (size - 1) / size * LINK_BYTES / seconds / 1e9


if __name__ == "__main__":
    rates = [matmul_tflops(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    print("RESULT " + json.dumps(rates), flush=True)
