"""train: starts a run, or goes on with it from its newest whole checkpoint.

Runs on the head of the job and imports no torch: what can be refused is refused here, in one line, before processes
are started. The work of each process is `stages/worker.py`.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cellmill import __version__
from cellmill.config.options import TrainOptions
from cellmill.data.shards import Manifest, verify
from cellmill.errors import Stopped, UserError
from cellmill.files import read_json, sha256_file, write_json
from cellmill.launch.job import Job
from cellmill.launch.local import run_local
from cellmill.stages.checks import check_run, check_vocabulary, check_weights
from cellmill.train.folder import TrainFolder
from cellmill.train.identity import changed_keys, check_data, identity


def run(
    *,
    options: TrainOptions,
    manifest: Path,
    vocabulary: Path,
    out: Path,
    init_from: Path | None,
    nodes: int,
    nproc_per_node: int,
) -> None:
    """Trains in `out` until its status.json says done.

    Raises Stopped when a signal ended it with its state saved; UserError when a process failed.
    """
    shards = Manifest.read(manifest)
    check_run(options, nodes, nproc_per_node, shards.splits["train"].n_obs)
    check_vocabulary(vocabulary, shards)
    if init_from is not None:
        check_weights(options, init_from)
    folder = TrainFolder(out)
    with folder.locked() as lock:
        belongs = identity(options.model_dump(mode="json"), _weights_digest(init_from))
        if _is_done(folder, belongs, shards.fingerprint):
            print(f"{out}: this run is already done", flush=True)
            return
        _verify_once(folder, shards)
        record = {
            "options": options.model_dump(mode="json"),
            "identity": belongs,
            "fingerprint": shards.fingerprint,
            "manifest": str(manifest),
            "vocabulary": str(vocabulary),
            "init_from": None if init_from is None else str(init_from),
            "nodes": nodes,
            "nproc_per_node": nproc_per_node,
            "environment": environment(),
        }
        write_json(folder.path / "run.json", record)
        with tempfile.TemporaryDirectory(prefix="cellmill-") as elsewhere:  # the run's own disk may be the trouble
            error = Path(elsewhere) / "error.txt"
            job = Job("cellmill.stages.worker", [str(folder.path), str(error)], nodes, nproc_per_node)
            code = run_local(job, keep_open=lock)
            _explain(folder, code, error)


def _is_done(folder: TrainFolder, belongs: dict[str, Any], fingerprint: str) -> bool:
    """Whether nothing is left to do; sets the files of another configuration aside, refuses those of other data."""
    checkpoint, damaged = folder.newest_whole(contents=False)
    if checkpoint is not None and checkpoint.state()["progress"]["step"] >= checkpoint.state()["steps"]:
        checkpoint, damaged = folder.newest_whole()  # nothing will read it again before it is declared done
    for line in damaged:
        print(f"warning: {line}; going on from the one before it", file=sys.stderr, flush=True)
    if checkpoint is None:
        return False
    state = checkpoint.state()
    if changes := changed_keys(state["identity"], belongs):
        aside = folder.set_aside()
        print(f"the configuration changed ({'; '.join(changes)}): the earlier training is now in {aside}", flush=True)
        return False
    finished = state["progress"]["step"] >= state["steps"]
    if finished and state["fingerprint"] != fingerprint:
        print(f"the data changed: the finished training is now in {folder.set_aside()}", flush=True)
        return False
    check_data(str(folder.path), state["fingerprint"], fingerprint)
    if not finished:
        (folder.path / "status.json").unlink(missing_ok=True)
        return False
    if not (folder.path / "status.json").exists():
        write_json(folder.path / "status.json", status("done", state))
    return True


def status(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """What status.json and state.json say of a run."""
    return {"state": name, "steps": state["steps"], "world_size": state["world_size"], **state["progress"]}


def environment() -> dict[str, str]:
    """Versions that a run's numbers may depend on."""
    found = {"cellmill": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for package in ("torch", "numpy", "anndata", "h5py"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _weights_digest(model: Path | None) -> str | None:
    return None if model is None else sha256_file(model / "model.safetensors")


def _verify_once(folder: TrainFolder, shards: Manifest) -> None:
    """Hashes every byte of the shards, unless their files are those that were hashed before. Raises DataError."""
    paths = [shards.shard_path(shard) for split in ("train", "val") for shard in shards.splits[split].shards]
    stamps = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths if path.exists()}
    record, now = folder.path / "verified.json", {"fingerprint": shards.fingerprint, "files": stamps}
    if record.exists() and read_json(record) == now:
        return
    verify(shards, ("train", "val"))
    write_json(record, now)


def _explain(folder: TrainFolder, code: int, error: Path) -> None:
    """Turns how the processes ended into an exception, or returns when the run is done."""
    if error.exists():
        raise UserError(error.read_text(encoding="utf-8").strip())
    state_file = folder.path / "state.json"
    state = read_json(state_file) if state_file.exists() else {"state": "starting", "step": 0}
    if code == 0 and state["state"] == "done":
        return
    if code == 0 and state["state"] == "stopped":
        raise Stopped(f"stopped at step {state['step']} of {state['steps']}, saved; run the same command to go on")
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    raise UserError(
        f"a process of {folder.path} ended with {ended} after step {state['step']}; its error is above; "
        "run the same command to go on from the last checkpoint"
    )
