"""What each process of a training does: data, model, layout and loop are put together here.

Started by torchrun with the run's folder, where run.json has everything else, and a file for the one line that
tells the user what went wrong.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cellmill.config import check_options
from cellmill.config.layout import min_microbatches
from cellmill.config.options import TrainOptions
from cellmill.config.run import Parallel, Train
from cellmill.data.manifest import Manifest
from cellmill.data.stream import CellStream
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import UserError
from cellmill.files import read_json, write_json, write_text
from cellmill.launch.processes import die_with_parent
from cellmill.models.build import ModelSpec, build
from cellmill.models.export import initial_tensors
from cellmill.models.family import Model
from cellmill.parallel.compile_blocks import compile_blocks
from cellmill.parallel.fsdp import ParallelModel, apply_fsdp
from cellmill.parallel.materialize import materialize
from cellmill.parallel.mesh import Mesh, build_mesh, set_timeouts
from cellmill.parallel.partition import stages_of
from cellmill.parallel.pipeline import PipelineModel
from cellmill.parallel.pipeline_stages import Stages, keep_stage
from cellmill.parallel.recompute import checkpoint_activations
from cellmill.parallel.tensor_parallel import apply_tensor_parallel
from cellmill.planner.devices import peak_flops
from cellmill.planner.out_of_memory import ask, is_out_of_memory
from cellmill.planner.size import measure
from cellmill.runs.folder import Checkpoint, TrainFolder
from cellmill.runs.metrics import cut_back
from cellmill.runs.progress import status
from cellmill.track.console import ConsoleTracker
from cellmill.track.jsonl import JsonlTracker
from cellmill.track.tracker import Tracker
from cellmill.train.checkpoint import Checkpoints
from cellmill.train.hang_watch import START_FACTOR, HangWatch
from cellmill.train.loop import Progress, Trainer
from cellmill.train.meter import Meter
from cellmill.train.optimizer import build_optimizer
from cellmill.train.step_profile import StepProfile
from cellmill.train.stop import StopFlag

LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|tcpstore", re.IGNORECASE)


def main(path: Path, error_file: Path) -> None:
    """Trains in the run folder `path`. Collective: every process torchrun started."""
    stop = StopFlag()
    folder = TrainFolder(path)
    record = read_json(folder.path / "run.json")
    options: TrainOptions = check_options(TrainOptions, record["options"], "run.json")
    device = _join(options.parallel, options.train.timeout_s)
    watch = HangWatch()
    watch.start(options.train.timeout_s, partial(give_up, error_file))
    mesh = build_mesh(options.parallel, int(os.environ["LOCAL_WORLD_SIZE"]), device.type)
    vocabulary = Vocabulary.read(Path(record["vocabulary"]))
    model = build_model(options, vocabulary, record["init_from"], mesh, device)
    parallel_model = build_parallel_model(model, options.parallel, mesh)
    optimizer = build_optimizer(model, options.train, options.parallel.cpu_offload)
    train_stream, val_stream = build_streams(options, Path(record["manifest"]), mesh)
    steps = options.train.total_steps(train_stream.steps_per_epoch)

    checkpoints = Checkpoints(folder, options.train.keep_checkpoints)
    watch.saving = checkpoints.is_writing
    set_timeouts(_timeout(options.train.timeout_s))
    progress = resume(folder, checkpoints, model, optimizer, train_stream)
    saved_with = {
        "identity": record["identity"],
        "fingerprint": record["fingerprint"],
        "vocabulary_digest": vocabulary.digest,
        "options": record["options"],
        "init_from": record["init_from"],
        "steps": steps,
        "world_size": dist.get_world_size(),
    }
    trainer = Trainer(
        model=model,
        parallel_model=parallel_model,
        optimizer=optimizer,
        mesh=mesh,
        device=device,
        train=options.train,
        steps=steps,
        size=measure(ModelSpec.of(options, vocabulary.n_genes)),
        train_stream=train_stream,
        val_stream=val_stream,
        checkpoints=checkpoints,
        trackers=open_trackers(folder, steps, progress.step),
        meter=Meter(_peak(device, options.parallel.precision), dist.get_world_size()),
        stop=stop,
        progress=progress,
        saved_with=saved_with,
        watch=watch,
        profile=open_profile(folder, options.train, device),
    )
    write_state(folder, "running", progress, saved_with)
    done = trainer.run()
    if trainer.profile is not None:
        trainer.profile.close()
    for stream in (train_stream, val_stream):
        if stream is not None:
            stream.close()
    for tracker in trainer.trackers:
        tracker.close()
    write_state(folder, "done" if done else "stopped", progress, saved_with)
    dist.barrier()  # nobody leaves while another still needs it
    watch.close()


def _join(parallel: Parallel, timeout_s: float) -> torch.device:
    """Joins the process group and returns this process's device."""
    timeout = _timeout(timeout_s)
    torch.manual_seed(0)  # nothing draws from it: what is random here is keyed by seed and position
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # the norm of gradients that are on the CPU is reduced there
        backend = "cpu:gloo,cuda:nccl" if parallel.cpu_offload == "full" else "nccl"
        dist.init_process_group(backend, device_id=device, timeout=timeout)
        return device
    dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu")


