"""Measured cases on random weights of published shapes: ours through the product's own path, and a peer where it is
installed.

Speed and memory do not depend on the values of weights. Not imported by the product; ``manyhands bench`` starts it as a
process.
"""
