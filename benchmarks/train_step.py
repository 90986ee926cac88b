"""Cells a second of one training step: cellmill's own, against encoders of plain PyTorch, packed
and padded.

The shape: 4 cells a step with 500 to 4,096 genes each (log-normal, mean about 1,940, as in real
cells), 20,000 genes, masked_gene at 15 %. A step is all of it: masks, forward and backward,
clipping at norm 1, fused AdamW. Every model has the same cells, the same masks and the same
learning rate step by step, and its loss after all of them is printed. On a CPU the ratios are of
CPU-seconds, which hold on a machine that is shared where seconds do not; give it --threads 1 there,
since waiting threads spin. The peers are scaled_dot_product_attention cell by cell, without
padding; `torch.nn.TransformerEncoder`; and, where transformers is installed, `BertForMaskedLM`. The
last two pad to the longest cell and compute logits at every position, which is how they are
commonly used.

After the first step, which is not counted, it prints how many minutes the rest will take, and
measures fewer steps if these were more than `--minutes`; it ends when they are over.

    python benchmarks/train_step.py [--steps 5] [--threads 1] [--device cpu] [--longest 4096]
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from cellmill.config.parallel import Parallel
from cellmill.config.parts.families import EncoderConfig
from cellmill.config.parts.objectives import MaskedGeneConfig
from cellmill.config.parts.tokens import ContinuousTokens
from cellmill.config.run import Train
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import copy_to_device, to_tensors
from cellmill.models.build import ModelSpec, build
from cellmill.parallel.mesh import build_mesh
from cellmill.parallel.step import ParallelModel, clip_grad_norm
from cellmill.train.optimizer import build_optimizer

try:
    from transformers import BertConfig, BertForMaskedLM
except ImportError:
    BertForMaskedLM = None

HIDDEN = 256
LAYERS = 4
HEADS = 4
GENES = 20_000
CELLS = 4
MASK_FRAC = 0.15
SHORTEST = 500
LONGEST = 4096
MEAN = 1940
VOCABULARY = GENES + 2
PACKED = "cellmill"
NOT_ASKED = -100  # ignored by cross_entropy
TOKENS = ContinuousTokens(max_tokens=LONGEST)
SPEC = ModelSpec(
    EncoderConfig(hidden=HIDDEN, layers=LAYERS, heads=HEADS),
    MaskedGeneConfig(mask_frac=MASK_FRAC, cell_loss_weight=0),
    TOKENS,
    GENES,
)
OBJECTIVE = SPEC.objective.load()(SPEC.objective, TOKENS)
TRAIN = Train(steps=1, lr=1e-4)

Work = Callable[[Batch, int], float]
"""A whole step over a batch; its mean loss."""


class PaddedEncoder(nn.Module):
    """The same encoder of torch's own parts: (cells, longest) tokens, logits at every one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.genes = nn.Embedding(VOCABULARY, HIDDEN)
        # as the others; it is the matrix of the logits too
        nn.init.normal_(self.genes.weight, std=0.02)
        self.values = nn.Sequential(nn.Linear(1, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))
        layer = nn.TransformerEncoderLayer(
            HIDDEN,
            HEADS,
            4 * HIDDEN,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, LAYERS, nn.LayerNorm(HIDDEN), enable_nested_tensor=False
        )
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.LayerNorm(HIDDEN))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(
        self, genes: torch.Tensor, values: torch.Tensor, inside: torch.Tensor
    ) -> torch.Tensor:
        """(cells, longest, VOCABULARY) logits."""
        x = self.genes(genes) + self.values(values[..., None])
        x = self.head(self.encoder(x, src_key_padding_mask=~inside))
        return F.linear(x, self.genes.weight, self.bias)


