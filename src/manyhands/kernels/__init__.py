"""Fused forward and backward passes. Knows tensors and modules, and nothing of ranks, plans, runs or data.

``loss``: cross-entropy fused with the head. ``lora``: linear layers with low-rank factors that share an input, and
whole MLPs. ``modules``: attention and MLP modules built on ``lora``, put into a model by name. Each has a plain
reference.
"""
