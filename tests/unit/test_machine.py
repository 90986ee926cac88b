"""Options of the machine, and values refused before they reach a shell or a batch script."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from cellmill.config import check_options
from cellmill.config.machine import Machine
from cellmill.errors import ConfigError

TEXTS = [
    name
    for name, field in Machine.model_fields.items()
    if field.default == "" and name not in ("container", "modules", "sbatch_options", "srun_options", "setup")
]


@pytest.mark.parametrize("name", [*TEXTS, "modules", "sbatch_options", "srun_options"])
@pytest.mark.parametrize("value", ["a;rm -rf ~", "$(id)", "`id`", "a\nb", "a'b", 'a"b', "a\\b", "a\0b", "é"])
def test_no_value_of_a_profile_becomes_a_command(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="expected only the characters of SLURM's values, letters, digits"):
        check_options(Machine, {name: value}, "profile")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": "0"}, "profile: nodes: expected a number such as 2 or a range such as 1-2, got '0'"),
        ({"nodes": "3-2"}, "profile: nodes: expected a number such as 2 or a range such as 1-2, got '3-2'"),
        ({"nodes": "1-2"}, "profile: nodes: a range such as 1-2 requires launcher slurm, got local"),
        ({"nproc_per_node": 0}, "profile: nproc_per_node: input should be greater than or equal to 1, got 0"),
        (
            {"gpus_per_node": "4", "gres": "gpu:4"},
            "profile: gpus_per_node '4' and gres 'gpu:4' request GPUs twice; set one to ''",
        ),
        (
            {"launcher": "slurm", "runtime": 2, "save_within_s": 120},
            "profile: save_within_s 120 leaves no time in a runtime of 2 min; lower it",
        ),
        (
            {"sbatch_options": "exclusive signal=KILL"},
            "profile: sbatch_options: 'signal' is set by cellmill and cannot be changed here, "
            "not 'exclusive signal=KILL'",
        ),
        (
            {"srun_options": "--output=x"},
            "profile: srun_options: 'output' is set by cellmill and cannot be changed here, not '--output=x'",
        ),
        ({"container": "a\nb"}, "profile: container: expected one line of printable text, not 'a\\nb'"),
        ({"partition": "gpu"}, "profile: unknown key 'partition'; did you mean 'slurm_partition'?"),
    ],
)
def test_impossible_machines_are_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_options(Machine, given, "profile")
    assert str(refused.value).removesuffix(f", not {next(iter(given.values()))!r}") == message.removesuffix(
        f", not {next(iter(given.values()))!r}"
    )


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({"gpus_per_node": "4"}, 4),
        ({"gpus_per_node": "h100:8"}, 8),
        ({"gpus_per_node": "h100"}, 1),
        ({"gres": "gpu:4"}, 4),
        ({"gres": "gpu:a100:2"}, 2),
        ({"gres": "gpu:a100:2(S:0-1)"}, 2),
        ({"gres": "gpu:h100"}, 1),
        ({"gres": "gpu"}, 1),
        ({"gres": "gpu:h100:4,nvme:1"}, 4),
        ({"gres": "nvme:1"}, 0),
        ({}, 0),
    ],
)
def test_gpus_are_counted_in_every_form_of_request(given: dict[str, str], gpus: int) -> None:
    assert Machine(**given).gpus == gpus


def test_node_counts_accept_numbers_texts_and_ranges() -> None:
    assert list(Machine(nodes=3).node_counts) == [3]  # type: ignore[arg-type]
    assert list(Machine(nodes="2-4", launcher="slurm").node_counts) == [2, 3, 4]


def test_the_launcher_of_a_training_imports_no_heavy_library() -> None:
    # its memory is that of its imports, and a workflow may have hundreds of it
    code = "import cellmill.stages.train, sys; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "pandas", "anndata", "h5py", "scipy"} & set(loaded)
