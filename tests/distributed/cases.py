"""Functions that the pool's processes run: the pieces of train/worker.py, put together as the
worker does.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cellmill.cli import main
from cellmill.config.options import TrainOptions
from cellmill.config.parallel import Parallel
from cellmill.config.parts.family import WEIGHTS_FORMAT
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.cell_stream import CellStream
from cellmill.errors import UserError
from cellmill.launch.signals import StopFlag
from cellmill.models.export import load_model
from cellmill.parallel import apply, likelihoods
from cellmill.parallel.materialize import named_tensors, plain_name
from cellmill.parallel.mesh import build_mesh, gather_json, to_local
from cellmill.parallel.pipeline import PipelineModel
from cellmill.parallel.torch_private import set_group_timeouts
from cellmill.parallel.vocab_parallel import embed_tokens
from cellmill.planner.measure.size import Flops
from cellmill.runs.folder import TrainFolder
from cellmill.train.checkpoint import Checkpoints
from cellmill.train.hang_watch import HangWatch
from cellmill.train.loop import Trainer
from cellmill.train.worker import build_model, build_trainer
from tests.distributed import buffered

DEVICE = torch.device("cpu")
NO_FLOPS = Flops(1, 1, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""For FLOPs in the log, at which no case looks; measuring a model took most of a short training's
time.
"""