class PackedEncoder(PaddedEncoder):
    """The same without padding: attention cell by cell, logits of the masked tokens alone."""

    def forward(
        self, genes: torch.Tensor, values: torch.Tensor, lengths: list[int], at: torch.Tensor
    ) -> torch.Tensor:
        """(targets, VOCABULARY) logits."""
        x = self.genes(genes) + self.values(values[:, None])
        for layer in self.encoder.layers:
            own = layer.self_attn
            qkv = F.linear(layer.norm1(x), own.in_proj_weight, own.in_proj_bias).view(
                len(x), 3, HEADS, -1
            )
            cells = (cell.permute(1, 2, 0, 3)[:, None] for cell in qkv.split(lengths))
            seen = [
                F.scaled_dot_product_attention(*cell)[0].transpose(0, 1).flatten(1)
                for cell in cells
            ]
            x = x + own.out_proj(torch.cat(seen))
            x = x + layer.linear2(F.gelu(layer.linear1(layer.norm2(x))))
        return F.linear(self.head(self.encoder.norm(x)[at]), self.genes.weight, self.bias)


def packed(device: torch.device, precision: str) -> Work:
    """cellmill's own model and step, with the loss that the peers have."""
    return packed_step(SPEC, device, precision)


def packed_with_cell_loss(device: torch.device, precision: str) -> Work:
    """The same with the second loss it has by default, and its second set of logits."""
    return packed_step(
        replace(SPEC, objective=MaskedGeneConfig(mask_frac=MASK_FRAC)), device, precision
    )


def packed_step(spec: ModelSpec, device: torch.device, precision: str) -> Work:
    """A step of the model of `spec`, with the view that its objective draws."""
    model = build(spec).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.fills[name](parameter, torch.Generator().manual_seed(0))
    parallel = Parallel(
        strategy="ddp", precision="bf16-mixed" if precision == "bf16" else "32-true"
    )
    mesh = build_mesh(parallel, 1, device.type)
    parallel_model = ParallelModel(model.to(device), parallel, mesh)
    optimizer = build_optimizer(model, TRAIN)

    def work(batch: Batch, step: int) -> float:
        view = model.view(batch, seed=0, step=step)
        prepared = copy_to_device(model.prepare(view, seed=0, step=step), device)
        loss = parallel_model.forward_backward([prepared], prepared.n_targets)
        clip_grad_norm(model, TRAIN.clip_norm, mesh.pp)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return work


def padded(device: torch.device, precision: str) -> Work:
    """torch.nn.TransformerEncoder."""
    model = PaddedEncoder().to(device)

    def loss(batch: Batch, step: int) -> torch.Tensor:
        genes, values, inside, answers = pad(batch, step, device)
        logits = model(genes, values, inside)
        return F.cross_entropy(
            logits.flatten(0, 1).float(), answers.flatten(), ignore_index=NOT_ASKED
        )

    return _plain(model, loss, device, precision)


def packed_sdpa(device: torch.device, precision: str) -> Work:
    """torch's scaled_dot_product_attention over packed cells, as it is written by hand."""
    model = PackedEncoder().to(device)

    def loss(batch: Batch, step: int) -> torch.Tensor:
        masked = OBJECTIVE.prepare(batch, seed=0, step=step)
        genes, values, at = (
            x.to(device) for x in (masked.token_ids, batch.values, masked.target_tokens)
        )
        return F.cross_entropy(
            model(genes, values, batch.lengths, at).float(), batch.token_ids.to(device)[at]
        )

    return _plain(model, loss, device, precision)


def bert(device: torch.device, precision: str) -> Work:
    """Hugging Face's BERT, which reads genes alone."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=LONGEST,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    model = BertForMaskedLM(config).to(device)

    def loss(batch: Batch, step: int) -> torch.Tensor:
        genes, _, inside, answers = pad(batch, step, device)
        return model(input_ids=genes, attention_mask=inside.long(), labels=answers).loss

    return _plain(model, loss, device, precision)


def _plain(
    model: nn.Module,
    loss: Callable[[Batch, int], torch.Tensor],
    device: torch.device,
    precision: str,
) -> Work:
    """A step as it is written for any PyTorch model."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=TRAIN.lr, betas=(TRAIN.beta1, TRAIN.beta2), fused=True
    )
    model.train()

    def work(batch: Batch, step: int) -> float:
        with torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext():
            value = loss(batch, step)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.item()

    return work


