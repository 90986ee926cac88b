"""Sites that are set up otherwise, by a scripted SLURM: several clusters, variables of srun."""

import dataclasses
import errno
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import h5py
import pytest
import yaml

from cellmill.cli import main
from cellmill.config.machine import Machine
from cellmill.data.inputs.h5 import open_h5
from cellmill.launch.job import Job
from cellmill.launch.node import run_here
from cellmill.launch.queue import Queue, living_jobs
from cellmill.launch.slurm import SlurmLauncher
from cellmill.runs.jobs import Jobs
from tests.unit.slurm_site import command, scontrol
from tests.unit.test_profiles_new import SITE
from tests.unit.test_slurm_launcher import NONE, Answer, Scripted, done, listed, scripted

__all__ = ["done", "scripted"]

ON_NORTH: Answer = [0, "Submitted batch job 7 on cluster north\n", ""]


def options(call: str) -> list[str]:
    return call.split()[1:3]


def test_calls_after_a_submission_name_its_cluster(done: Scripted) -> None:
    done.run(listed("RUNNING"), NONE, NONE, listed("COMPLETED"), sbatch=[ON_NORTH])
    before, *after = done.calls("squeue")
    assert "-M" not in before
    assert [options(call) for call in after[1:]] == [["-M", "north"]] * len(after[1:])
    assert [options(call) for call in done.calls("sacct")] == [["-M", "north"]]
    assert Jobs(done.train).newest().cluster == "north"


def test_the_cluster_of_the_profile_is_named_to_sbatch(
    done: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "south")
    done.hook("sbatch", "open(folder / 'environment', 'w').write(str(sorted(os.environ)))")
    done.machine = done.machine.model_copy(update={"slurm_cluster": "north"})
    done.run(listed("COMPLETED"), sbatch=[ON_NORTH])
    assert "#SBATCH --clusters=north\n" in (done.fake / "script.sh").read_text()
    assert "SLURM_CLUSTERS" not in (done.fake / "environment").read_text()
    assert all(options(call) == ["-M", "north"] for call in done.calls("squeue"))


def test_a_lost_submission_is_found_on_its_cluster(done: Scripted) -> None:
    done.machine = done.machine.model_copy(update={"slurm_cluster": "north,south"})
    lost = [1, "", "sbatch: error: Batch job submission failed: Socket timed out\n"]
    found = [0, "CLUSTER: north\nCLUSTER: south\n7|RUNNING|None|node1|10:00|{name}\n", ""]
    printed = done.run(found, listed("COMPLETED"), sbatch=[lost])
    assert "job 7 was submitted but not recorded: adopted by its name\n" in printed
    assert Jobs(done.train).newest().cluster == "south"
    assert options(done.calls("squeue")[-1]) == ["-M", "south"]


def test_a_later_launcher_asks_the_cluster_of_the_record(done: Scripted) -> None:
    done.answers(squeue=[listed("RUNNING")])
    folder, name = Jobs(done.train).new()
    (done.fake / "name").write_text(name)
    launcher = done.launcher()
    record = SlurmLauncher.living(launcher)
    assert record is not None
    assert record.job_id == "7"
    dataclasses.replace(record, cluster="north").write()
    launcher.living()
    assert options(done.calls("squeue")[-1]) == ["-M", "north"]
    [job] = living_jobs(Jobs(done.train), Queue(1.0))
    assert job.argument == "-M north 7"
    assert folder == Jobs(done.train).newest().path


def test_a_held_job_names_its_cluster_in_the_remedy(done: Scripted) -> None:
    held = listed("PENDING", "JobHeldUser")
    printed = done.run(held, held, listed("COMPLETED"), sbatch=[ON_NORTH])
    assert "`scontrol release -M north 7` releases it\n" in printed


def test_profiles_new_asks_and_names_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    answers = {f"-M north -a -o {what}": text for what, text in scontrol(SITE).items()}
    answers["-M north show config"] = scontrol(SITE)["show config"]
    command(tmp_path / "bin" / "scontrol", answers)
    assert main(["profiles", "new", "mine", "--cluster", "north"]) == 0
    tree = yaml.safe_load(Path("profiles/mine/config.yaml").read_text())
    assert tree["default-resources"]["slurm_cluster"] == "north"
    assert tree["set-resources"]["train"]["slurm_cluster"] == "north"