class Lines:
    """A tracker that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        pass

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        self.lines.append({"step": step} | scalars)

    def finish(self, status: str) -> None:
        pass


class _NoSignal(StopFlag):
    def __init__(self) -> None:  # the pool's processes keep their own handlers
        self.received = None


def trainer(
    corpus: str,
    options: dict[str, Any],
    folder: str,
    steps: int,
    init_from: str | None = None,
    load: bool = False,
) -> tuple[Trainer, Lines]:
    """Return a trainer over the shards in `corpus`, in the layout of `options`.

    `init_from` is an exported model; with `load` it continues from the newest checkpoint in
    `folder`.
    """
    if options["model"].get("family") == "buffered":
        buffered.register()
    parsed = TrainOptions.model_validate(options)
    manifest = Manifest.read(Path(corpus) / "shards" / "manifest.json")
    mesh = build_mesh(parsed.parallel, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), "cpu")
    record = {
        "identity": {"weights_format": WEIGHTS_FORMAT},
        "fingerprint": manifest.fingerprint_with(parsed.read_columns(), parsed.number_columns()),
        "options": parsed.model_dump(mode="json"),
        "init_from": init_from,
        "teacher": None if parsed.teacher is None else f"{corpus}/teacher",
        "vocabulary": f"{corpus}/vocabulary.tsv",
        "manifest": str(manifest.path),
    }
    made = build_trainer(
        TrainFolder(Path(folder)), record, parsed, mesh, _NoSignal(), HangWatch(), flops=NO_FLOPS
    )
    made.steps = steps
    lines = Lines()
    made.trackers = [lines]
    if load:
        made.resume()
    return made, lines


MEASURED = ("effective_rank", "depth_r2", "batch_r2")
"""Metrics of the embedding at validation."""
LOGGED = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "cells",
    "tokens",
    "skipped",
    "skipped_steps",
    *MEASURED,
)


def of_training(lines: Lines) -> list[dict[str, Any]]:
    """The lines without what depends on the machine."""
    # the name of an objective's part, or of a metric
    parts = ("loss_", "lr_", "val_", "labelled_frac")
    kept = []
    for line in lines.lines:
        names = [key for key in line if key in LOGGED or key.startswith(parts)]
        kept.append({name: line[name] for name in names})
    return kept


def losses_and_norms(lines: Lines) -> list[list[float]]:
    return [[line["loss"], line["grad_norm"]] for line in lines.lines if "loss" in line]


def tensors(model: torch.nn.Module) -> list[tuple[str, np.ndarray]]:
    """Full parameters and buffers. Pairs, as a rank may have two copies of a tied parameter.
    Collective.
    """
    return [(name, full(tensor).numpy().copy()) for name, tensor in named_tensors(model)]


def trained(
    corpus: str,
    options: dict[str, Any],
    folder: str,
    steps: int,
    load: bool = False,
    init_from: str | None = None,
    bad: list[int] | None = None,
    bad_validation: bool = False,
) -> dict[str, Any]:
    """A training, with `load` from the newest checkpoint in `folder` on: its lines, tensors before
    and after it, and what its optimizer trains.

    In the steps `bad`, data-parallel rank 1, or 0 if it is the only one, gets infinite values;
    moments of the optimizer are returned then.
    """
    made, lines = trainer(corpus, options, folder, steps, init_from)
    first = tensors(made.model)
    error = ""
    done = False
    if load:
        for _, buffer in [*named_tensors(made.model, persistent=True)][
            len([*made.model.parameters()]) :
        ]:
            buffer.zero_()  # the checkpoint has it
        made.resume()
    if bad is not None:
        made.train_stream = _Spoiled(
            made.train_stream, bad, made.mesh.dp_rank == min(1, made.mesh.dp_world - 1)
        )
    if bad_validation:
        made.val_stream = _Spoiled(made.val_stream, list(range(1000)), here=True)
    try:
        done = made.run()
    except UserError as ended:
        if bad is None:
            raise
        error = str(ended)
    finally:
        made.checkpoints.wait()
        made.close()
    names = {id(parameter): plain_name(name) for name, parameter in made.model.named_parameters()}
    states = {names[id(parameter)]: state for parameter, state in made.optimizer.state.items()}
    groups = []
    for group in made.optimizer.param_groups:
        in_group = {names[id(parameter)] for parameter in group["params"]}
        groups.append((in_group, group["weight_decay"], group["lr"]))
    moments = {}
    if bad is not None:
        for name, state in states.items():
            moments[name] = [full(value).numpy().tobytes() for value in state.values()]
    return {
        "lines": of_training(lines),
        "curve": losses_and_norms(lines),
        "first": first,
        "last": tensors(made.model),
        "groups": groups,
        "with gradient": {
            plain_name(name) for name, p in made.model.named_parameters() if p.requires_grad
        },
        "states": set(states),
        "moments": moments,
        "done": done,
        "error": error,
        "progress": {key: value for key, value in vars(made.progress).items() if key != "wall_s"},
    }


def curve(
    corpus: str, options: dict[str, Any], folder: str, steps: int, load: bool = False
) -> list[list[float]]:
    """[loss, gradient norm] of each step of `trained`."""
    return trained(corpus, options, folder, steps, load)["curve"]


def schedules(
    corpus: str, options: dict[str, Any], folder: str
) -> tuple[list[Any], list[Any], int]:
    """Schedules that torch made in 20 steps of a pipeline, those of each step, and the number that
    keep buffers.
    """
    made, _ = trainer(corpus, options, folder, 20)
    model = made.parallel_model
    assert isinstance(model, PipelineModel)
    new = model.new_schedule
    use = model.schedule_of
    built: list[tuple[int, int]] = []
    used: list[tuple[int, int]] = []
    model.new_schedule = lambda *key: built.append(key) or new(*key)
    model.schedule_of = lambda *key: used.append(key) or use(*key)
    made.run()
    with_buffers = sum(next(kept.received(), None) is not None for kept in model.schedules.values())
    made.close()
    return built, used, with_buffers


def newest(folder: str) -> tuple[int, list[str]]:
    """Step of the checkpoint that a run in `folder` resumes from, and a line for each damaged one."""
    checkpoint, damaged = Checkpoints(TrainFolder(Path(folder)), 2).newest_whole()
    assert checkpoint is not None
    return checkpoint.step, damaged


def gathered() -> list[Any]:
    """What `gather_json` returns of texts of different lengths."""
    rank = dist.get_rank()
    return gather_json({"rank": rank, "text": "ü" * rank, "none": None}, DEVICE)


def curve_compiled(
    corpus: str, options: dict[str, Any], folder: str, steps: int, backend: str
) -> tuple[list[list[float]], int]:
    """As `curve`, compiled by `backend`; and the number of compiled graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    kept = apply.BACKEND
    apply.BACKEND = backend
    try:
        found = curve(corpus, options, folder, steps)
    finally:
        apply.BACKEND = kept
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def initial_parameters(corpus: str, options: dict[str, Any]) -> dict[str, Any]:
    """Every full parameter before training, as bytes, with this rank's local shape and placements."""
    parsed = TrainOptions.model_validate(options)
    vocabulary = Vocabulary.read(Path(corpus) / "vocabulary.tsv")
    mesh = build_mesh(parsed.parallel, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), "cpu")
    model = build_model(parsed, vocabulary, None, mesh, {})
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[plain_name(name)] = {
            "bytes": full(parameter).numpy().tobytes(),
            "mesh": list(parameter.device_mesh.shape) if isinstance(parameter, DTensor) else [],
            "placements": [str(p) for p in parameter.placements]
            if isinstance(parameter, DTensor)
            else [],
            "local": list(to_local(parameter).shape),
            "full": list(parameter.shape),
        }
    return found


