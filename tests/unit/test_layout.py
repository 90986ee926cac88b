"""Sizes of the mesh axes, and the layouts that are refused; test_config.py has those that other
options exclude.
"""

from typing import Any

import pytest

from cellmill.config.checks import check_nodes, check_together
from cellmill.config.parallel import Layout, Parallel, divide_processes
from cellmill.config.parts.families import EncoderConfig
from cellmill.errors import ConfigError
from cellmill.planner.devices import (
    DEVICES,
    find_device,
    find_other_memory_gb,
    find_peak_flops_per_s,
    list_sized_devices,
    recognise_device,
)
from tests.checks import refused
from tests.models import train_options


@pytest.mark.parametrize(
    ("options", "world", "local_world", "expected"),
    [
        ({"strategy": "ddp"}, 8, 4, Layout(8, 1)),
        ({"sharding_strategy": "NO_SHARD"}, 8, 4, Layout(8, 1)),
        ({"sharding_strategy": "FULL_SHARD"}, 8, 4, Layout(1, 8)),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, 8, 4, Layout(1, 8)),
        ({"sharding_strategy": "HYBRID_SHARD"}, 8, 4, Layout(2, 4)),
        ({"sharding_strategy": "HYBRID_SHARD"}, 1, 1, Layout(1, 1)),
        ({"sharding_strategy": "HYBRID_SHARD", "shard_size": 2}, 8, 8, Layout(4, 2)),
        # whole nodes
        ({"sharding_strategy": "HYBRID_SHARD", "shard_size": 32}, 512, 8, Layout(16, 32)),
        ({"sharding_strategy": "FULL_SHARD", "tp": 8}, 8, 4, Layout(1, 1, 8)),
        ({"sharding_strategy": "HYBRID_SHARD", "tp": 8}, 16, 4, Layout(2, 1, 8)),
        ({"sharding_strategy": "HYBRID_SHARD", "tp": 2, "shard_size": 2}, 8, 8, Layout(2, 2, 2)),
        ({"sharding_strategy": "FULL_SHARD", "pp": 2}, 8, 4, Layout(1, 4, 1, 2)),
        ({"sharding_strategy": "HYBRID_SHARD", "pp": 4}, 8, 4, Layout(1, 2, 1, 4)),
        ({"sharding_strategy": "HYBRID_SHARD", "pp": 2, "tp": 2}, 32, 8, Layout(2, 4, 2, 2)),
    ],
)
def test_the_layout_of_each_strategy(
    options: dict[str, Any], world: int, local_world: int, expected: Layout
) -> None:
    assert divide_processes(Parallel.model_validate(options), world, local_world) == expected


OR_PROFILE = ", or change the profile"
HYBRID = "parallel.shard_size requires HYBRID_SHARD, got {}; set it to null"
TWO_GROUPS = (
    "parallel.cpu_offload full requires two data-parallel processes, got one; set optimizer"
)
IMPOSSIBLE: list[tuple[dict[str, Any], int, int, str]] = [
    (
        {"shard_size": 4},
        6,
        6,
        "parallel.shard_size 4 does not divide 6 processes; use 3" + OR_PROFILE,
    ),
    ({"tp": 3}, 8, 8, "parallel.tp 3 does not divide 8 processes; use 2" + OR_PROFILE),
    (
        {"pp": 2, "tp": 3},
        8,
        8,
        "parallel.tp 3 does not divide the 4 processes of each of pp 2; use 2" + OR_PROFILE,
    ),
    (
        {"pp": 2, "tp": 2, "shard_size": 3},
        *(
            16,
            8,
            "parallel.shard_size 3 does not divide 4 groups of tp 2 x pp 2; use 2" + OR_PROFILE,
        ),
    ),
    (
        {"tp": 4},
        12,
        6,
        "parallel.tp 4 does not divide the 6 processes of a node; use 3" + OR_PROFILE,
    ),
    ({"strategy": "ddp", "shard_size": 2}, 4, 4, HYBRID.format("strategy ddp")),
    ({"sharding_strategy": "FULL_SHARD", "shard_size": 2}, 4, 4, HYBRID.format("FULL_SHARD")),
    ({"cpu_offload": "full", "tp": 2, "pp": 2}, 4, 4, TWO_GROUPS),
]


@pytest.mark.parametrize(("options", "world", "local_world", "message"), IMPOSSIBLE)
def test_an_impossible_product_is_refused_with_the_nearest(
    options: dict[str, Any], world: int, local_world: int, message: str
) -> None:
    with refused(message):
        divide_processes(Parallel.model_validate(options), world, local_world)


class Plain(EncoderConfig):
    """A family that names nothing to cut."""

    def tp_sizes(self) -> dict[str, int]:
        return {}

    pp_sizes = tp_sizes


