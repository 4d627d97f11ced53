"""GPUs by kind: what ``--gpus`` reads, and the table of figures behind it."""

from __future__ import annotations

import pytest

from manyhands.core.errors import UserError
from manyhands.facts import gpu_kinds
from manyhands.facts.gpu_kinds import MIB, describe_host, find_kind, kind_of, kind_of_all, load_kinds, parse_gpus
from manyhands.facts.types import GpuFacts

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "kind", "num_nodes", "num_per_node"),
    [
        ("8xH200", "H200", 1, 8),
        ("2x4xH100-80GB", "H100-80GB", 2, 4),
        ("H100-4x", "H100-80GB", 1, 4),
        ("h100-80gb-4x", "H100-80GB", 1, 4),
        ("2xH100-4x", "H100-80GB", 2, 4),
        ("NVIDIA H100 80GB HBM3", "H100-80GB", 1, 1),  # as nvidia-smi prints it
        ("4x NVIDIA L40S", "L40S", 1, 4),
        ("H200x8", "H200", 1, 8),
        ("A100-40GB x 8", "A100-40GB", 1, 8),
        ("MI300Xx8", "MI300X", 1, 8),
        ("H100:8", "H100-80GB", 1, 8),
        ("RTX4090x2", "RTX4090", 1, 2),
        ("RTX4090", "RTX4090", 1, 1),  # no RT times 4090
        ("MI300X", "MI300X", 1, 1),  # ends in the letter that stands between numbers
        ("8xMI300X", "MI300X", 1, 8),
        ("MI300X-8x", "MI300X", 1, 8),
        ("2x8xMI250X", "MI250X", 2, 8),
        ("4xA100-40GB", "A100-40GB", 1, 4),
        ("2xRTX4090", "RTX4090", 1, 2),
        ("2x4090", "RTX4090", 1, 2),
        ("2 × NVIDIA GeForce RTX 4090", "RTX4090", 1, 2),
        ("4xA10G", "A10G", 1, 4),
        ("A10", "A10", 1, 1),
        ("H100-NVL", "H100-NVL", 1, 1),
        ("8xH100-94GB", "H100-NVL", 1, 8),
        ("RTX 6000 Ada", "RTX-6000-Ada", 1, 1),
        ("4x_v100-sxm2-16gb", "V100-16GB", 1, 4),
    ],
)
def test_kind_and_number_are_read(text, kind, num_nodes, num_per_node):
    asked = parse_gpus(text)
    assert (asked.kind.name, asked.num_nodes, asked.num_per_node) == (kind, num_nodes, num_per_node)
    assert asked.total == num_nodes * num_per_node


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH300", ["unknown kind of GPU: H300", "H200", "H100-80GB", "MI355X"]),  # the nearest, and the list
        ("8xRTX4080", ["unknown kind", "write RTX4090"]),
        ("abacus", ["unknown kind of GPU: abacus", "known are H100-80GB"]),
        ("8xA100", ["does not say how much memory", "A100-80GB (80 GB)", "write A100-80GB or A100-40GB"]),
        ("H100-60GB", ["there is no H100-60GB", "H100-80GB (80 GB)", "H100-NVL (94 GB)"]),
        ("8x", ["cannot read the GPUs '8x'", "8xH200"]),
        ("0xH100", ["0 GPUs cannot be planned for"]),
        ("99999xH100", ["99,999 GPUs cannot be planned for"]),
        ("2x3x4xH100", ["unknown kind of GPU: 4xH100", "write H100"]),
        ("2x3xH100-4x", ["cannot read the GPUs"]),
        ("", ["cannot read the GPUs ''"]),
    ],
)
def test_what_is_no_kind_is_an_error_with_the_nearest(text, said):
    with pytest.raises(UserError) as caught:
        parse_gpus(text, "SYNTH_GPU_TYPE")
    for part in [*said, "SYNTH_GPU_TYPE"]:
        assert part in str(caught.value)


def test_every_kind_is_found_by_all_its_names_and_by_its_drivers():
    spellings = [(spelling, kind) for kind in load_kinds() for spelling in (kind.name, *kind.aliases)]
    assert len({gpu_kinds._plain(spelling) for spelling, _ in spellings}) == len(
        {(gpu_kinds._plain(spelling), kind.name) for spelling, kind in spellings}
    ), "one spelling, two kinds"
    for spelling, kind in spellings:
        assert find_kind(spelling) == kind
    for kind in load_kinds():
        for name in kind.driver_names:
            assert kind_of(name) == kind_of(f"NVIDIA {name}") == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Instinct MI300X VF", "MI300X"),
        ("AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2", "MI250X"),
        ("NVIDIA L40", None),  # neither L4 nor L40S
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H200 NVL", None),
        ("AMD Radeon RX 7900 XT", None),
    ],
)
def test_drivers_names_are_known_and_others_not_guessed(name, kind):
    found = kind_of(name)
    assert (found.name if found else None) == kind


def test_figures_have_sources_and_plausible_sizes():
    for kind in load_kinds():
        for figure in (kind.memory_mib, kind.usable_mib, kind.memory_gb_s, kind.link_gb_s, kind.bf16_tflops):
            assert figure is None or figure.source.split(":")[0] in ("measured", "driver", "datasheet")
        # The marketing number means 10^9 or 2^30 bytes, and drivers keep some of them.
        assert 0.88 * kind.memory_gb * GIB < kind.usable_mib.value * MIB < kind.memory_mib.value * MIB
        assert kind.memory_mib.value * MIB <= 1.0 * kind.memory_gb * GIB or kind.name == "B200", kind.name
        is_amd = kind.vendor == "amd"
        assert is_amd == bool(kind.gfx) and is_amd == (kind.compute_capability is None)
        computes = GpuFacts(index=0, name="", memory_bytes=1, free_bytes=1, compute_capability=kind.compute_capability)
        assert computes.has_bfloat16 == (kind.bf16_tflops is not None)


def test_memory_that_is_not_known_is_taken_for_less_than_any_that_is():
    taken = {kind.name: kind.memory_mib.value - kind.usable_mib.value for kind in load_kinds()}
    guessed = {kind.name for kind in load_kinds() if "less" in kind.usable_mib.source}
    assert "MI210" in guessed and "H200" not in guessed
    assert min(taken[name] for name in guessed) >= max(taken[name] for name in taken.keys() - guessed)


def test_a_described_machine_is_idle_and_shares_what_is_assumed():
    host = describe_host(parse_gpus("2x4xH100"))
    assert (len(host.gpus), host.num_nodes, host.is_here) == (4, 2, False)
    assert host.gpus[3].index == 3 and host.gpus[0].compute_capability == (9, 0)
    assert host.gpus[0].memory_bytes == 81559 * MIB > host.gpus[0].free_bytes == 81039 * MIB
    assert host.num_cores == 4 * describe_host(parse_gpus("H100")).num_cores
    assert host.memory_bytes == host.free_memory_bytes == 4 * 128 * GIB


def test_the_kind_of_a_machine_is_that_of_all_its_gpus():
    h200, h100 = (
        GpuFacts(index=0, name=name, memory_bytes=1, free_bytes=1) for name in ("NVIDIA H200", "NVIDIA H100 PCIe")
    )
    assert kind_of_all([h200, h200]) == find_kind("H200")
    assert kind_of_all([h200, h100]) is None
    assert kind_of_all([h200.model_copy(update={"name": "NVIDIA X1"})]) is None
