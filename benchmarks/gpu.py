"""One GPU, under 8 minutes: is attention right, how fast is a training step, and was the plan's
memory true?

First each attention kernel against the softmax written out in float32, values and gradients. Then
whole training steps (masks, forward, backward, clipping, fused AdamW) in bf16-mixed for four sizes:
with every cell of full length, and with cells whose lengths vary, packed and padded to the longest.
MFU counts the FLOPs that the model needs (logits at masked tokens alone), never those of padding;
`plan` is what `cellmill plan` would have said. Last the time for which a training waits for its
cells, read from shards by the stream (if anndata is installed), and for a checkpoint.

    python benchmarks/gpu.py [--toy] [--sizes 51M 106M] [--steps 10]

`--toy` runs all of it in seconds on any machine, a CPU too, at sizes that say nothing about speed.
"""

import argparse
import gc
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from train_step import commit, synchronize

from cellmill.config.parallel import Layout, Parallel
from cellmill.config.parts.families import EncoderConfig
from cellmill.config.parts.objectives import MaskedGeneConfig
from cellmill.config.parts.tokens import ContinuousTokens
from cellmill.config.run import Stream, Train
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.cell_stream import CellStream, SplitSource
from cellmill.data.stream.micro_batches import MicroBatchRule
from cellmill.data.stream.order import OrderOptions
from cellmill.models.batch import copy_to_device, to_tensors
from cellmill.models.blocks import attention
from cellmill.models.build import ModelSpec, build
from cellmill.parallel import apply as compile_module
from cellmill.parallel.apply import compile_blocks
from cellmill.parallel.mesh import build_mesh
from cellmill.parallel.step import ParallelModel, clip_grad_norm
from cellmill.planner.devices import find_peak_flops_per_s
from cellmill.planner.measure.load import Load
from cellmill.planner.measure.size import measure_size
from cellmill.planner.memory import estimate_model_memory
from cellmill.planner.planned_model import PlannedModel
from cellmill.runs.folder import TrainFolder
from cellmill.train.checkpoint import Checkpoints
from cellmill.train.optimizer import build_optimizer

try:
    from loader_corpus import make_corpus
except ImportError:  # a wheelhouse of SET=gpu has no anndata
    make_corpus = None  # type: ignore[assignment]

N_GENES = 25_000
WARM_UP = 3
PARALLEL = Parallel(strategy="ddp", precision="bf16-mixed")


@dataclass(frozen=True)
class Size:
    """A model and the cells it is measured on."""

    name: str
    hidden: int
    layers: int
    heads: int
    genes: int
    """Tokens of a full cell."""
    cells: int
    """Of a micro-batch of full cells."""


SIZES = (
    Size("51M", 512, 12, 8, 1024, 64),
    Size("106M", 768, 12, 12, 2048, 32),
    Size("300M", 1024, 22, 16, 4096, 12),
    Size("1B", 1792, 25, 14, 4096, 8),
)
TOY = (Size("toy", 32, 2, 2, 48, 4),)
TOY_GENES = 300
TOY_STEPS = 2


@dataclass(frozen=True)
class Measured:
    """Of one size, kind of cells and way of running it."""

    size: Size
    parameters: int
    kind: str
    compiled: bool
    tokens: int
    """Of cells, without padding."""
    cells: int
    seconds: list[float]
    flops: float
    """That the cells of a step need."""
    peak_bytes: int | None
    plan_bytes: int


def check_attention(device: torch.device) -> Iterator[str]:
    """Largest differences from the oracle, in float32, of values and gradients."""
    lengths = [1, 7, 512, 300, 300, 33] if device.type == "cuda" else [1, 7, 64, 30, 30]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(sum(lengths), 4, 64, generator=generator) for _ in range(4)]
    oracle = _attended(made, torch.float32, device, lambda q, k, v: written_out(q, k, v, lengths))
    dtypes = (
        (torch.bfloat16, torch.float16, torch.float32)
        if device.type == "cuda"
        else (torch.float32,)
    )
    yield "| attention | number format | values | gradients |\n|---|---|---:|---:|"
    for dtype in dtypes:
        found = _attended(
            made, dtype, device, lambda q, k, v: attention(q, k, v, cu_seqlens, lengths)
        )
        off = [float((ours - theirs).abs().max()) for ours, theirs in zip(found, oracle)]
        kernel = (
            "varlen" if device.type == "cuda" and dtype != torch.float32 else "cell by cell, SDPA"
        )
        # scores are products of 64 numbers of size 1; bfloat16 has 8 bits
        allowed = 5e-2 if dtype == torch.bfloat16 else 1e-2 if dtype == torch.float16 else 1e-4
        if not max(off) < allowed:
            sys.exit(
                f"attention by {kernel} in {dtype} is off by {max(off):.2g}, more than {allowed:g}"
            )
        yield f"| {kernel} | {str(dtype).removeprefix('torch.')} | {off[0]:.1e} | {max(off[1:]):.1e} |"


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """(T, h, d): softmax attention of one cell after another."""
    rows = []
    for q_cell, k_cell, v_cell in zip(*(x.split(lengths) for x in (q, k, v))):
        scores = torch.einsum("ihd,jhd->hij", q_cell, k_cell) / q.shape[-1] ** 0.5
        rows.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v_cell))
    return torch.cat(rows)


