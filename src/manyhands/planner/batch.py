"""The batch rule. Without packing ``global batch = micro-batch x ranks x accumulation`` holds exactly, or there is an
error.

With packing any batch works on any number of ranks: the samples of a step are laid into packs, and a rank may stay
idle. *Ranks* are data-parallel ranks here (``Layout.data_parallel_degree``). Pure; sizes are samples unless they are
called tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.data.batch.pack import padded_tokens
from manyhands.facts.types import DataFacts

# A larger micro-batch gains little. 32,768 tokens in place of 16,384 made a step of a 1B model 3.0 % shorter (an H100)
USEFUL_TOKENS = {"cuda": 32_768, "cpu": 2_048}
USEFUL_OFFLOADED = 2  # times as many where each micro-batch moves all weights to the GPU, and their gradients back
ALIGNED_TOKENS = 16  # matmuls take a multiple of them as it is: in fp8, where tokens are summed over, others are padded
AUTO_SAMPLES = 32
SHORT_SAMPLE_TOKENS = 256  # packed samples shorter than this on average go 64 to a batch
MIN_AUTO_STEPS = 10  # an automatic batch leaves at least so many steps in an epoch


@dataclass(frozen=True)
class BatchSplit:
    """A global batch and how it is divided into micro-batches; all but the first three are fields of ``Layout``."""

    batch_samples: int | None
    batch_loss_tokens: int | None
    batch_packs: int | None
    micro_samples: int | None
    micro_tokens: int | None
    pack_tokens: int | None
    accumulation: int | None
    full_micro_tokens: int
    accumulates: bool  # not every step is one micro-batch of each rank


def useful_splits(config: RunConfig, data: DataFacts, num_ranks: int, device: str) -> list[BatchSplit]:
    """``possible_splits`` up to ``USEFUL_TOKENS`` on each of the ranks that divide a pack, and larger ones before them
    where weights are in host memory.

    These come on top, as sizes follow from the largest: without the others some runs would find only slower ones.
    """
    useful = USEFUL_TOKENS[device] * config.parallel.context_ranks
    splits = possible_splits(config, data, num_ranks, useful)
    if config.parallel.offload != "all":
        return splits
    larger = possible_splits(config, data, num_ranks, USEFUL_OFFLOADED * useful)
    return [*(split for split in larger if split not in splits and split.full_micro_tokens > useful), *splits]


def possible_splits(config: RunConfig, data: DataFacts, num_ranks: int, useful_tokens: int) -> list[BatchSplit]:
    """All ways to carry out the asked batch, the largest micro-batch first. UserError where there is none.

    ``useful_tokens``: beyond this a larger micro-batch gains nothing on the device.
    """
    if config.batch.packs is not None:
        return _splits_of_packs(config, config.batch.packs, data, num_ranks, useful_tokens)
    if config.data.packing:
        return _packed_splits(config, data, num_ranks, useful_tokens)
    return _unpacked_splits(config, data, num_ranks, useful_tokens)


def auto_samples(config: RunConfig, data: DataFacts) -> int:
    """32 samples; 64 where packed samples are short (under 256 tokens on average); halved until an epoch has 10 steps.

    Depends on the data alone, so that a run is the same on any number of processes.
    """
    samples = 2 * AUTO_SAMPLES if config.data.packing and data.whole_length < SHORT_SAMPLE_TOKENS else AUTO_SAMPLES
    while samples > 1 and data.samples_per_epoch < samples * MIN_AUTO_STEPS:
        samples //= 2
    return samples


def _packed_splits(config: RunConfig, data: DataFacts, num_ranks: int, useful_tokens: int) -> list[BatchSplit]:
    batch = config.batch
    tokens = batch.loss_tokens
    samples = None if tokens is not None else auto_samples(config, data) if batch.samples == "auto" else batch.samples
    if batch.micro_tokens != "auto":
        if batch.micro_tokens < data.max_length:
            raise UserError(
                f"the longest sample, {data.max_length} tokens, does not fit into a pack of {batch.micro_tokens}",
                where="batch.micro_tokens",
                fix=f"give batch.micro_tokens at least {data.max_length},"
                " or a smaller data.max_length with data.too_long: truncate",
            )
        sizes = [batch.micro_tokens]
    else:
        step_tokens = (
            tokens * data.num_tokens / max(1, data.num_loss_tokens)
            if tokens is not None
            else (samples or 1) * data.mean_length
        )
        if samples is not None and not has_one_length(data):  # no rank has to take more, and none less of one length
            useful_tokens = min(useful_tokens, padded_tokens(ceil_div(samples, num_ranks) * data.max_length))
        sizes = pack_sizes(data.max_length, step_tokens / num_ranks, useful_tokens)
    return [_packed_split(samples, tokens, size, data, num_ranks) for size in sizes]


def _splits_of_packs(
    config: RunConfig, packs: int, data: DataFacts, num_ranks: int, useful_tokens: int
) -> list[BatchSplit]:
    """A rank's share of a step is at most ``ceil(packs / ranks)`` packs of ``data.max_length``; a micro-batch holds
    some of them, or less than one where memory is short. Without packing it holds a number of the same samples.
    """
    batch, longest, pack_tokens = config.batch, data.max_length, config.data.max_length
    share = ceil_div(packs, num_ranks)
    if not config.data.packing:
        samples = max(1, min(useful_tokens // longest, round(share * pack_tokens / data.mean_length)))
        rows = [samples >> halved for halved in range(samples.bit_length())]
        sizes = rows if batch.micro_samples == "auto" else [batch.micro_samples]
        return [
            BatchSplit(None, None, packs, size, None, None, None, size * longest, accumulates=True) for size in sizes
        ]
    if batch.micro_tokens != "auto":
        sizes = [batch.micro_tokens]
    else:
        most = max(1, useful_tokens // pack_tokens)
        first = ceil_div(share, most)  # micro-batches
        fewer = {
            padded_tokens(ceil_div(share, first << doubled) * pack_tokens) for doubled in range(share.bit_length() + 1)
        }
        smaller = {size for size in pack_sizes(longest, 0, useful_tokens) if size < pack_tokens}
        smaller |= {size for size in (pack_tokens // 4 * 3, pack_tokens // 2) if size >= padded_tokens(longest)}
        sizes = sorted(fewer | set(map(padded_tokens, smaller)), reverse=True)
    splits = []
    for size in sizes:
        constant = constant_pack_tokens(packs * (pack_tokens // longest), size, data, num_ranks)
        accumulates = size < share * pack_tokens
        splits.append(BatchSplit(None, None, packs, None, size, constant, None, constant or size, accumulates))
    return splits


def _packed_split(samples: int | None, tokens: int | None, size: int, data: DataFacts, num_ranks: int) -> BatchSplit:
    """What is certain of every step. Samples of one length are packed by their number, and never fill the quarter for
    uneven steps.
    """
    constant = constant_pack_tokens(samples, size, data, num_ranks)
    if constant is not None and samples is not None:
        one_each = samples <= num_ranks * (constant // data.max_length)
    else:
        one_each = samples is not None and samples * padded_tokens(data.max_length) <= size
    return BatchSplit(samples, tokens, None, None, size, constant, None, constant or size, accumulates=not one_each)


def pack_sizes(longest: int, rank_tokens: float, useful_tokens: int) -> list[int]:
    """Pack sizes in whole tiles of tokens, descending by 3/4 and 1/2 in turn to the longest sample.

    The largest holds a rank's share of a step (``rank_tokens``, and a quarter more for uneven steps), at most
    ``useful_tokens``, and the longest sample in any case.
    """
    smallest = padded_tokens(longest)
    size = max(smallest, min(useful_tokens, padded_tokens(int(1.25 * rank_tokens) + 1)))
    sizes = [size]
    while size > smallest:
        sizes += [max(smallest, padded_tokens(part)) for part in (size * 3 // 4, size // 2)]
        size = sizes[-1]
    return sorted(set(sizes), reverse=True)


def has_one_length(data: DataFacts) -> bool:
    """Whether all samples, the held-out ones too, are equally long: texts cut into blocks."""
    return (
        data.num_documents == 1
        and data.num_tokens == data.num_samples * data.max_length
        and data.num_validation_tokens == data.num_validation_samples * data.max_length
    )


def constant_pack_tokens(
    batch_samples: int | None, micro_tokens: int | None, data: DataFacts, num_ranks: int
) -> int | None:
    """Tokens of every micro-batch of the run, where samples of one length are packed by their number; else None.

    As many samples a rank and micro-batch as the balanced layout of a whole step gives. Padded to whole tiles only
    where matmuls would not take their number as it is: without padding, attention over rows takes and gives no copies.
    """
    if micro_tokens is None or batch_samples is None or not has_one_length(data):
        return None
    num_micro = ceil_div(batch_samples, num_ranks * (micro_tokens // data.max_length))
    filled = ceil_div(batch_samples, num_ranks * num_micro) * data.max_length
    return filled if filled % ALIGNED_TOKENS == 0 else padded_tokens(filled)


def _unpacked_splits(config: RunConfig, data: DataFacts, num_ranks: int, useful_tokens: int) -> list[BatchSplit]:
    batch = config.batch
    micro = None if batch.micro_samples == "auto" else batch.micro_samples
    accumulation = None if batch.accumulation == "auto" else batch.accumulation
    unit = num_ranks * (micro or 1) * (accumulation or 1)
    if batch.samples != "auto":
        samples = batch.samples
        _check_divides(samples, num_ranks, micro, accumulation)
    elif micro and accumulation:
        samples = unit
    else:
        samples = max(unit, round(auto_samples(config, data) / unit) * unit)
    share = samples // num_ranks  # samples of a rank in one step
    if micro:
        sizes = [micro]
    elif accumulation:
        sizes = [share // accumulation]
    else:
        divisors = [size for size in range(share, 0, -1) if share % size == 0]
        sizes = [size for size in divisors if size * data.max_length <= useful_tokens] or [1]
    return [
        BatchSplit(
            samples, None, None, size, None, None, share // size, size * data.max_length, accumulates=size != share
        )
        for size in sizes
    ]


def _check_divides(samples: int, num_ranks: int, micro: int | None, accumulation: int | None) -> None:
    """UserError that names the nearest batches below and above which ``micro x ranks x accumulation`` can make."""
    factors = [
        (f"batch.micro_samples: {micro}", micro),
        (f"{num_ranks} processes", num_ranks),
        (f"batch.accumulation: {accumulation}", accumulation),
    ]
    unit, product = 1, []
    for name, factor in factors:
        if factor:
            unit *= factor
            product.append(name)
    exact = micro is not None and accumulation is not None
    if samples == unit or (not exact and samples % unit == 0):
        return
    below, above = (unit, None) if exact else (samples // unit * unit, (samples // unit + 1) * unit)
    near = " and ".join(str(size) for size in (below, above) if size)
    formula = " × ".join(product) + (f" = {unit}" if len(product) > 1 else "")
    several = not exact and below
    raise UserError(
        f"batch.samples: {samples} is not {'' if exact else 'a multiple of '}{formula}",
        where="batch.samples",
        why="without packing the global batch is micro-batch × processes × accumulation, exactly",
        fix=f"the nearest batch{'es that work are' if several else ' that works is'} {near}; or set data.packing: true",
    )


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)