# as salloc and sbatch of several versions and sites set them
RECORDED = {
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_TRES_PER_TASK": "cpu=8",  # 23.11 refuses a step in which it differs from the one above
    "SLURM_NTASKS": "16",
    "SLURM_NPROCS": "16",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_JOB_NUM_NODES": "2",
}


def test_srun_in_an_allocation_takes_only_its_own_options(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in RECORDED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    scripted.hook("srun", "open(folder / 'environment', 'w').write(json.dumps(dict(os.environ)))")
    scripted.answers(srun=[NONE])
    machine = Machine(launcher="allocation", nodes="2", gres="gpu:a100:1,lscratch:200")
    with open(scripted.fake / "kept", "w") as kept:
        code, _ = run_here(
            lambda folder: Job("m", [], 2, 1), machine, scripted.train, kept.fileno()
        )
    seen = json.loads((scripted.fake / "environment").read_text())
    assert code == 0
    assert RECORDED.keys() & seen.keys() == {"SLURM_JOB_NUM_NODES"}
    [call] = scripted.calls("srun")
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 " in call
    assert "--gres=gpu:a100:1,lscratch:200" in call


def test_srun_in_a_job_takes_only_its_own_options(done: Scripted) -> None:
    done.run(listed("COMPLETED"))
    script = (done.fake / "script.sh").read_text()
    setup = script[script.index("# setup") : script.index("# command")]
    ran = subprocess.run(
        ["bash", "-c", f"{setup}\nenv"], env=RECORDED, capture_output=True, text=True
    )
    names = {line.partition("=")[0] for line in ran.stdout.splitlines()}
    assert RECORDED.keys() & names == {"SLURM_JOB_NUM_NODES"}


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, 524])
def test_an_input_is_read_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "cells.h5ad"
    with h5py.File(path, "w") as file:
        file["X"] = [1]
    opened = h5py.File

    def refuse_locks(*given: Any, locking: bool = True) -> h5py.File:
        if locking:
            raise OSError(number, "unable to lock file")
        return opened(*given, locking=False)

    monkeypatch.setattr(h5py, "File", refuse_locks)
    with open_h5(path) as file:
        assert file["X"][0] == 1


def test_an_input_that_another_reader_has_open_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cells.h5ad"
    with h5py.File(path, "w") as file:
        file["X"] = [1]
    with h5py.File(path, "r"), open_h5(path) as file, h5py.File(path, "r"):
        assert file["X"][0] == 1


def test_the_last_line_of_a_terminated_launcher_is_logged(tmp_path: Path) -> None:
    rules = (DRIVER.parents[1] / "workflow" / "rules" / "train.smk").read_text()
    [pipe] = re.findall(
        r"{params\.machine:q}.*?(2>&1 \|.*?{log:q}\)?)[\"']\n\n\nMODEL", rules, re.DOTALL
    )
    launcher = "trap 'sleep 0.3; echo last; exit' TERM; echo ready; while :; do sleep 0.1; done"
    log = tmp_path / "train.log"
    shell = (
        f"bash -c {shlex.quote(launcher)} {pipe.split(chr(34))[-1].replace('{log:q}', str(log))}"
    )
    process = subprocess.Popen(
        ["bash", "-c", shell], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=30)[0].endswith("last\n")
    assert log.read_text().endswith("last\n")


SHOWN = (
    "JobId=7 JobName=drive UserId=me(1) Account=lab QOS=(null) JobState=RUNNING TimeLimit=2-00:00:00 Partition=long "
    "ReqNodeList=(null) ExcNodeList=n[1-2] NumNodes=1 NumCPUs=2 NumTasks=1 CPUs/Task=2 ReqB:S:C:T=0:0:*:* "
    "MinMemoryCPU=9G Features=big Reservation=ours Command=/drive.sbatch"
)
NEXT = (
    "sbatch --dependency=afterany:7 --job-name=drive --account=lab --time=2-00:00:00 --partition=long "
    "--exclude=n[1-2] --cpus-per-task=2 --mem-per-cpu=9G --constraint=big --reservation=ours {script} "
    "--continues --profile my own"
)
DRIVEN = {
    # not reached at first
    "sbatch": 'echo "sbatch $*" >> calls; [ -e asked ] || { touch asked; exit 1; }',
    "scontrol": f"echo '{SHOWN}'",
    "sleep": "echo slept >> calls",
    # a stage of an earlier driver runs at the first look
    "squeue": """case "$*" in
*%E*) ;;
*) [ -e seen ] || echo "rule_shard|$(pwd -P)"; touch seen ;;
esac""",
    "snakemake": """echo "snakemake $* ${SLURM_MEM_PER_CPU-clean}" >> calls
[ "$3" ] && exit  # --unlock
trap 'echo TERM >> calls; exit 1' TERM
/bin/sleep 0.5  # the driver waits, whose status a `return` in a trap would repeat
kill -USR2 $PPID  # SLURM: the limit is near
for _ in $(seq 100); do /bin/sleep 0.1; done""",
}
RUNS = 'echo "snakemake $*" >> calls'
DRIVER = Path(__file__).parents[2] / "profiles" / "drive.sbatch"


