"""Training on 1, 2 and 4 processes of this machine beside what the plan says, and the plan for 8 to
1,024.

Each process takes as many cells whatever their number (weak scaling). The plan is given what one
process computes in a second and what two send each other; from these alone come its figures for 2
and 4 processes, and for nodes of four such processes up to 1,024. A second table is of H100 nodes
of 8, which nobody measured here.

    python benchmarks/scaling.py [--steps 5] [--cells 4] [--strategy FULL_SHARD]
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor
from train_step import GENES, commit, machine

from cellmill.config.options import PlanOptions
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import to_tensors
from cellmill.models.build import ModelSpec, build
from cellmill.parallel.apply import apply_fsdp
from cellmill.parallel.mesh import build_mesh
from cellmill.parallel.step import ParallelModel, clip_grad_norm
from cellmill.planner.cost import RunCost, estimate_cost
from cellmill.planner.devices import Device, find_device
from cellmill.planner.hardware import Hardware
from cellmill.planner.measure.load import Load
from cellmill.planner.measure.size import measure_size
from cellmill.planner.step_counts import CorpusSize
from cellmill.planner.step_time import NETWORK_FRAC
from cellmill.train.optimizer import build_optimizer

LENGTH = 1024  # tokens of each cell: work that differs would hide what is measured
WORLDS = (1, 2, 4)
PLANNED = (8, 16, 32, 64, 128, 256, 512, 1024)
SMALL = {"hidden": 256, "layers": 4, "heads": 4}
FEW = 2  # cells a step and GPU: with many, computing hides what is sent
LARGE = {"hidden": 1024, "layers": 22, "heads": 16}  # 300 million parameters
SENT = 16 << 20  # float32 numbers of an all-reduce


def options(
    strategy: str, model: dict[str, Any], cells: int, world: int, length: int
) -> PlanOptions:
    """A run of `world` processes that take `cells` of `length` tokens each in a step."""
    return PlanOptions.model_validate(
        {
            "tokens": {"max_tokens": length},
            "stream": {"lanes": world},
            "model": {"family": "encoder", **model},
            "objective": {"name": "masked_gene"},
            "parallel": {"sharding_strategy": strategy},
            "plan": {},
            "train": {"steps": 1, "global_batch": cells * world, "token_budget": cells * length},
        }
    )


def work(rank: int, world: int, folder: str, arguments: argparse.Namespace) -> None:
    """One process: seconds of its steps, and of an all-reduce, go to a file of its own."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{world}", rank=rank, world_size=world
    )
    chosen = options(arguments.strategy, SMALL, arguments.cells, world, LENGTH)
    mesh = build_mesh(chosen.parallel, world, "cpu")
    model = build(ModelSpec.of(chosen, GENES))
    apply_fsdp(model, model.plan.blocks, chosen.parallel, mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).normal_(
                0.0, 0.02
            )
    parallel_model = ParallelModel(model, chosen.parallel, mesh)
    optimizer = build_optimizer(model, chosen.train)
    random = np.random.default_rng(rank)
    genes = np.concatenate(
        [random.permutation(GENES)[:LENGTH] + 2 for _ in range(arguments.cells)]
    ).astype(np.int32)
    ends = (np.arange(arguments.cells + 1) * LENGTH).astype(np.int32)
    batch = Batch(
        genes,
        random.gamma(2.0, 0.5, len(genes)).astype(np.float32),
        ends,
        np.arange(arguments.cells),
    )
    prepared = model.prepare(to_tensors(batch), seed=0, step=0)
    took = []
    for _ in range(arguments.steps + 1):
        dist.barrier()
        began = time.perf_counter()
        parallel_model.forward_backward([prepared], mesh.sum(prepared.n_targets.clone()))
        clip_grad_norm(model, 1.0, mesh.pp)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        took.append(time.perf_counter() - began)
    sent = torch.zeros(SENT)
    dist.all_reduce(sent)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(3):
        dist.all_reduce(sent)
    all_reduce = (time.perf_counter() - began) / 3
    # the first allocates
    Path(folder, f"{world}-{rank}.txt").write_text(f"{statistics.median(took[1:])} {all_reduce}")
    dist.destroy_process_group()
    # a thread of autograd that wants the GIL during Python's shutdown aborts the process
    os._exit(0)