def _attended(made, dtype, device, function) -> list[torch.Tensor]:
    q, k, v = (x.to(device, dtype).requires_grad_() for x in made[:3])
    out = function(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), made[3].to(device, dtype))
    return [x.detach().float() for x in (out, *gradients)]


def draw(lengths: np.ndarray, step: int) -> Batch:
    """Cells of random genes and values; their lengths are what matters."""
    random = np.random.default_rng(step)
    genes = np.concatenate([random.permutation(N_GENES)[:n] + 2 for n in lengths]).astype(np.int32)
    values = random.gamma(2.0, 0.5, len(genes)).astype(np.float32)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return to_tensors(Batch(genes, values, cu_seqlens, np.arange(len(lengths))))


def lengths_of(size: Size, kind: str, step: int) -> np.ndarray:
    """Tokens of each cell of a step: full ones, or such as vary as in real data, around half of the
    longest.
    """
    if kind == "full":
        return np.full(size.cells, size.genes)
    random = np.random.default_rng(1000 + step)
    drawn = random.lognormal(np.log(0.45 * size.genes), 0.45, size.cells)
    return np.clip(drawn, size.genes // 8, size.genes).astype(np.int64)


class Training:
    """A model with random weights and what its steps need, in bf16-mixed on one device."""

    def __init__(
        self, size: Size, n_genes: int, device: torch.device, compiled: bool = False
    ) -> None:
        self.tokens = ContinuousTokens(max_tokens=size.genes)
        self.device = device
        config = EncoderConfig(hidden=size.hidden, layers=size.layers, heads=size.heads)
        self.spec = ModelSpec(config, MaskedGeneConfig(cell_loss_weight=0), self.tokens, n_genes)
        self.model = build(self.spec).to_empty(device=device)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0.0, 0.02)
        if compiled:
            compile_blocks(self.model, self.model.plan.blocks, self.model.plan.compiled)
        self.mesh = build_mesh(PARALLEL, 1, device.type)
        self.parallel = ParallelModel(self.model, PARALLEL, self.mesh)
        self.optimizer = build_optimizer(self.model, Train(steps=1))

    def prepared(self, batch: Batch, step: int) -> Any:
        return copy_to_device(self.model.prepare(batch, seed=0, step=step), self.device)

    def step(self, prepared: Any) -> None:
        """One optimizer step, to its end."""
        self.parallel.forward_backward([prepared], prepared.n_targets)
        clip_grad_norm(self.model, 1.0, self.mesh.pp)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        synchronize(self.device)


def measure(size: Size, kind: str, compiled: bool, steps: int, device: torch.device) -> Measured:
    """Training steps of one size. `kind`: full; packed or padded, of cells that vary."""
    training = Training(size, N_GENES, device, compiled)
    needs = measure_size(training.spec)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    real_tokens = 0
    cells = 0
    flops = 0.0
    most = Load(0, 0, 0)
    for step in range(WARM_UP + steps):
        lengths = lengths_of(size, kind, step)
        longest = np.full(len(lengths), lengths.max()) if kind == "padded" else lengths
        prepared = training.prepared(draw(longest, step), step)
        synchronize(device)
        began = time.perf_counter()
        training.step(prepared)
        if step >= WARM_UP:
            seconds.append(time.perf_counter() - began)
            real_tokens = real_tokens + int(lengths.sum())
            cells = cells + len(lengths)
            pairs = float(np.square(lengths.astype(np.float64)).sum())
            flops += needs.flops.count(Load(float(lengths.sum()), pairs, len(lengths)))
            most = max(most, Load(float(longest.sum()), pairs, len(lengths)))
    measured = Measured(
        size,
        needs.parameters,
        kind,
        compiled,
        real_tokens // steps,
        cells // steps,
        seconds,
        flops / steps,
        torch.cuda.max_memory_allocated(device) if cuda else None,
        estimate_model_memory(
            PlannedModel(needs, PARALLEL, Layout(1, 1), nproc_per_node=1), most, 1
        ).total,
    )
    del training, prepared
    gc.collect()
    torch._dynamo.reset()
    if cuda:
        torch.cuda.empty_cache()
    return measured