def _timeout(timeout_s: float) -> timedelta:
    """torch's own, which speaks last: it knows no names."""
    return timedelta(seconds=2 * START_FACTOR * timeout_s)


def build_model(
    options: TrainOptions, vocabulary: Vocabulary, init_from: str | None, mesh: Mesh, device: torch.device
) -> Model | Stages:
    """The model, laid out over `mesh`, with its first weights; of a pipeline the stages of this process."""
    weights = None if init_from is None else Path(init_from)
    if weights is not None and dist.get_rank() == 0:
        known = int((Vocabulary.read(weights / "vocabulary.tsv").rows_of(vocabulary.gene_ids) >= 0).sum())
        print(f"first weights from {weights}: it knows {known:,} of {vocabulary.n_genes:,} genes", flush=True)
    parallel = options.parallel
    numbers = stages_of(mesh.pp.get_local_rank(), parallel)
    parts = {number: _build_stage(options, vocabulary, number, mesh) for number in numbers}
    kept_on = torch.device("cpu") if parallel.cpu_offload == "full" else device
    for part in parts.values():
        materialize(part, kept_on, initial_tensors(part, options.train.seed, weights, vocabulary))
    return parts[0] if parallel.pp == 1 else Stages(parts, parallel.stages)


def _build_stage(options: TrainOptions, vocabulary: Vocabulary, stage: int, mesh: Mesh) -> Model:
    """One stage, laid out, on the meta device; the whole model where there is no pipeline."""
    parallel = options.parallel
    model = build(ModelSpec.of(options, vocabulary.n_genes))
    if parallel.pp > 1:
        keep_stage(model, stage, parallel.stages)
    apply_tensor_parallel(model, model.plan.tensor, parallel, mesh)
    if parallel.compile:
        compile_blocks(model, model.plan.blocks, model.plan.compiled)
    if parallel.activation_checkpointing is not None:
        checkpoint_activations(model, model.plan.blocks, parallel.activation_checkpointing)
    apply_fsdp(model, model.plan.blocks, parallel, mesh)
    return model


def build_parallel_model(model: Model | Stages, parallel: Parallel, mesh: Mesh) -> ParallelModel | PipelineModel:
    """What runs a step of the laid-out model."""
    return PipelineModel(model, parallel, mesh) if isinstance(model, Stages) else ParallelModel(model, parallel, mesh)


def build_streams(options: TrainOptions, manifest: Path, mesh: Mesh) -> tuple[CellStream, CellStream | None]:
    """Training cells, endlessly, and validation cells, if there are any."""
    shared: dict[str, Any] = {
        "tokens": options.tokens,
        "stream": options.stream,
        "global_batch": options.train.global_batch,
        "token_budget": options.train.token_budget,
        "rank": mesh.dp_rank,
        "world": mesh.dp_world,
        "min_microbatches": min_microbatches(options.parallel),
        "microbatch_multiple": options.parallel.pp,
        "seed": options.train.seed,
    }
    train = CellStream(manifest, "train", **shared)
    if Manifest.read(manifest).splits["val"].n_obs == 0:
        return train, None
    return train, CellStream(manifest, "val", shuffle=False, max_cells=options.train.val_cells, **shared)


