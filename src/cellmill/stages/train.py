"""train: starts a run, or resumes it from its newest undamaged checkpoint.

The launcher of a training: imports no torch, and refuses what it can in one line before any process
is started. The processes run `train/worker.py`.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cellmill import __version__
from cellmill.config.checks import check_nodes
from cellmill.config.load import read_model_config
from cellmill.config.machine import Machine
from cellmill.config.options import TrainOptions
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.data.stream.order import OrderRule
from cellmill.errors import Stopped, UserError
from cellmill.files import read_json, sha256_file, write_json
from cellmill.launch.job import Job
from cellmill.launch.node import run_here
from cellmill.launch.rendezvous import REACH_S
from cellmill.launch.slurm import SlurmLauncher
from cellmill.runs.cost import accounted, write_cost
from cellmill.runs.folder import TrainFolder
from cellmill.runs.identity import (
    begin_branch,
    changed_free_options,
    changed_keys,
    check_data,
    identity,
    is_done,
)
from cellmill.runs.lock import FolderWatch
from cellmill.stages.training_inputs import (
    check_architecture,
    check_genes,
    check_vocabulary,
    describe_reading,
    digest_vectors,
    fit_options,
    open_corpus,
)
from cellmill.track.follow import followed


def train(
    *,
    options: TrainOptions,
    manifest: Path,
    vocabulary: Path,
    out: Path,
    init_from: Path | None,
    machine: Machine,
    restart: bool = False,
    trunk: Path | None = None,
    teacher: Path | None = None,
) -> None:
    """Train in `out` until its status.json says done.

    `restart` sets a training of other options or data aside.

    With `trunk`, the folder of a checkpoint of another run, it continues from there. `teacher` is a
    folder of stage teach. Raise Stopped if a signal ended it with its state saved, UserError if a
    process failed.
    """
    options, shards, n_cells, fingerprint = open_corpus(options, manifest, out)
    for name, reason in options.objective.choices().items():
        print(f"{name}: {reason}")
    check_nodes(options, machine.node_counts, machine.nproc_per_node, n_cells)
    check_vocabulary(vocabulary, shards)
    options = fit_options(options, vocabulary, shards, teacher, init_from, out)
    if init_from is not None:
        check_architecture(options, init_from)
        check_genes(options, init_from, vocabulary)
    weights = None if init_from is None else sha256_file(init_from / "model.safetensors")
    record: dict[str, Any] = {
        "options": options.model_dump(mode="json"),
        "identity": identity(options, weights, digest_vectors(options, init_from))
        | describe_reading(options, shards),
        "fingerprint": fingerprint,
        "manifest": str(manifest),
        "vocabulary": str(vocabulary),
        "init_from": init_from and str(init_from),
        "teacher": teacher and str(teacher),
        "supervised_by": supervised_by(options.objective, init_from),
        "nodes": machine.nodes,
        "nproc_per_node": machine.nproc_per_node,
        "environment": environment(),
    }
    folder = TrainFolder(out)
    steps = options.train.total_steps(OrderRule.for_counting(options, n_cells).steps_per_epoch)

    def job(error_folder: Path) -> Job:
        """The processes of the training, which read the options from run.json.

        error.txt goes to `error_folder`.
        """
        # a job that was followed until now may have had other options that change no number
        write_json(folder.path / "run.json", record)
        error = str(error_folder / "error.txt")
        return Job(
            module="cellmill.train.worker",
            arguments=[str(folder.path), error, machine.wanted_device],
            nodes=machine.node_counts[-1],
            nproc_per_node=machine.nproc_per_node,
            cores=machine.cpus_per_task if machine.launcher == "local" else 0,
            max_restarts=machine.max_restarts,
            error_file=error,
            join_s=max(REACH_S, options.train.timeout_s),
            state_file=str(folder.path.resolve() / "state.json"),
        )

    with folder.locked(follows=machine.launcher == "slurm") as lock:
        had_jobs = (folder.path / "jobs").exists() and shutil.which("squeue") is not None
        launcher = None
        if machine.launcher == "slurm" or had_jobs:
            launcher = SlurmLauncher(folder, machine)
        if launcher is None or not _is_living(launcher, record):
            if is_done(folder, record, steps, restart):
                # its launcher may have been killed before it could
                write_cost(folder.path, show=False)
                print(f"{out}: this run is already done")
                return
            if trunk is not None:
                begin_branch(folder, trunk, record, options.train, steps)
            write_json(folder.path / "run.json", record)
            # the state of a shorter run, of a training set aside, or one without its checkpoints
            if folder.state() == "done":
                (folder.path / "state.json").unlink()
        with followed(folder.path, options.track), accounted(folder.path, machine):
            if launcher is not None and machine.launcher == "slurm":
                launcher.run(job)
            else:
                _run_here(folder, machine, lock, job)


def supervised_by(objective: ObjectiveConfig, init_from: Path | None) -> list[str]:
    """obs columns whose labels the run reads, or its initial weights were trained with."""
    columns = {*objective.supervised_by}
    if init_from is not None:
        columns |= {*read_model_config(init_from / "config.json").get("supervised_by", [])}
    return sorted(columns)


def _is_living(launcher: SlurmLauncher, record: dict[str, Any]) -> bool:
    """True if a job of this run is queued or running.

    Raise UserError if this command may not follow it.
    """
    job = launcher.living()
    path = launcher.folder.path
    kind = launcher.machine.launcher
    if job is None:
        return False
    if kind == "allocation" and os.environ.get("SLURM_JOB_ID") == job.job_id:
        # the allocation outlives the training in it, which has ended, or the lock would be held
        return False
    if kind != "slurm":
        # without accounting, no other word comes of a job that nobody followed
        if launcher.is_gone(job):
            return False
        raise UserError(
            f"{path}: job {job.job_id} of this run is {job.state.lower()}; follow it with launcher slurm, or "
            f"end it with `scancel {job.argument}`"
        )
    before = read_json(path / "run.json")
    changes = changed_keys(before, record["identity"], str(path / "run.json"))
    if changes:
        # without accounting, no other word comes of a job that nobody followed
        if launcher.is_gone(job):
            return False
        different = "; ".join(f"{key} {change}" for key, change in changes.items())
        raise UserError(
            f"{path}: job {job.job_id} is training with another configuration ({different}); end it with "
            f"`scancel {job.argument}`, or change the configuration back"
        )
    check_data(str(path), before["fingerprint"], record["fingerprint"])
    later = changed_free_options(before, record["options"], str(path / "run.json"))
    if later:
        different = "; ".join(f"{key} {change}" for key, change in later.items())
        print(
            f"{path}: job {job.job_id} was submitted with other options ({different}), which hold from the next job on",
        )
    # trackers are processes of this command
    write_json(
        path / "run.json",
        before | {"options": before["options"] | {"track": record["options"]["track"]}},
    )
    return True


def _run_here(folder: TrainFolder, machine: Machine, lock: int, job: Callable[[Path], Job]) -> None:
    """Train on this machine, or in the allocation this process is in, until the run is done.

    Raise Stopped if it was stopped and saved, UserError if a process failed.
    """
    watch = FolderWatch(folder.path)
    # the run's own disk may be full
    with tempfile.TemporaryDirectory(prefix="cellmill-") as scratch:
        code, files = run_here(job, machine, folder.path, lock, watch.check, scratch=Path(scratch))
        watch.wait()
        error = files / "error.txt"
        if error.exists():
            raise UserError(error.read_text(encoding="utf-8").strip())
    state_file = folder.path / "state.json"
    state = read_json(state_file) if state_file.exists() else {"state": "starting", "step": 0}
    if code == 0 and state["state"] == "done":
        return
    if code == 0 and state["state"] == "stopped":
        raise Stopped(
            f"stopped at step {state['step']} of {state['steps']}, saved; run the same command to resume"
        )
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    raise UserError(
        f"a process of {folder.path} ended with {ended} after step {state['step']}; its error is above; "
        "run the same command to resume from the last checkpoint"
    )


def environment() -> dict[str, str]:
    """Versions that a run's numbers may depend on.

    `commit` of the folder this process is in, `-dirty` with changes.
    """
    versions = {
        "cellmill": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for package in ("torch", "numpy", "anndata", "h5py"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    with suppress(OSError, subprocess.SubprocessError):  # outside of git
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        versions["commit"] = done.stdout.strip()
    return versions
