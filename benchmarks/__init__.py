"""What measures manyhands and its peers, from a checkout: the speed table (``python -m benchmarks``), single kernels,
packing, data preparation, the comparison with Trainer and PEFT; recorded rows lie in ``results/``. Not part of the
package.
"""
