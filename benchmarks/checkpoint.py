"""Checkpoints of a large model: what a step waits for them, bytes per second until one is valid,
and resuming.

`stall`: plain steps first; then a save between two steps, timed by itself, and the steps during
which it is written behind. The part that nothing hides is the copy of weights and optimizer state,
timed once more alone. One process.

`write`: 1, 2 and 4 processes, FULL_SHARD, without steps. A checkpoint is valid when its folder has
its final name; by then it is copied, written, synced and hashed. Beside it each process writes as
many bytes into one file, and syncs it. Resume is the check of all hashes and the load, with files
that are no longer in the page cache.

`index`: one process, the index of a checkpoint that 128 ranks have saved and DCP's own, read for
one rank's part.

    python benchmarks/checkpoint.py stall [--steps 3] [--saves 3] [--cells 4] [--threads 1] [--device cpu]
    python benchmarks/checkpoint.py write [--saves 3] [--layers 12] [--folder .]
    python benchmarks/checkpoint.py index [--saves 3] [--folder .]
"""

import argparse
import json
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor
from train_step import GENES, commit, machine, synchronize

from cellmill.config.parallel import Parallel
from cellmill.config.parts.families import EncoderConfig
from cellmill.config.parts.objectives import MaskedGeneConfig
from cellmill.config.parts.tokens import ContinuousTokens
from cellmill.config.run import Train
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import copy_to_device, to_tensors
from cellmill.models.build import ModelSpec, build
from cellmill.models.family import Model
from cellmill.parallel.apply import parallelize
from cellmill.parallel.mesh import build_mesh
from cellmill.parallel.step import ParallelModel, clip_grad_norm
from cellmill.runs.folder import TrainFolder
from cellmill.train.checkpoint import (
    INDEX,
    CheckpointReader,
    Checkpoints,
    list_tensors,
    write_index,
)
from cellmill.train.optimizer import build_optimizer

LENGTH = 512
TRAIN = Train(steps=1)


WORLDS = (1, 2, 4)
# of part index
TENSORS = 900
RANKS = 128


def spec(layers: int, hidden: int) -> ModelSpec:
    """The model: 103 million parameters with 12 layers of width 768, 18 million of them before and
    after the layers.
    """
    encoder = EncoderConfig(hidden=hidden, layers=layers, heads=12)
    return ModelSpec(encoder, MaskedGeneConfig(), ContinuousTokens(), GENES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("part", choices=("stall", "write", "index"))
    parser.add_argument(
        "--steps", type=int, default=3, help="plain steps, and steps after each save"
    )
    parser.add_argument("--saves", type=int, default=3, help="at least two")
    parser.add_argument(
        "--cells", type=int, default=4, help=f"cells of a step, of {LENGTH} genes each"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of part stall"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch on a CPU")
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    parser.add_argument(
        "--hidden", type=int, default=768, help="width of the model, a multiple of 96"
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="on the file system to measure")
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.resolve()
    {"stall": stall, "write": write, "index": index}[arguments.part](arguments)


def stall(arguments: argparse.Namespace) -> None:
    """Print the table of steps around saves."""
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model = build(spec(arguments.layers, arguments.hidden)).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.02) if parameter.ndim > 1 else model.fills[name](
                parameter, torch.Generator(device)
            )
    optimizer = build_optimizer(model, TRAIN)
    step = stepper(model, optimizer, arguments.cells, device)
    seconds(step, device)  # the first allocates
    plain = [seconds(step, device) for _ in range(arguments.steps)]
    stalls = []
    after = []
    writing = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        checkpoints = Checkpoints(TrainFolder(Path(folder)), keep=1)
        for number in range(arguments.saves):
            state = {"progress": {"step": number + 1, "best_step": None}}
            save = partial(checkpoints.save, model, optimizer, number + 1, state)
            stalls.append(seconds(save, device))
            began = time.perf_counter()
            after.append([seconds(step, device) for _ in range(arguments.steps)])
            checkpoints.wait()
            writing.append(time.perf_counter() - began)
    tensors = list_tensors(model, optimizer)
    fresh = [seconds(lambda: BlockingAsyncStager().stage(tensors), device) for _ in range(3)]
    copies = [seconds(lambda: checkpoints._staging.stage(tensors), device) for _ in range(3)]
    usual = statistics.median(plain)
    parameters = sum(p.numel() for p in model.parameters())
    print_machine(device)
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


def stepper(
    model: Model, optimizer: torch.optim.Optimizer, cells: int, device: torch.device
) -> Callable[[], None]:
    """A whole step over the same cells each time."""
    parallel = Parallel(strategy="ddp", precision="bf16-mixed")
    mesh = build_mesh(parallel, 1, device.type)
    parallel_model = ParallelModel(model, parallel, mesh)
    random = np.random.default_rng(0)
    genes = np.concatenate(
        [random.choice(GENES, LENGTH, replace=False) + 2 for _ in range(cells)]
    ).astype(np.int32)
    values = random.gamma(2.0, 0.5, len(genes)).astype(np.float32)
    ends = (np.arange(cells + 1) * LENGTH).astype(np.int32)
    prepared = model.prepare(
        to_tensors(Batch(genes, values, ends, np.arange(cells))), seed=0, step=0
    )
    prepared = copy_to_device(prepared, device)

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