def pad(
    batch: Batch, step: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Masked genes, values, which tokens are of a cell, and answers; (cells, longest) each."""
    prepared = OBJECTIVE.prepare(batch, seed=0, step=step)
    masked = torch.zeros(len(batch.token_ids), dtype=torch.bool).index_fill(
        0, prepared.target_tokens, True
    )
    packed_tensors = (
        prepared.token_ids,
        batch.values,
        torch.ones_like(masked),
        batch.token_ids.masked_fill(~masked, NOT_ASKED),
    )
    fills = (0, 0.0, False, NOT_ASKED)
    genes, values, inside, answers = (
        pad_sequence(x.split(batch.lengths), batch_first=True, padding_value=fill)
        for x, fill in zip(packed_tensors, fills)
    )
    return genes.to(device), values.to(device), inside.to(device), answers.to(device)


def draw_batches(steps: int, longest: int = LONGEST, seed: int = 0) -> Iterator[Batch]:
    """Random cells; their lengths are what matters, and all are in proportion to the longest."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        # sigma 0.45 and this median give mean 1,940 after clipping
        lengths = np.clip(random.lognormal(np.log(MEAN * 0.91), 0.45, CELLS), SHORTEST, LONGEST)
        lengths = (lengths * longest / LONGEST).astype(np.int64)
        genes = np.concatenate(
            [random.choice(GENES, n, replace=False) + 2 for n in lengths]
        ).astype(np.int32)
        values = random.gamma(2.0, 0.5, len(genes)).astype(np.float32)
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        yield to_tensors(Batch(genes, values, cu_seqlens, np.arange(CELLS)))


@dataclass
class Took:
    """One step."""

    wall_s: float
    work_s: float
    """Of all threads on a CPU."""
    loss: float


def timed(work: Work, batch: Batch, step: int, device: torch.device) -> Took:
    """A step by the clock."""
    synchronize(device)
    began = time.perf_counter()
    cpu_began = time.process_time()
    loss = work(batch, step)
    synchronize(device)
    wall = time.perf_counter() - began
    cpu = time.process_time() - cpu_began
    return Took(wall, cpu if device.type == "cpu" else wall, loss)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    device: torch.device, steps: int, longest: int, minutes: float
) -> tuple[dict[tuple[str, str], list[Took]], list[int], list[int], dict[str, str]]:
    """Each step by (model, precision); tokens of each step; tokens with padding; where a step's
    time goes. Ends after `minutes`, but at least one step of each model is measured.
    """
    began = time.perf_counter()
    makers = {
        PACKED: packed,
        "cellmill, with the cell loss": packed_with_cell_loss,
        "SDPA, packed": packed_sdpa,
        "nn.TransformerEncoder, padded": padded,
    }
    if BertForMaskedLM is not None:
        makers["BertForMaskedLM sdpa, padded"] = bert
    runs = {
        (name, low): make(device, low) for low in ("fp32", "bf16") for name, make in makers.items()
    }
    took: dict[tuple[str, str], list[Took]] = {}
    tokens = []
    with_padding = []
    ends_s = began + 60 * minutes
    longest_s = 0.0  # of a step of all models
    for step, batch in enumerate(draw_batches(steps + 1, longest)):
        # the profiles at the end take about as long as a step
        if step > 1 and time.perf_counter() + 2 * longest_s > ends_s:
            print(f"{minutes:g} minutes are nearly over: {step - 1} steps", file=sys.stderr)
            break
        step_began = time.perf_counter()
        for key, work in runs.items():
            found = timed(work, batch, step, device)
            if step:  # the first allocates and warms up
                took.setdefault(key, []).append(found)
        longest_s = max(longest_s, time.perf_counter() - step_began)
        if step == 0:
            about = min((steps + 1) * longest_s / 60, minutes)
            print(f"about {about:.1f} more minutes", file=sys.stderr, flush=True)
        else:
            tokens.append(sum(batch.lengths))
            with_padding.append(CELLS * max(batch.lengths))
    profiles = {
        low: profile(runs[PACKED, low], batch, steps + 1, device) for low in ("fp32", "bf16")
    }
    return took, tokens, with_padding, profiles


