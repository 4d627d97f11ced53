"""Which of how many processes this one is: from the launcher's variables, and from torch once it has a process group.

Imports torch only to ask whether it can distribute, and never starts CUDA.
"""

import sys
from typing import Any

from manyhands.launch.environment import Launcher, detect_launcher


def distributed_info() -> dict[str, Any]:
    """``rank``, ``world_size``, ``local_rank``, ``local_world_size``, ``launcher`` (none: started alone),
    ``initialized`` (there is a process group), ``backend`` (its own, else None), ``master`` (address and port),
    ``num_gpus`` that this machine shows, ``gpus`` by name. The same before and after the process group is made.
    """
    from manyhands.facts.host import read_host_facts

    launcher, group = detect_launcher(), _group()
    host = read_host_facts()
    return {
        "launcher": launcher.kind,
        "rank": get_rank(),
        "world_size": get_world_size(),
        "local_rank": get_local_rank(),
        "local_world_size": launcher.local_world_size,
        "initialized": group is not None,
        "backend": None if group is None else group.get_backend(),
        "master": f"{launcher.master_addr}:{launcher.master_port}" if launcher.world_size > 1 else None,
        "num_gpus": len(host.gpus),
        "gpus": [gpu.name for gpu in host.gpus],
    }


def print_distributed_info() -> None:
    """``distributed_info()``, one line each; on every rank."""
    info = distributed_info()
    width = max(map(len, info))
    lines = [f"  {name:<{width}}  {_show(value)}" for name, value in info.items()]
    print("\n".join([f"rank {info['rank']} of {info['world_size']}", *lines]), flush=True)


def is_distributed_available() -> bool:
    """Whether this torch can run several processes as one."""
    import torch.distributed

    return torch.distributed.is_available()


def get_rank() -> int:
    """This process among all that were started together; 0 where it was started alone."""
    group = _group()
    return detect_launcher().rank if group is None else group.get_rank()


def get_world_size() -> int:
    """Processes that were started together; 1 for one that was started alone, also where ``train`` starts others."""
    group = _group()
    return detect_launcher().world_size if group is None else group.get_world_size()


def get_local_rank() -> int:
    """This process among those of its machine."""
    launcher: Launcher = detect_launcher()
    return launcher.local_rank


def _group() -> Any:
    """torch.distributed where it has a process group, without importing it."""
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is None or not torch_distributed.is_available() or not torch_distributed.is_initialized():
        return None
    return torch_distributed


def _show(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else "none" if value is None else str(value)