def print_machine(device: torch.device) -> None:
    print(
        f"machine: {machine(device)}, load {os.getloadavg()[0]:.1f}; commit {commit()}, torch {torch.__version__}"
    )


def write(arguments: argparse.Namespace) -> None:
    """Print the table of saves and resumes by number of processes; medians."""
    print_machine(torch.device("cpu"))
    print(
        "\n| processes | GB | plain write, MB/s | until valid, MB/s | of plain | save returns, s | resume, s "
        "| of which hashes, s |\n|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    for world in WORLDS:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            mp.spawn(rank_of_writers, (world, folder, arguments), nprocs=world)
            found = json.loads(Path(folder, "found.json").read_text())
        mb = found["bytes"] / 1e6
        plain = found["plain"]
        valid = found["valid"]
        print(
            f"| {world} | {mb / 1e3:.2f} | {mb / plain:,.0f} | {mb / valid:,.0f} | {plain / valid:.0%} "
            f"| {found['returns']:.2f} | {found['hashes'] + found['load']:.2f} | {found['hashes']:.2f} |",
            flush=True,
        )


def rank_of_writers(rank: int, world: int, folder: str, arguments: argparse.Namespace) -> None:
    """One process; rank 0 writes the medians of all saves to found.json."""
    torch.set_num_threads(arguments.threads)
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    parallel = Parallel(sharding_strategy="FULL_SHARD")
    model = build(spec(arguments.layers, arguments.hidden))
    parallelize(model, parallel, build_mesh(parallel, world, "cpu"))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).normal_(0, 0.02)
    optimizer = build_optimizer(model, TRAIN)
    train_folder = TrainFolder(Path(folder, "train"))
    checkpoints = Checkpoints(train_folder, keep=1)
    took = []
    for number in range(arguments.saves + 1):
        state = {"progress": {"step": number + 1, "best_step": None}}
        dist.barrier()
        began = time.perf_counter()
        checkpoints.save(model, optimizer, number + 1, state)
        returned = time.perf_counter()
        checkpoints.wait()
        dist.barrier()  # rank 0 gives the folder its name
        took.append({"returns": returned - began, "valid": time.perf_counter() - began})
    (saved,) = train_folder.checkpoints()
    files = [file for file in saved.path.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    for one in took:
        one |= {"plain": plain_write(Path(folder, f"plain-{rank}"), size // world)}
        drop_from_cache(files)
        began = time.perf_counter()
        whole, _ = checkpoints.newest_whole()
        hashed = time.perf_counter()
        assert whole is not None
        checkpoints.load(whole, model, optimizer)
        dist.barrier()
        one |= {"hashes": hashed - began, "load": time.perf_counter() - hashed}
    if rank == 0:
        # the first takes memory
        medians = {name: statistics.median(one[name] for one in took[1:]) for name in took[0]}
        Path(folder, "found.json").write_text(json.dumps({"bytes": size, **medians}))
    dist.destroy_process_group()
    # a thread of autograd that wants the GIL during Python's shutdown aborts the process
    os._exit(0)


def plain_write(path: Path, n_bytes: int) -> float:
    """Seconds until all processes have written and synced so many bytes each, into a file of its
    own.
    """
    content = memoryview(np.random.default_rng(0).bytes(n_bytes))
    dist.barrier()
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        written = 0
        while written < n_bytes:
            written += file.write(content[written : written + (64 << 20)]) or 0
        os.fsync(file.fileno())
    dist.barrier()
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def index(arguments: argparse.Namespace) -> None:
    """Print the CPU seconds in which one rank of 128 reads where its part of 900 tensors lies;
    medians.
    """
    metadata = Metadata({}, storage_data={})
    own = torch.empty(8, 1024, device="meta")
    names = [f"optimizer.state.blocks.{n // 9}.part{n % 9}.weight.exp_avg" for n in range(TENSORS)]
    for number, name in enumerate(names):
        parts = [
            ChunkStorageMetadata(torch.Size([8 * rank, 0]), own.shape) for rank in range(RANKS)
        ]
        size = torch.Size([8 * RANKS, 1024])
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties(own.dtype), size, parts
        )
        for rank, part in enumerate(parts):
            place = _StorageInfo(f"__{rank}_0.distcp", number * own.nbytes, own.nbytes)
            metadata.storage_data[MetadataIndex(name, part.offsets, rank)] = place
    print_machine(torch.device("cpu"))
    print("\n| | MB | CPU seconds of a rank |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for file in (Path(folder, ".metadata"), Path(folder, INDEX)):
            if file.name == INDEX:
                write_index(Path(folder), metadata)
            else:
                file.write_bytes(pickle.dumps(metadata))
            took = []
            for _ in range(arguments.saves):
                began = time.process_time()
                if file.name == INDEX:
                    # a whole tensor of this size has the place of the first rank's part
                    read = CheckpointReader(Path(folder), dict.fromkeys(names, own)).read_metadata()
                else:  # as DCP does
                    read = pickle.loads(file.read_bytes())  # noqa: S301
                took.append(time.process_time() - began)
                assert len(read.state_dict_metadata) == TENSORS
            print(
                f"| `{file.name}` | {file.stat().st_size / 1e6:.1f} | {statistics.median(took):.2f} |",
                flush=True,
            )


def drop_from_cache(files: list[Path]) -> None:
    """Have the kernel read the files from the disk again."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


if __name__ == "__main__":
    main()
