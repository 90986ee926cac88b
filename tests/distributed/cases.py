"""What the processes of the pool run: the pieces of stages/worker.py, put together as the worker does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cellmill.config.options import TrainOptions
from cellmill.data.vocabulary import Vocabulary
from cellmill.models.batch import to_tensors
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import build_mesh
from cellmill.parallel.vocabulary import embed_tokens, token_logits, token_loss
from cellmill.stages.worker import build_model, build_replica, build_streams
from cellmill.train.checkpoint import Checkpoints
from cellmill.train.folder import TrainFolder
from cellmill.train.loop import Progress, Trainer
from cellmill.train.meter import Meter
from cellmill.train.optimizer import build_optimizer
from cellmill.train.stop import StopFlag

DEVICE = torch.device("cpu")


class Lines:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def close(self) -> None:
        pass


class _NoSignal(StopFlag):
    def __init__(self) -> None:  # the pool's processes keep their own handlers
        self.received = None


def trainer(corpus: str, options: dict[str, Any], folder: str, steps: int) -> tuple[Trainer, Lines]:
    """A trainer over the shards in `corpus`, in the layout that `options` names."""
    parsed = TrainOptions.model_validate(options)
    vocabulary = Vocabulary.read(Path(corpus) / "vocabulary.tsv")
    mesh = build_mesh(parsed.parallel, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), "cpu")
    model = build_model(parsed, vocabulary, None, mesh, DEVICE)
    train_stream, val_stream = build_streams(parsed, Path(corpus) / "shards" / "manifest.json", mesh)
    lines = Lines()
    made = Trainer(
        model=model,
        replica=build_replica(model, parsed.parallel, mesh),
        optimizer=build_optimizer(model, parsed.train),
        mesh=mesh,
        device=DEVICE,
        train=parsed.train,
        steps=steps,
        size=parsed.model.size(vocabulary.n_genes, parsed.tokens),
        train_stream=train_stream,
        val_stream=val_stream,
        checkpoints=Checkpoints(TrainFolder(Path(folder)), parsed.train.keep_checkpoints),
        trackers=[lines],
        meter=Meter(None, dist.get_world_size()),
        stop=_NoSignal(),
        progress=Progress(),
        saved_with={"fingerprint": train_stream.fingerprint},
    )
    return made, lines


def curve(corpus: str, options: dict[str, Any], folder: str, steps: int, load: bool = False) -> list[list[float]]:
    """[loss, gradient norm] of each step; with `load`, going on from the newest checkpoint in `folder`."""
    made, lines = trainer(corpus, options, folder, steps)
    if load:
        checkpoint, _ = TrainFolder(Path(folder)).newest_whole()
        assert checkpoint is not None
        made.checkpoints.load(checkpoint, made.model, made.optimizer)
        made.progress = Progress(**checkpoint.state()["progress"])
        epoch, step = divmod(made.progress.step, made.train_stream.steps_per_epoch)
        made.train_stream.load_state_dict(made.train_stream.state_dict() | {"epoch": epoch, "step": step})
    made.run()
    made.train_stream.close()
    if made.val_stream is not None:
        made.val_stream.close()
    dist.barrier()
    return [[line["loss"], line["grad_norm"]] for line in lines.lines if "loss" in line]


def initial_parameters(corpus: str, options: dict[str, Any]) -> dict[str, Any]:
    """Every full parameter before training, as bytes, with this rank's local shape and placements."""
    parsed = TrainOptions.model_validate(options)
    vocabulary = Vocabulary.read(Path(corpus) / "vocabulary.tsv")
    mesh = build_mesh(parsed.parallel, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), "cpu")
    model = build_model(parsed, vocabulary, None, mesh, DEVICE)
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[plain_name(name)] = {
            "bytes": full(parameter).numpy().tobytes(),
            "mesh": list(parameter.device_mesh.shape) if isinstance(parameter, DTensor) else [],
            "placements": [str(p) for p in parameter.placements] if isinstance(parameter, DTensor) else [],
            "local": list(parameter.to_local().shape) if isinstance(parameter, DTensor) else list(parameter.shape),
            "full": list(parameter.shape),
        }
    return found


def cut_vocabulary(arrays: list[Any]) -> list[Any]:
    """The summed loss over a table that all ranks share, and the whole gradients of twice it."""
    table, bias, states, tokens, answers = map(torch.from_numpy, arrays)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = distribute_tensor(table, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    for tensor in (bias, states):
        tensor.requires_grad_()
    loss = token_loss(token_logits(states + embed_tokens(tokens, cut)[:7], cut, bias), answers)
    gradients = torch.autograd.grad(2 * loss, (cut, bias, states))
    return [loss.item(), *(full(gradient).numpy() for gradient in gradients)]


def held(corpus: str, options: dict[str, Any]) -> dict[str, float]:
    """What this rank has of the parameters, and what autograd keeps of a forward pass, in elements."""
    made, _ = trainer(corpus, options, corpus, 1)
    own = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in made.model.named_parameters()}
    weights = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
    batch = next(iter(made.train_stream))[0]
    prepared = made._prepare([to_tensors(batch)], 0)[0]
    kept: dict[int, torch.UntypedStorage] = {}  # alive, or an address would be counted once for two tensors

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.trigger_wait()
        storage = local.untyped_storage()
        if local.is_floating_point() and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made.replica(prepared).backward()
    made.train_stream.close()
    return {
        "parameters": sum(tensor.numel() for tensor in own.values()),
        "activations_per_token": sum(storage.nbytes() for storage in kept.values()) / 4 / len(prepared.genes),
    }


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be spread over ranks. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def parameters_after(corpus: str, options: dict[str, Any], folder: str, steps: int) -> dict[str, bytes]:
    """Every full parameter after `steps` steps, as this rank sees it."""
    made, _ = trainer(corpus, options, folder, steps)
    made.run()
    made.train_stream.close()
    if made.val_stream is not None:
        made.val_stream.close()
    return {plain_name(name): full(p).numpy().tobytes() for name, p in made.model.named_parameters()}
