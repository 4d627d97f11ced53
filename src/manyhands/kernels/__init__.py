"""Fused forward and backward passes, and the optimizer's update. Knows tensors and modules, and nothing of ranks,
plans, runs or data.

Each operation is a folder: ``reference`` in torch operations, ``triton``, ``select`` for the choice between them by a
self-test on the device, with its reason, and what autograd needs. ``loss``: cross-entropy fused with the head.
``lora``: linear layers with adapters that share an input, and gated MLPs. ``fp8``: the same with matmuls in fp8.
``nf4``: quantized weights back to floating point. ``attention``: over rows of one length and over packs. ``adamw``:
the update in one kernel. ``matmul`` and ``backend`` serve all of them.
"""
