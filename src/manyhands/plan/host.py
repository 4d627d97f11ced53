"""What is offloaded: bytes that leave the device, and what they take in the machine's memory. Pure arithmetic.

On a CPU the device is the machine: nothing moves.
"""

from __future__ import annotations

import math

from manyhands.core.limits import STATE_CHUNK_BYTES, STATE_CHUNKS_ON_DEVICE
from manyhands.plan.activations import moved_bytes
from manyhands.plan.estimate_input import EstimateInput

PINNED = 1 / math.log(2)  # torch rounds pinned blocks up to powers of 2: this much on average


def estimate_host_terms(s: EstimateInput, terms: dict[str, int]) -> dict[str, int]:
    """By name, what a rank holds in host memory; ``terms`` are the device's before anything moves.

    ``all``: shards of weights (pinned), gradients and optimizer states. ``optimizer``: the states, pinned. Activations:
    see ``moved_bytes``, pinned.
    """
    host: dict[str, int] = {}
    if s.layout.offload == "all":
        host |= {
            "weights": int(PINNED * terms["weights"]),
            "gradients": terms["gradients"],
            "optimizer": terms["optimizer"],
        }
    elif s.layout.offload == "optimizer":
        host["optimizer"] = int(PINNED * terms["optimizer"])
    if s.layout.offload_activations:
        host["activations"] = int(PINNED * moved_bytes(s))
    return host


def keep_on_device(s: EstimateInput, terms: dict[str, int]) -> dict[str, int]:
    """The device's terms without what has moved. Activations have been counted so already.

    Of optimizer states two chunks are there while it steps: ``2 states/parameters max(2**28, largest parameter)``.
    """
    kept = dict(terms)
    if s.layout.offload == "all":
        kept |= {"weights": 0, "gradients": 0, "optimizer": 0}
    elif s.layout.offload == "optimizer":
        largest = (
            max(s.head_elements, *(out * into for out, into in s.model.block_linear_shapes.values())) * s.master_bytes
        )
        parameters = max(1, s.num_trained * s.master_bytes // s.num_shards)
        chunk = max(STATE_CHUNK_BYTES, min(largest // s.num_shards, parameters))
        kept["optimizer"] = min(terms["optimizer"], STATE_CHUNKS_ON_DEVICE * chunk * terms["optimizer"] // parameters)
    return kept
