"""What measures manyhands and its peers, from a checkout: the speed table (``python -m benchmarks``), single kernels,
packing, data preparation, the comparison with Trainer and PEFT; recorded rows lie in ``results/``. Not part of the
package.
"""

from pathlib import Path

from manyhands.bench.shapes import SHAPES, read_shapes

# Shapes that no row of the table has: plans are compared with what they take. (granite8b's attention_multiplier is 1
# where left out: scores too large for bfloat16)
SHAPES |= read_shapes(Path(__file__).with_name("shapes.json"))
