"""How much longer training steps are around an asynchronous checkpoint of a model of 100 million parameters.

Plain steps first; then a save between two steps, timed by itself, and the steps during which it is written behind. The
part that nothing hides is the copy of weights and optimizer state, timed once more alone. One process.

    python benchmarks/checkpoint_stall.py [--steps 3] [--saves 3] [--cells 4] [--threads 1] [--device cpu]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from train_step import GENES, commit, machine, synchronize

from cellmill.config.parallel import Parallel
from cellmill.config.run import Train
from cellmill.config.tokens import ContinuousTokens
from cellmill.data.tokens import Batch
from cellmill.models.batch import on_device, to_tensors
from cellmill.models.build import ModelSpec, build
from cellmill.models.encoder.config import EncoderConfig
from cellmill.models.family import Model
from cellmill.models.objectives.config import MaskedGeneConfig
from cellmill.parallel.clip import clip_grad_norm
from cellmill.parallel.mesh import build_mesh
from cellmill.parallel.step import ParallelModel
from cellmill.runs.folder import TrainFolder
from cellmill.train.checkpoint import Checkpoints, tensors_of
from cellmill.train.optimizer import build_optimizer

LENGTH = 512
SPEC = ModelSpec(EncoderConfig(hidden=768, layers=12, heads=12), MaskedGeneConfig(), ContinuousTokens(), GENES)
TRAIN = Train(steps=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=3, help="plain steps, and steps after each save")
    parser.add_argument("--saves", type=int, default=3, help="at least two")
    parser.add_argument("--cells", type=int, default=4, help=f"cells of a step, of {LENGTH} genes each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch on a CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model = build(SPEC).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.02) if parameter.ndim > 1 else model.initialize(
                name, parameter, torch.Generator(device)
            )
    optimizer = build_optimizer(model, TRAIN)
    step = stepper(model, optimizer, arguments.cells, device)
    seconds(step, device)  # the first allocates
    plain = [seconds(step, device) for _ in range(arguments.steps)]
    stalls, after, writing = [], [], []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        checkpoints = Checkpoints(TrainFolder(Path(folder)), keep=1)
        for number in range(arguments.saves):
            state = {"progress": {"step": number + 1, "best_step": None}}
            stalls.append(seconds(lambda: checkpoints.save(model, optimizer, number + 1, state), device))  # noqa: B023
            began = time.perf_counter()
            after.append([seconds(step, device) for _ in range(arguments.steps)])
            checkpoints.wait()
            writing.append(time.perf_counter() - began)
    tensors = tensors_of(model, optimizer)
    fresh = [seconds(lambda: BlockingAsyncStager().stage(tensors), device) for _ in range(3)]
    copies = [seconds(lambda: checkpoints._staging.stage(tensors), device) for _ in range(3)]
    usual, parameters = statistics.median(plain), sum(p.numel() for p in model.parameters())
    print(f"machine: {machine(device)}, load {os.getloadavg()[0]:.1f}; commit {commit()}, torch {torch.__version__}")
    print(f"{parameters / 1e6:.0f}M parameters, {arguments.cells} cells of {LENGTH} genes a step\n")
    print("| | seconds | of a step |\n|---|---:|---:|")
    rows = {
        "plain step, median": usual,
        "first save: what the next step waits": stalls[0],
        "later saves, median": statistics.median(stalls[1:]),
        "the copy of weights and optimizer state alone": statistics.median(copies),
        "the same into fresh memory each time": statistics.median(fresh),
        "first step while it is written": statistics.median(steps[0] for steps in after),
        "steps after a save, median": statistics.median(one for steps in after for one in steps),
        "until it is written, steps included": statistics.median(writing),
    }
    for name, value in rows.items():
        print(f"| {name} | {value:.3f} | {value / usual:.1%} |")
    dist.destroy_process_group()


def stepper(model: Model, optimizer: torch.optim.Optimizer, cells: int, device: torch.device) -> Callable[[], None]:
    """A whole step over the same cells each time."""
    parallel = Parallel(strategy="ddp", precision="bf16-mixed")
    mesh = build_mesh(parallel, 1, device.type)
    parallel_model = ParallelModel(model, parallel, mesh)
    random = np.random.default_rng(0)
    genes = np.concatenate([random.choice(GENES, LENGTH, replace=False) + 2 for _ in range(cells)]).astype(np.int32)
    values = random.gamma(2.0, 0.5, len(genes)).astype(np.float32)
    ends = (np.arange(cells + 1) * LENGTH).astype(np.int32)
    prepared = model.prepare(to_tensors(Batch(genes, values, ends, np.arange(cells))), seed=0, step=0)
    prepared = on_device(prepared, device)

    def step() -> None:
        parallel_model.forward_backward([prepared], prepared.n_targets)
        clip_grad_norm(model, TRAIN.clip_norm, mesh.pp)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """By the clock: what a step waits for is not only work."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
