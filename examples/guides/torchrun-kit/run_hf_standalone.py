"""One rank of a run, under torchrun; as ``run_fsdp_standalone.py`` in shards.

``torchrun --nproc_per_node=N run_hf_standalone.py [RUN.yaml] [section.key=value ...]``. Without a launcher one
process would use one GPU; where there are more, it is refused.
"""

import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__)
DEFAULT = SCRIPT.with_name("configs") / f"{SCRIPT.stem.removeprefix('run_')}.yaml"

if __name__ == "__main__":
    has_file = len(sys.argv) > 1 and "=" not in sys.argv[1]
    sys.argv[1:1] = [] if has_file else [str(DEFAULT)]
    runpy.run_module("manyhands.worker", run_name="__main__", alter_sys=True)
