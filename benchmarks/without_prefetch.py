"""A measured row as `manyhands.bench.case` has it, without what `engine/host_shards.py` overlaps: to compare with.

python -m benchmarks.without_prefetch --row 8b-full model.master_dtype=bfloat16 parallel.offload=all
"""

from __future__ import annotations

from manyhands.bench import case
from manyhands.engine import host_shards

if __name__ == "__main__":
    host_shards.PREFETCH = False
    case.main()