def drive(folder: Path, *arguments: str, **commands: str) -> tuple[int, list[str]]:
    """Run the driver's job with these commands; its exit code and what they noted in `calls`."""
    for name, body in (DRIVEN | commands).items():
        command = folder / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/bash\n{body}\n")
        command.chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "drive",
        "SLURM_CLUSTER_NAME": "here",
        "SLURM_MEM_PER_CPU": "4096",
    }
    linked = folder / "linked"
    linked.symlink_to(folder)
    ran = subprocess.run(
        ["bash", str(DRIVER), *arguments],
        env=slurm | {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PWD": str(linked)},
        cwd=linked,
        timeout=60,
    )
    return ran.returncode, (folder / "calls").read_text().splitlines()


def test_a_driver_submits_itself_before_its_limit(tmp_path: Path) -> None:
    following = NEXT.format(script=DRIVER)
    assert drive(tmp_path, "--continues", "--profile", "my own") == (
        1,
        [
            "slept",
            "snakemake --profile my own --unlock clean",
            "snakemake --profile my own clean",
            following,
            "slept",
            following,
            "TERM",
        ],
    )


def test_a_driver_never_names_both_kinds_of_memory(tmp_path: Path) -> None:
    shown = SHOWN.replace("MinMemoryCPU", "MinMemoryNode")  # by a plugin of the site
    _, calls = drive(tmp_path, scontrol=f"echo '{shown}'")
    assert not any("--mem" in call for call in calls), "the file has --mem-per-cpu"


def test_a_driver_waits_while_squeue_does_not_answer(tmp_path: Path) -> None:
    squeue = """echo squeue >> calls
[ -e seen ] && exit
touch seen; echo "error: socket timed out" >&2; exit 1"""
    # the first job removes no lock, which may be that of a snakemake that is alive
    assert drive(tmp_path, squeue=squeue, snakemake=RUNS) == (
        0,
        ["squeue", "slept", "squeue", "snakemake "],
    )


def test_a_driver_that_still_waits_at_its_limit_is_followed(tmp_path: Path) -> None:
    waiting = {
        "squeue": 'case "$*" in *%E*) ;; *) echo "rule_shard|$(pwd -P)" ;; esac',
        "sleep": "echo slept >> calls; kill -USR2 $PPID",
    }
    following = NEXT.format(script=DRIVER)
    first = following.replace("--continues ", "")  # it left no lock: one is of another snakemake
    # the first answer of sbatch is lost, and so is a signal that comes while the job is submitted
    for number, (given, expected) in enumerate([([], first), (["--continues"], following)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        code, calls = drive(folder, *given, "--profile", "my own", **waiting)
        assert (code, calls) == (0, ["slept", expected, "slept", expected])


def test_a_job_submitted_without_an_answer_is_not_repeated(tmp_path: Path) -> None:
    accepted = 'case "$*" in *%E*) [ -e asked ] && echo "afterany:7(unfulfilled)" ;; esac; true'
    _, calls = drive(tmp_path, "--profile", "my own", squeue=accepted)
    assert calls[-3:] == [NEXT.format(script=DRIVER), "slept", "TERM"]


@pytest.mark.parametrize(
    "line",
    [
        "  slurm_cluster: 'north,south'  # both",
        "train: {slurm_cluster: north,south, nodes: 2}",
        "- slurm_cluster=north,south",
    ],
)
def test_a_driver_asks_the_clusters_of_its_profile(tmp_path: Path, line: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.v8+.yaml").write_text(f"# slurm_cluster: east\n{line}\n")
    squeue = 'echo "squeue $*" >> calls'
    _, [asked, *_] = drive(tmp_path, "-e", "--profile=mine", squeue=squeue, snakemake=RUNS)
    assert asked.startswith("squeue -M here,north,south -a -h -u ")
