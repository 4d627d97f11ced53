"""One row of the speed table measured on the processes that start this module, as ``manyhands.bench.case``
measures it, also on shapes that no row of the table has.

torchrun --nproc_per_node=2 -m benchmarks.case --row 8b-lora --label after --output rows.jsonl
python -m benchmarks.case --row 8b-lora --shape tiny --length 128        # a trial on a CPU
"""

from manyhands.bench.case import main

if __name__ == "__main__":
    main()