def profile(work: Work, batch: Batch, step: int, device: torch.device) -> str:
    """The operations that take most of a step of their own, as a table."""
    with torch.profiler.profile() as seen:
        work(batch, step)
    of = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    averages = seen.key_averages()
    total = sum(getattr(event, of) for event in averages)
    averages = sorted(averages, key=lambda event: -getattr(event, of))[:10]
    lines = ["| operation | calls | share of the step |", "|---|---:|---:|"]
    lines += [
        f"| {event.key} | {event.count} | {getattr(event, of) / total:.0%} |" for event in averages
    ]
    return "\n".join(lines)


def table(all_took: dict[tuple[str, str], list[Took]], tokens: list[int]) -> str:
    """One line for each model and precision: medians over steps, and how many times the work of
    packed it is.
    """
    lines = [
        "| model | precision | seconds of work a step | cells per second of work | tokens per second of work "
        "| cells/s by the clock | loss at the end | times the work of cellmill |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (name, precision), took in all_took.items():
        work = [one.work_s for one in took]
        ours = [one.work_s for one in all_took[PACKED, precision]]
        ratio = statistics.median(there / here for there, here in zip(work, ours))
        lines.append(
            f"| {name} | {precision} | {statistics.median(work):.2f} "
            f"| {statistics.median(CELLS / t for t in work):.2f} "
            f"| {statistics.median(n / t for n, t in zip(tokens, work)):,.0f} "
            f"| {statistics.median(CELLS / one.wall_s for one in took):.2f} "
            f"| {took[-1].loss:.3f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def machine(device: torch.device) -> str:
    """What ran it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    models = [
        line.split(":")[1].strip()
        for line in info.read_text().splitlines()
        if line.startswith("model name")
    ]
    flags = info.read_text()
    bf16 = (
        "AMX"
        if "amx_bf16" in flags
        else "AVX512_BF16"
        if "avx512_bf16" in flags
        else "no bf16 instructions"
    )
    return (
        f"{models[0] if models else platform.machine()} ({bf16}), {torch.get_num_threads()} threads"
    )


def commit() -> str:
    """The commit of this checkout, or a word that says there is none."""
    here = Path(__file__).resolve().parent
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--steps", type=int, default=5, help="measured steps of each model (default: %(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10,
        help="wall time after which no step is begun (default: %(default)s)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--threads", type=int, help="of torch on a CPU (default: torch's own choice)"
    )
    parser.add_argument(
        "--longest",
        type=int,
        default=LONGEST,
        help="genes of the longest cell (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    print(f"machine: {machine(device)}, load {os.getloadavg()[0]:.1f}")
    print(f"commit: {commit()}, torch {torch.__version__}, python {platform.python_version()}")
    print(f"command: python {' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}")
    if BertForMaskedLM is None:
        print("BertForMaskedLM was not run: transformers is not installed")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    took, tokens, with_padding, profiles = measure(
        device, arguments.steps, arguments.longest, arguments.minutes
    )
    print(
        f"shape: H {HIDDEN}, {LAYERS} layers, {HEADS} heads, {GENES:,} genes, {CELLS} cells a step, "
        f"{statistics.mean(tokens) / CELLS:,.0f} genes a cell on average (at most {arguments.longest:,}), "
        f"{MASK_FRAC:.0%} masked; padding adds {sum(with_padding) / sum(tokens) - 1:.0%} tokens\n"
    )
    print(table(took, tokens))
    for precision, lines in profiles.items():
        print(f"\nWhere a step of cellmill goes, {precision}:\n\n{lines}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