def measure(arguments: argparse.Namespace) -> tuple[dict[int, float], float]:
    """Seconds of a step by number of processes; GB/s that one of two sends while both do."""
    steps = {}
    sent_gbs = 0.0
    with TemporaryDirectory() as folder:
        for world in WORLDS:
            mp.spawn(work, (world, folder, arguments), nprocs=world)
            found = [
                Path(folder, f"{world}-{rank}.txt").read_text().split() for rank in range(world)
            ]
            steps[world] = max(float(step) for step, _ in found)
            if world == 2:
                sent_gbs = 4 * SENT / 1e9 / max(float(all_reduce) for _, all_reduce in found)
    return steps, sent_gbs


def planned(
    chosen: PlanOptions, world: int, nproc: int, length: int, device: Device, name: str
) -> RunCost:
    """The plan's cost of `world` processes, `nproc` of them on each node."""
    cells = CorpusSize(np.full(4 * chosen.train.global_batch, length), GENES)
    hardware = Hardware(-(-world // nproc), min(world, nproc), name, 1 << 60, 1 << 60)
    return estimate_cost(chosen, cells, hardware, device)


def here(arguments: argparse.Namespace) -> None:
    """Prints the table of this machine."""
    steps, sent_gbs = measure(arguments)
    cores = len(os.sched_getaffinity(0))
    cells = arguments.cells
    size = measure_size(ModelSpec.of(options(arguments.strategy, SMALL, cells, 1, LENGTH), GENES))
    flops = cells * size.flops.count(Load(LENGTH, LENGTH**2, 1))
    print(
        f"one process computes {flops / steps[1] / 1e9:.0f} GFLOP/s; one of two sends {sent_gbs:.2f} GB/s; "
        f"{size.parameters / 1e6:.1f}M parameters, {cells} cells of {LENGTH} genes a step and process, "
        f"{arguments.strategy}, float32\n"
    )
    print(
        "| processes | measured cells/s | of a core's share | planned cells/s | of a core's share |"
    )
    print("|---:|---:|---:|---:|---:|")
    for world in (*WORLDS, *PLANNED):
        # more processes than cores take turns
        share = min(1.0, cores / world) if world in WORLDS else 1.0
        device = Device(
            None, None, flops / steps[1] * share, sent_gbs / NETWORK_FRAC, sent_gbs / NETWORK_FRAC
        )
        chosen = options(arguments.strategy, SMALL, cells, world, LENGTH)
        chosen = chosen.model_copy(
            update={"plan": chosen.plan.model_copy(update={"mfu_frac": 1.0})}
        )
        found = planned(chosen, world, 4, LENGTH, device, "cpu")
        assert found.time is not None
        alone = cells * world * share / steps[1]
        print(f"| {world:,} ", end="")
        for step_s in (steps.get(world), found.time.step.step_s):
            speed = None if step_s is None else cells * world / step_s
            print("| | " if speed is None else f"| {speed:,.1f} | {speed / alone:.0%} ", end="")
        print("|")


def there() -> None:
    """Prints the plan's table of H100."""
    print(
        f"\nplanned: 300M parameters, 2,048 genes, bf16, {FEW} cells a step and GPU, nodes of 8 H100\n"
    )
    print(
        "| GPUs | HYBRID_SHARD cells/s | of linear | FULL_SHARD cells/s | of linear | ddp cells/s | of linear |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|")
    h100 = find_device("h100")
    alone: dict[str, float] = {}
    for world in PLANNED:
        print(f"| {world:,} ", end="")
        for strategy in ("HYBRID_SHARD", "FULL_SHARD", "ddp"):
            chosen = options(
                "HYBRID_SHARD" if strategy == "ddp" else strategy, LARGE, FEW, world, 2048
            )
            changed = {"precision": "bf16-mixed"} | (
                {"strategy": "ddp"} if strategy == "ddp" else {}
            )
            chosen = chosen.model_copy(
                update={"parallel": chosen.parallel.model_copy(update=changed)}
            )
            found = planned(chosen, world, 8, 2048, h100, "h100")
            assert found.time is not None
            speed = FEW * world / found.time.step.step_s
            first = alone.setdefault(strategy, FEW / found.time.step.compute_s)
            print(f"| {speed:,.0f} | {speed / world / first:.0%} ", end="")
        print("|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cells", type=int, default=4, help="of each process in a step")
    parser.add_argument("--strategy", default="FULL_SHARD", help="sharding_strategy")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"machine: {machine(torch.device('cpu'))} each, {len(os.sched_getaffinity(0))} cores, load "
          f"{os.getloadavg()[0]:.1f}; commit {commit()}, torch {torch.__version__}")  # fmt: skip
    here(arguments)
    there()


if __name__ == "__main__":
    main()
