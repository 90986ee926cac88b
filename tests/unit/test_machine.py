"""Options of the machine: impossible ones are refused in one line, and none of them becomes a
command.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cellmill.config import check_options
from cellmill.config.machine import Machine
from cellmill.launch.job import Job
from cellmill.launch.queue import Queue
from cellmill.launch.submit import SlurmJobs, sbatch_options
from cellmill.runs.jobs import Jobs
from tests.checks import refused

HOSTILE = "a;b $(touch made) `touch made` 'c\" \\"


def test_only_setup_becomes_a_command_of_the_batch_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in {
        "sbatch": f'cp "$1" {tmp_path}/script; echo Submitted batch job 7',
        "srun": f'printf "%s\\n" "$@" > {tmp_path}/words',
        "squeue": "",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    texts = [
        name
        for name, field in Machine.model_fields.items()
        if field.default == "" and name not in ("setup", "gres")
    ]
    options = dict.fromkeys(texts, HOSTILE) | {
        "sbatch_options": "a=$(touch${IFS}made)",
        "srun_options": "b=`touch;made`",
    }
    machine = check_options(Machine, options, "profile")
    jobs = SlurmJobs(Jobs(tmp_path / "train"), Queue(1), machine)
    assert jobs.submit(lambda folder: Job("a.module", [], 1, 1)).job_id == "7"
    load = subprocess.run(
        ["bash", "-c", f'module() {{ printf "%s\\n" "$@"; }}; . {tmp_path}/script'],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert load.stdout.splitlines() == ["load", *HOSTILE.split()]
    assert "--b=`touch;made`" in (tmp_path / "words").read_text().splitlines()
    assert str(Path(HOSTILE).resolve()) in (tmp_path / "words").read_text(), "the container"
    assert not (tmp_path / "made").exists()
    written = dict(
        re.findall(r"^#SBATCH --([\w-]+)=(.*)$", (tmp_path / "script").read_text(), re.M)
    )
    quoted = "'a;b $(touch made) `touch made` '\"'\"'c\" \\'"
    for name in ("partition", "account", "qos", "constraint", "reservation", "gpus-per-node"):
        assert written[name] == quoted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": "0"}, "nodes: expected a number such as 2 or a range such as 1-2, got '0'"),
        ({"nodes": "1-2"}, "nodes: a range such as 1-2 requires launcher slurm, got local"),
        ({"nproc_per_node": 0}, "nproc_per_node: input should be greater than or equal to 1, got 0"),
        ({"gpus_per_node": "4", "gres": "gpu:4"},
         "gpus_per_node '4' and gres 'gpu:4' request GPUs twice; set one to ''"),
        ({"mem_mb": 9, "mem_mb_per_cpu": 4},
         "mem_mb and mem_mb_per_cpu request memory twice, which SLURM refuses; set all but one to 0"),
        ({"launcher": "slurm", "runtime": 2, "save_within_s": 120},
         "save_within_s 120 leaves no time in a runtime of 2 min; lower it"),
        ({"sbatch_options": "exclusive signal=KILL"},
         "sbatch_options: 'signal' is set by cellmill and cannot be changed here"),
        ({"srun_options": "--output=x"}, "srun_options: 'output' is set by cellmill and cannot be changed here"),
        ({"qos": "a\nb"}, "qos: expected one line of printable text, got 'a\\nb'"),
        ({"partition": "gpu"}, "unknown key 'partition'; did you mean 'slurm_partition'?"),
    ],
)  # fmt: skip
def test_impossible_machines_are_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with refused(f"profile: {message}"):
        check_options(Machine, given, "profile")


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({"gpus_per_node": 4}, {"": 4}),
        ({"gpus_per_node": "h100:8"}, {"h100": 8}),
        ({"gpus_per_node": "a100:2,h100:1"}, {"a100": 2, "h100": 1}),
        ({"gres": "gpu"}, {"": 1}),
        ({"gres": "gpu:4"}, {"": 4}),
        ({"gres": "gpu:h100"}, {"h100": 1}),
        ({"gres": "nvme:1,gpu:a100:2(S:0-1),gpu:h100:4"}, {"a100": 2, "h100": 4}),
        ({"gres": "nvme:1"}, {}),
        ({}, {}),
    ],
    ids=str,
)
def test_gpus_are_counted_in_every_form_of_request(
    given: dict[str, Any], gpus: dict[str, int]
) -> None:
    machine = Machine(**given)
    assert (machine.gpus_by_type, machine.gpus) == (gpus, sum(gpus.values()))


def test_node_counts_accept_ranges() -> None:
    assert list(Machine(nodes=3).node_counts) == [3]
    assert list(Machine(nodes="2-4", launcher="slurm").node_counts) == [2, 3, 4]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, {"mem": "0"}),
        ({"mem_mb": 9}, {"mem": "9M"}),
        ({"mem_mb_per_cpu": 4}, {"mem-per-cpu": "4M"}),
        ({"mem_mb_per_gpu": 4, "gpus_per_node": 1}, {"mem-per-gpu": "4M"}),
        ({"sbatch_options": "mem-per-cpu=2G"}, {"mem-per-cpu": "2G"}),
        ({"sbatch_options": "mem-per-gpu=2G"}, {"mem-per-gpu": "2G"}),
    ],
    ids=str,
)
def test_exactly_one_option_for_memory_is_sent(given: dict[str, Any], sent: dict[str, str]) -> None:
    options = sbatch_options(Machine(**given))
    assert {name: value for name, value in options.items() if name.startswith("mem")} == sent
