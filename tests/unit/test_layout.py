"""Sizes of the mesh's axes, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from cellmill.config.family import FamilyConfig
from cellmill.config.layout import Layout, layout
from cellmill.config.run import Parallel, Stream, Train, check_together
from cellmill.config.tokens import ContinuousTokens
from cellmill.errors import ConfigError
from cellmill.models.masked.config import MaskedConfig
from cellmill.planner.devices import DEVICES, device_named, peak_flops


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
        ({"strategy": "ddp", "tp": 2}, 8, 4, Layout(4, 1, 2)),
        ({"sharding_strategy": "FULL_SHARD", "tp": 8}, 8, 4, Layout(1, 1, 8)),
        ({"sharding_strategy": "HYBRID_SHARD", "tp": 2}, 16, 8, Layout(2, 4, 2)),
        ({"sharding_strategy": "HYBRID_SHARD", "tp": 8}, 16, 4, Layout(2, 1, 8)),
        ({"sharding_strategy": "HYBRID_SHARD", "tp": 2, "shard_size": 2}, 8, 8, Layout(2, 2, 2)),
        ({"strategy": "ddp", "pp": 4}, 8, 4, Layout(2, 1, 1, 4)),
        ({"sharding_strategy": "FULL_SHARD", "pp": 2}, 8, 4, Layout(1, 4, 1, 2)),
        ({"sharding_strategy": "HYBRID_SHARD", "pp": 2}, 16, 4, Layout(2, 4, 1, 2)),
        ({"sharding_strategy": "HYBRID_SHARD", "pp": 4}, 8, 4, Layout(1, 2, 1, 4)),
        ({"sharding_strategy": "HYBRID_SHARD", "pp": 2, "tp": 2}, 32, 8, Layout(2, 4, 2, 2)),
    ],
)
def test_the_layout_of_each_strategy(options: dict[str, Any], world: int, local_world: int, expected: Layout) -> None:
    assert layout(Parallel.model_validate(options), world, local_world) == expected


def test_a_group_size_that_does_not_divide_is_refused_with_one_that_does() -> None:
    with pytest.raises(ConfigError) as error:
        layout(Parallel(sharding_strategy="HYBRID_SHARD", shard_size=4), 6, 6)
    assert str(error.value) == (
        "parallel.shard_size 4 does not divide 6 processes; 3 does, or change nodes and nproc_per_node in the profile"
    )


@pytest.mark.parametrize(
    ("options", "world", "local_world", "message"),
    [
        (
            {"tp": 3},
            8,
            8,
            "parallel.tp 3 does not divide 8 processes; 2 does, or change nodes and nproc_per_node in the profile",
        ),
        (
            {"pp": 3},
            8,
            8,
            "parallel.pp 3 does not divide 8 processes; 2 does, or change nodes and nproc_per_node in the profile",
        ),
        (
            {"pp": 2, "tp": 3},
            8,
            8,
            "parallel.tp 3 does not divide the 4 processes of each of pp 2; 2 does, "
            "or change nodes and nproc_per_node in the profile",
        ),
        (
            {"pp": 2, "tp": 2, "shard_size": 3},
            16,
            8,
            "parallel.shard_size 3 does not divide 4 groups of tp 2 x pp 2; 2 does, "
            "or change nodes and nproc_per_node in the profile",
        ),
        (
            {"tp": 4},
            12,
            6,
            "parallel.tp 4 cuts nodes of 6 processes; 3 fits, or set parallel.shard_size",
        ),
        (
            {"tp": 2, "shard_size": 8},
            12,
            12,
            "parallel.shard_size 8 does not divide 6 groups of tp 2; 6 does, "
            "or change nodes and nproc_per_node in the profile",
        ),
    ],
)
def test_a_product_that_cannot_be_is_refused_with_the_nearest_that_can(
    options: dict[str, Any], world: int, local_world: int, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        layout(Parallel.model_validate(options), world, local_world)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        ({"heads": 6, "hidden": 48}, {"tp": 4}, "parallel.tp 4 does not divide model.heads 6; 3 does"),
        ({"ffn_hidden": 63}, {"tp": 2}, "parallel.tp 2 does not divide model.ffn_hidden 63; 1 does"),
        (
            {},
            {"sequence_parallel": True},
            "parallel.sequence_parallel is read with tensor parallel alone: set parallel.tp, or no",
        ),
        (
            {"layers": 6},
            {"pp": 4, "schedule": "ZBV"},
            "parallel.pp 4 with schedule ZBV makes 8 stages of model.layers 6: each needs one; pp 3 fits",
        ),
        (
            {"layers": 3},
            {"pp": 4},
            "parallel.pp 4 with schedule 1F1B makes 4 stages of model.layers 3: each needs one; pp 3 fits",
        ),
        (
            {"layers": 3},
            {"pp": 2, "schedule": "DualPipeV"},
            "parallel.pp 2 with schedule DualPipeV makes 4 stages of model.layers 3: each needs one; "
            "1F1B makes fewer, or set pp to 1",
        ),
        (
            {},
            {"schedule": "ZBV"},
            "parallel.schedule is read with a pipeline alone: set parallel.pp, or leave it out",
        ),
        (
            {},
            {"microbatches": 8},
            "parallel.microbatches is read with a pipeline alone: set parallel.pp, or leave it out",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(
    model: dict[str, Any], parallel: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match="parallel") as error:
        _check(MaskedConfig.model_validate(model), parallel)
    assert str(error.value) == message


def test_a_family_that_names_nothing_to_cut_is_refused_with_tensor_parallel_and_pipelines() -> None:
    class Plain(MaskedConfig):
        def cut_by_tp(self) -> dict[str, int]:
            return FamilyConfig.cut_by_tp(self)

        def cut_by_pp(self) -> dict[str, int]:
            return FamilyConfig.cut_by_pp(self)

    _check(Plain(), {})
    with pytest.raises(ValueError, match="does not say") as error:
        _check(Plain(), {"pp": 2})
    assert str(error.value) == (
        "parallel.pp 2: the family masked does not say where a pipeline may cut it; set it to 1"
    )
    with pytest.raises(ValueError, match="does not say") as error:
        _check(Plain(), {"tp": 2})
    assert str(error.value) == (
        "parallel.tp 2: the family masked does not say what tensor parallel may cut; set it to 1"
    )


def _check(model: FamilyConfig, parallel: dict[str, Any]) -> None:
    check_together(ContinuousTokens(), Stream(), model, Parallel.model_validate(parallel), Train(steps=1))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"strategy": "ddp"}, "strategy ddp"),
        ({"sharding_strategy": "FULL_SHARD"}, "sharding_strategy FULL_SHARD"),
    ],
)
def test_a_group_size_that_nothing_reads_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as error:
        layout(Parallel.model_validate(options | {"shard_size": 2}), 4, 4)
    assert str(error.value) == f"parallel.shard_size is read by HYBRID_SHARD alone, not by {name}; set it to null"


def test_devices_are_known_by_the_name_of_the_profile_and_of_the_product() -> None:
    assert device_named("h100").memory_gb == 80
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16-mixed") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "32-true") == 19.5e12
    assert peak_flops("something else", "bf16-mixed") is None
    with pytest.raises(ConfigError) as error:
        device_named("h1000")
    assert str(error.value) == (
        f"no device is called 'h1000'; there are: {', '.join(DEVICES)}; it comes from the profile"
    )


def test_layout_and_memory_do_not_import_torch() -> None:
    code = (
        "import sys, cellmill.config.layout, cellmill.planner.memory, cellmill.stages.plan;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_parameters_on_the_cpu_are_refused_where_fsdp_does_not_keep_them() -> None:
    full = {"cpu_offload": "full"}
    with pytest.raises(ValueError, match="cpu_offload") as error:
        _check(MaskedConfig(), full | {"strategy": "ddp"})
    assert str(error.value) == (
        "parallel.cpu_offload full is FSDP2's, not strategy ddp's: set strategy to fsdp, or optimizer"
    )
    with pytest.raises(ConfigError) as refused:
        layout(Parallel.model_validate(full | {"tp": 2, "pp": 2}), 4, 4)
    assert str(refused.value) == (
        "parallel.cpu_offload full is FSDP2's, which needs two data-parallel processes; 4 with pp 2 x tp 2 are one: "
        "set it to optimizer, or change nodes and nproc_per_node in the profile"
    )
    _check(MaskedConfig(), {"cpu_offload": "optimizer", "strategy": "ddp"})
    assert layout(Parallel.model_validate(full | {"tp": 2}), 4, 4).dp == 2


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"activation_checkpointing": "selective"},
            "parallel.activation_checkpointing selective is what compile does by itself: set it to null, or to full",
        ),
        (
            {"pp": 2, "schedule": "ZBV"},
            "parallel.schedule ZBV takes a backward pass apart, which compile makes one: set compile to no, or "
            "schedule to Interleaved1F1B",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_what_can(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="compile") as error:
        _check(MaskedConfig(), chosen | {"compile": True})
    assert str(error.value) == message
    _check(MaskedConfig(), chosen)
    other = {"activation_checkpointing": "full", "pp": 2, "schedule": "Interleaved1F1B"}
    _check(MaskedConfig(), other | {"compile": True})
