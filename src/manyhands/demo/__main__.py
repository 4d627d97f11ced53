"""``python -m manyhands.demo [section.key=value ...]``: the demo run, on all GPUs or on two CPU processes."""

from __future__ import annotations

import sys

from manyhands.cli.main import main
from manyhands.demo import demo_config_path
from manyhands.facts.host import read_host_facts

if __name__ == "__main__":
    host = read_host_facts()
    # GPUs that cannot be used are left to the plan, which refuses them with the reason.
    processes = [] if host.gpus or host.unusable_gpus else ["parallel.gpus=2", "parallel.device=cpu"]
    sys.argv[1:] = ["train", str(demo_config_path()), *processes, *sys.argv[1:]]
    main()