def test_a_layout_is_checked_against_what_the_family_can_cut() -> None:
    assert divide_processes(Parallel.model_validate({"cpu_offload": "full", "tp": 2}), 4, 4).dp == 2
    compiled = {
        "compile": True,
        "activation_checkpointing": "full",
        "pp": 2,
        "schedule": "Interleaved1F1B",
    }
    for parallel in ({"cpu_offload": "optimizer", "strategy": "ddp"}, compiled):
        check_together(train_options(model=EncoderConfig(), parallel=parallel))
    check_together(train_options(model=Plain()))
    with refused("parallel.pp 2: family encoder does not support pipelines; set pp to 1"):
        check_together(train_options(model=Plain(), parallel={"pp": 2}))
    with refused("parallel.tp 2: family encoder does not support tensor parallelism; set tp to 1"):
        check_together(train_options(model=Plain(), parallel={"tp": 2}))


LANES = "stream.lanes 8 is not a multiple of"


@pytest.mark.parametrize(
    ("batch", "processes", "message"),
    [
        (48, 6, f"{LANES} 6 processes; set nodes x nproc_per_node to 4, or stream.lanes 6"),
        (
            32,
            3,
            f"{LANES} 3 processes; set nodes x nproc_per_node to 2, or stream.lanes 3 with train.global_batch 33",
        ),
    ],
)
def test_lanes_that_do_not_divide_the_batch_are_refused(
    batch: int, processes: int, message: str
) -> None:
    with refused(message):
        check_nodes(
            train_options(train={"steps": 1, "global_batch": batch}), range(1, 2), processes
        )


def test_lanes_for_a_range_of_nodes_serve_all_of_it() -> None:
    options, more = (
        train_options(train={"steps": 1, "global_batch": 96}, stream={"lanes": n}) for n in (8, 24)
    )
    data_parallel = "4 and of 6 and of 8, the numbers of data-parallel processes on 2 to 4 nodes"
    with refused(f"{LANES} {data_parallel}; set stream.lanes 24"):
        check_nodes(options, range(2, 5), 2)
    check_nodes(more, range(2, 5), 2)
    with pytest.raises(ConfigError, match=r"; set stream.lanes 120 with train.global_batch 120$"):
        check_nodes(more, range(2, 6), 2)


def test_devices_are_recognised_by_product_name() -> None:
    assert find_device("h100").memory_gb == 80
    bf16 = Parallel(precision="bf16-mixed")
    tf32 = Parallel(tf32=True)
    assert find_peak_flops_per_s("NVIDIA H100 80GB HBM3", bf16) == 989e12
    assert find_peak_flops_per_s("NVIDIA A100-SXM4-80GB", Parallel()) == 19.5e12
    assert find_peak_flops_per_s("NVIDIA A100-SXM4-80GB", tf32) == 156e12
    # NVIDIA's data sheets, dense: half of the rates with sparsity
    assert find_peak_flops_per_s("NVIDIA H100 PCIe", bf16) == 756e12
    assert find_peak_flops_per_s("NVIDIA H100 NVL", bf16) == 835e12
    assert find_peak_flops_per_s("NVIDIA H100 NVL", Parallel()) == 60e12
    assert find_peak_flops_per_s("NVIDIA A100-SXM4-40GB MIG 1g.5gb", bf16) is None
    assert find_peak_flops_per_s("something else", bf16) is None
    assert find_peak_flops_per_s("NVIDIA RTX A1000", bf16) is None
    names = {
        "A100-SXM4-40GB": "a100-40gb",
        "a100_80g": "a100-80gb",
        "a100_3g.20gb": "a100",
        "V100-16GB": "v100-16gb",
        "nvidia_h100_pcie": "h100-pcie",
        "NVIDIA H200 NVL": "h200-nvl",
        "A100-PCIE-40GB": "a100-40gb",
        "CPU_BRND:INTEL": "",  # a feature of nodes
    }
    others = {
        ("NVIDIA A100-SXM-64GB", "a100"): 64,
        ("NVIDIA H100 64GB HBM2", "h100"): 64,
        ("NVIDIA H100 80GB HBM3", "h100"): None,
        ("NVIDIA B200 192GB", "b200"): None,
        ("A100-SXM4-40GB MIG 3g.20gb", "a100"): None,
    }
    assert {given: find_other_memory_gb(*given) for given in others} == others
    assert list_sized_devices("h100") == []
    assert {name: recognise_device(name) for name in names} == names
    assert [DEVICES[name].memory_gb for name in ("a100-40gb", "a100", "v100-16gb")] == [40, 80, 16]
    with refused(
        "unknown device 'h1000'; set device (--device, or set-resources: plan in the profile) to one of: "
        + ", ".join(DEVICES)
    ):
        find_device("h1000")
