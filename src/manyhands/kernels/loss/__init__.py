"""Cross-entropy fused with the head."""

from manyhands.kernels.loss.cross_entropy import chunk_rows, linear_cross_entropy
from manyhands.kernels.loss.head import Head, agrees, read_head
from manyhands.kernels.loss.select import choose_backend

__all__ = ["Head", "agrees", "choose_backend", "chunk_rows", "linear_cross_entropy", "read_head"]