def cut_vocabulary(arrays: list[Any]) -> list[Any]:
    """The summed loss over a table sharded over all ranks, and the full gradients of twice the
    loss.
    """
    table, bias, states, tokens, answers = map(torch.from_numpy, arrays)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = -(-len(table) // mesh.size())
    kept = likelihoods.CPU_CHUNK_LOGITS
    cut = distribute_tensor(table, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    for tensor in (bias, states):
        tensor.requires_grad_()
    likelihoods.CPU_CHUNK_LOGITS = 2 * rows  # two or three targets at once
    try:
        loss = likelihoods.token_loss(states + embed_tokens(tokens, cut)[:7], cut, bias, answers)
    finally:
        likelihoods.CPU_CHUNK_LOGITS = kept
    gradients = torch.autograd.grad(2 * loss, (cut, bias, states))
    return [loss.item(), *(full(gradient).numpy() for gradient in gradients)]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a plain tensor or a DTensor. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class _Spoiled:
    """A stream whose cells have infinite values in some steps, on one data-parallel rank."""

    def __init__(self, stream: CellStream, steps: list[int], here: bool) -> None:
        self._stream = stream
        self._steps = steps
        self._here = here

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[list[Batch]]:
        first = self._stream.state_dict()["step"] + 1
        for step, batches in enumerate(self._stream, first):
            spoil = self._here and step in self._steps
            yield [
                replace(batch, values=batch.values + np.inf) if spoil else batch
                for batch in batches
            ]


def exported(corpus: str, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Tensors of the model that consolidate makes of the newest checkpoint, by name; buffers too."""
    chosen = [
        "--options",
        '{"consolidate": {"checkpoint": "last"}}',
        "--vocabulary",
        f"{corpus}/vocabulary.tsv",
    ]
    assert main(["consolidate", *chosen, "--train", str(folder), "--out", str(out)]) == 0
    model, _, _ = load_model(out)
    return {name: tensor.detach() for name, tensor in named_tensors(model)}


def timeouts(parallel: dict[str, Any], seconds: float) -> list[float]:
    """Timeouts of all process groups of a mesh, after `set_group_timeouts`."""
    build_mesh(Parallel.model_validate(parallel), int(os.environ["LOCAL_WORLD_SIZE"]), "cpu")
    set_group_timeouts(timedelta(seconds=seconds))
    groups = [
        group
        for group in dist.distributed_c10d._world.pg_map
        if isinstance(group, dist.ProcessGroup)
    ]
    return [group._get_backend(DEVICE).options._timeout.total_seconds() for group in groups]


def overflow(
    corpus: str,
    options: dict[str, Any],
    folder: str,
    steps: int,
    at: int,
    rank: int,
    initial: float,
) -> list[list[Any]]:
    """[loss, gradient norm, scale of the next loss, whether this rank's parameters changed] of each
    step.

    Loss and norm are None where it was skipped. In step `at` one gradient of process `rank` becomes
    infinite after the backward pass.
    """
    made, lines = trainer(corpus, options, folder, steps)
    made.progress.loss_scale = initial
    backward = made.parallel_model.forward_backward
    step = made.optimizer.step
    changed = []

    def overflowing(*args: Any) -> torch.Tensor:
        loss = backward(*args)
        if made.progress.step + 1 == at and dist.get_rank() == rank:
            gradients = [to_local(p.grad) for p in made.model.parameters() if p.grad is not None]
            next(gradient for gradient in gradients if gradient.numel()).fill_(torch.inf)
        return loss

    def watched() -> None:
        before = [to_local(p).detach().clone() for p in made.model.parameters()]
        step()
        changed.append(
            any(not torch.equal(a, to_local(b)) for a, b in zip(before, made.model.parameters()))
        )

    made.parallel_model.forward_backward, made.optimizer.step = overflowing, watched
    made.run()
    made.close()
    found = [line for line in lines.lines if "loss_scale" in line]
    return [
        [line.get("loss"), line.get("grad_norm"), line["loss_scale"], did]
        for line, did in zip(found, changed)
    ]