def feed(size: Size, steps: int, device: torch.device, folder: Path) -> str:
    """A row: the step on batches that are there, and on those that the stream reads from shards and
    tokenizes.
    """
    corpus = make_corpus(folder, size.cells * (WARM_UP + steps))
    manifest = Manifest.read(corpus.manifest)
    training = Training(size, manifest.n_genes, device)
    stream = CellStream(
        SplitSource(corpus.manifest, "train"),
        OrderOptions(Stream(lanes=1), size.cells, seed=0),
        training.tokens,
        MicroBatchRule(size.cells * size.genes),
    )
    batches = iter(stream)
    ready = []
    fed = []
    waited = []
    for step in range(WARM_UP + steps):
        began = time.perf_counter()
        prepared = [training.prepared(to_tensors(batch), step) for batch in next(batches)]
        synchronize(device)
        waited.append(time.perf_counter() - began)
        training.step(prepared[0])
        fed.append(time.perf_counter() - began)
        began = time.perf_counter()
        training.step(prepared[0])
        ready.append(time.perf_counter() - began)
    stream.close()
    of_ready, of_fed, of_wait = (
        statistics.median(values[WARM_UP:]) for values in (ready, fed, waited)
    )
    return f"| {size.name} | {of_ready:.3f} | {of_fed:.3f} | {of_wait / of_fed:.1%} |"


def checkpoint(size: Size, device: torch.device, folder: Path) -> str:
    """A row: how long a training waits for a save, the first one and later ones, whose memory is
    reused.
    """
    tokens = ContinuousTokens(max_tokens=size.genes)
    config = EncoderConfig(hidden=size.hidden, layers=size.layers, heads=size.heads)
    spec = ModelSpec(config, MaskedGeneConfig(cell_loss_weight=0), tokens, N_GENES)
    model = build(spec).to_empty(device=device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(model, Train(steps=1))
    optimizer.step()
    checkpoints = Checkpoints(TrainFolder(folder / "train"), keep=1)
    stalls = []
    began = 0.0
    for step in (1, 2):
        synchronize(device)
        began = time.perf_counter()
        checkpoints.save(model, optimizer, step, {"step": step})
        stalls.append(time.perf_counter() - began)
        checkpoints.wait()
    written = time.perf_counter() - began
    n_bytes = 12 * sum(parameter.numel() for parameter in model.parameters())
    return (
        f"| {size.name} | {n_bytes / 1e9:.2f} | {stalls[0]:.2f} | {stalls[1]:.2f} | {written:.2f} |"
    )


def line(found: Measured, peak: float | None) -> str:
    """A row of the table: by the median step."""
    took = statistics.median(found.seconds)
    mfu = f"{found.flops / took / peak:.1%}" if peak else "-"
    memory = f"{found.peak_bytes / 1e9:.1f}" if found.peak_bytes is not None else "-"
    return (
        f"| {found.size.name} ({found.parameters / 1e6:.0f}M), {found.size.genes:,} genes | {found.kind} "
        f"| {'yes' if found.compiled else 'no'} | {found.tokens:,} | {found.tokens / took:,.0f} "
        f"| {found.cells / took:,.0f} | {mfu} | {memory} | {found.plan_bytes / 1e9:.1f} |"
    )


def machine(device: torch.device) -> str:
    """What ran it."""
    if device.type != "cuda":
        return f"{platform.machine()} CPU, load {os.getloadavg()[0]:.1f}"
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    return f"{torch.cuda.get_device_name(device)}, driver {driver}, CUDA {torch.version.cuda}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument(
        "--sizes", nargs="+", choices=[size.name for size in SIZES], help="only these"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="measured steps of each (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if not arguments.toy and not torch.cuda.is_available():
        sys.exit("no GPU here; --toy tries the script on a CPU")
    if arguments.toy:  # the compiler of C++ code takes most of a minute
        globals().update(N_GENES=TOY_GENES, WARM_UP=1)
        compile_module.BACKEND = "eager"
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        print(f"machine: {machine(device)}")
        print(f"commit: {commit()}, torch {torch.__version__}, python {platform.python_version()}")
        print(
            f"command: python benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}\n",
            flush=True,
        )
        for text in check_attention(device):
            print(text, flush=True)
        peak = (
            find_peak_flops_per_s(torch.cuda.get_device_name(device), PARALLEL)
            if device.type == "cuda"
            else None
        )
        print(
            "\n| model | cells | compiled | tokens a step | tokens/s | cells/s | MFU | peak GB | plan GB |"
        )
        print("|---|---|---|---:|---:|---:|---:|---:|---:|", flush=True)
        chosen, steps = (
            (TOY, min(TOY_STEPS, arguments.steps)) if arguments.toy else (SIZES, arguments.steps)
        )
        for size in [
            size for size in chosen if not arguments.sizes or size.name in arguments.sizes
        ]:
            for kind, compiled in (
                ("full", False),
                ("full", True),
                ("packed", False),
                ("padded", False),
            ):
                print(line(measure(size, kind, compiled, steps, device), peak), flush=True)
        if make_corpus is not None:
            print(
                "\n| fed by the stream | step s | with its cells s | waiting |\n|---|---:|---:|---:|",
                flush=True,
            )
            print(feed(chosen[0], steps, device, Path(folder)), flush=True)
        print(
            "\n| checkpoint | GB | first stall s | later stall s | written after s |\n|---|---:|---:|---:|---:|",
            flush=True,
        )
        print(checkpoint(chosen[0], device, Path(folder)), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