def resume(
    folder: TrainFolder,
    checkpoints: Checkpoints,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stream: CellStream,
) -> Progress:
    """Loads the newest whole checkpoint, if there is one, and takes the curve and the stream back to its step."""
    found: list[Checkpoint | None] = [None]
    if dist.get_rank() == 0:
        found[0], damaged = folder.newest_whole()
        for line in damaged:
            print(f"warning: {line}; going on from the one before it", file=sys.stderr, flush=True)
        if damaged and found[0] is not None:
            folder.set_damaged_aside(found[0].step)
    dist.broadcast_object_list(found)
    progress = Progress()
    if (checkpoint := found[0]) is not None:
        checkpoints.load(checkpoint, model, optimizer)
        progress = Progress(**checkpoint.state()["progress"])
    epoch, step = divmod(progress.step, stream.steps_per_epoch)
    stream.load_state_dict(stream.state_dict() | {"epoch": epoch, "step": step})
    if dist.get_rank() == 0:
        cut_back(folder.metrics, progress.step)
        print(f"going on from step {progress.step}" if progress.step else "starting at step 0", flush=True)
    dist.barrier()
    return progress


def open_trackers(folder: TrainFolder, steps: int, start: int) -> list[Tracker]:
    """Rank 0's trackers; the others have none."""
    if dist.get_rank() != 0:
        return []
    return [JsonlTracker(folder.metrics), ConsoleTracker(steps, start)]


def open_profile(folder: TrainFolder, train: Train, device: torch.device) -> StepProfile | None:
    """What records the steps that train.profile_steps names."""
    if train.profile_steps is None:
        return None
    first, last = train.profile_steps
    return StepProfile(folder.path / "profile", first, last, dist.get_rank(), device)


def _peak(device: torch.device, precision: str) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def write_state(folder: TrainFolder, name: str, progress: Progress, saved_with: dict[str, Any]) -> None:
    """Rank 0 writes state.json, and status.json when all is done."""
    if dist.get_rank() == 0:
        value = status(name, {"progress": vars(progress), **saved_with})
        write_json(folder.path / "state.json", value)
        if name == "done":
            write_json(folder.path / "status.json", value)


def complain(error: BaseException, folder: Path) -> str | None:
    """The one line that tells the user what went wrong; None when it is another process's fault."""
    if isinstance(error, UserError):
        return str(error)
    text = " ".join(str(error).split())
    if is_out_of_memory(error):
        return f"{_who()}: out of memory ({text[:120].rstrip('.') or type(error).__name__}); {_advice(error, folder)}"
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return f"{error.filename or folder}: {error.strerror or error}"
    if isinstance(error, ConnectionError | dist.DistError) or LOST_PEER.search(text):
        return None  # a process or node that this one waited for has gone: whoever went first says why, if it could
    return f"{_who()}: {type(error).__name__}: {text[:300]}; its traceback is in the log"


def _who() -> str:
    return f"rank {os.environ.get('RANK', '?')} on {os.uname().nodename}"


def _advice(error: BaseException, folder: Path) -> str:
    """What the plan says to change; less where there is no memory left to find out."""
    traceback.clear_frames(error.__traceback__)  # they hold the model, its activations and the batch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = ask(folder / "run.json", int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"]), device)
    return found or "lower train.token_budget, or set parallel.activation_checkpointing to full"


def give_up(error_file: Path, line: str) -> None:
    """Ends this process from a thread: the main one is in a call that does not return."""
    leave(error_file, line)
    os._exit(1)


def leave(error_file: Path, line: str) -> None:
    """Leaves the one line for the launcher, on stderr too where that is not possible."""
    try:
        write_text(error_file, line)
    except OSError:  # the shared folder is full, perhaps: the log is what is left
        print(line, file=sys.stderr)
    sys.stderr.flush()


if __name__ == "__main__":
    die_with_parent()
    run_folder, error_file = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        main(run_folder, error_file)
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # Python's own way out makes signals deadly again, and one may come twice
    except BaseException as error:
        expected = isinstance(error, UserError | OSError)
        if not expected:
            traceback.print_exc()
        line = complain(error, run_folder)
        if line is not None:
            leave(error_file, line)
        os._exit(2 if expected else 1)  # other ranks may be in a collective that this one will never join
