"""Torch's elastic agent and the key-value store that its ranks share, which listens where other nodes are to reach it
and nowhere else. Torch is imported when it is needed.

``python -m manyhands.launch.local.agent N MODULE ...`` starts N ranks of a module on this machine, as torchrun does.
"""

import contextlib
import datetime
import os
import socket
import sys
from typing import Any

from manyhands.launch.nodes.address import LOCAL_HOST, network_environment

STORE_S = 60.0  # for node 0 to reach the store that it has opened itself


def open_store(host: str | None, port: int = 0) -> Any:
    """Torch's store at this address of the machine (None: at all of them); port 0 is any free one. The agent that is
    told its port takes this one: in one process stores of one port share a server (``multi_tenant``).

    By itself torch listens at all addresses, whatever host it is told: it gets a socket that is bound already.
    """
    from torch.distributed import TCPStore

    limit = datetime.timedelta(seconds=STORE_S)
    if host is None:
        return TCPStore(LOCAL_HOST, port, None, True, limit, wait_for_workers=False, multi_tenant=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        bound = listener.getsockname()[1]
        # The store closes the descriptor, which may be another file's by the time Python would.
        descriptor = listener.detach()
        return TCPStore(
            host, bound, None, True, limit, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor
        )


def agent_config(endpoint: str, *, node: int, num_nodes: int, num_local: int, run_id: str, timeout_s: float) -> Any:
    """``LaunchConfig`` with the static rendezvous at ``endpoint``: nodes keep their numbers, no other store opens."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=num_local,
        run_id=run_id,
        rdzv_backend="static",
        rdzv_endpoint=endpoint,
        rdzv_configs={"rank": node, "timeout": int(timeout_s)},
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else a folder, which nobody removes after SIGKILL
    )


def main(argv: list[str]) -> int:
    """Exit code of the ranks that were started: 0 if all of them have ended well."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    num_ranks, *command = argv
    for name, value in network_environment(LOCAL_HOST).items():
        os.environ.setdefault(name, value)
    store = open_store(LOCAL_HOST)
    config = agent_config(
        f"{LOCAL_HOST}:{store.port}",
        node=0,
        num_nodes=1,
        num_local=int(num_ranks),
        run_id=f"agent-{os.getpid()}",
        timeout_s=STORE_S,
    )
    with contextlib.suppress(ChildFailedError):
        elastic_launch(config, sys.executable)("-u", "-m", *command)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
