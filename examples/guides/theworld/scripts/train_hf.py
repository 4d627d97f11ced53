"""``python scripts/train_hf.py --config FILE [section.key=value ...]``: the run of a file, on one GPU.

Under ``accelerate launch`` or torchrun each process is one rank of it.
"""

import argparse
import os
import runpy
import sys

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="run file of ours or of another tool")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    given = parser.parse_intermixed_args()
    one = [] if any(text.startswith("parallel.gpus=") for text in given.overrides) else ["parallel.gpus=1"]
    if "RANK" in os.environ:
        module, arguments = "manyhands.worker", [given.config, *given.overrides]
    elif "ACCELERATE_MIXED_PRECISION" in os.environ:  # accelerate starts a single process without a rank
        module, arguments = "manyhands.worker", [given.config, *one, *given.overrides]
    else:
        module, arguments = "manyhands", ["train", given.config, *one, *given.overrides]
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
