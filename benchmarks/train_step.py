"""Cells and tokens a second of one training step: packed, as cellmill trains, against two padded encoders.

The shape: 4 cells a batch with 500 to 4,096 genes each (log-normal, mean
about 1,940, as in real cells), 20,000 genes, masked_gene at 15 %, fused AdamW. Every model takes the same cells in
turn, step by step. On a CPU the ratios are of CPU-seconds, which hold on a machine that is shared where seconds do
not; give it --threads 1 there, since waiting threads spin. The peers are
`torch.nn.TransformerEncoder` and, where transformers is installed, `BertForMaskedLM`; both pad to the longest cell
and compute logits at every position, which is how they are commonly used.

    python benchmarks/train_step.py [--steps 5] [--threads 1] [--device cpu]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from cellmill.config.run import Tokens
from cellmill.data.tokens import Batch
from cellmill.models.batch import TensorBatch, to_tensors
from cellmill.models.masked.config import MaskedConfig
from cellmill.models.masked.model import MaskedModel
from cellmill.models.masked.objective import MASK_TOKEN

try:
    from transformers import BertConfig, BertForMaskedLM
except ImportError:
    BertForMaskedLM = None

HIDDEN, LAYERS, HEADS, GENES, CELLS, MASK_FRAC = 256, 4, 4, 20_000, 4, 0.15
SHORTEST, LONGEST, MEAN = 500, 4096, 1940
VOCABULARY = GENES + 2
PACKED = "packed (cellmill)"
NOT_ASKED = -100  # ignored by cross_entropy
TOKENS = Tokens(tokenizer="continuous", max_tokens=LONGEST)
CONFIG = MaskedConfig(
    objective="masked_gene", mask_frac=MASK_FRAC, cell_loss_weight=0, hidden=HIDDEN, layers=LAYERS, heads=HEADS
)

Loss = Callable[[TensorBatch, int], torch.Tensor]


class PaddedEncoder(nn.Module):
    """The same encoder of torch's own parts: (cells, longest) tokens, logits at every one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.genes = nn.Embedding(VOCABULARY, HIDDEN)
        self.values = nn.Sequential(nn.Linear(1, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))
        layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(HIDDEN), enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.LayerNorm(HIDDEN))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, genes: torch.Tensor, values: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """(cells, longest, VOCABULARY) logits."""
        x = self.genes(genes) + self.values(values[..., None])
        x = self.head(self.encoder(x, src_key_padding_mask=~inside))
        return F.linear(x, self.genes.weight, self.bias)


def packed(device: torch.device) -> tuple[nn.Module, Loss]:
    """cellmill's own model, with the loss that the peers have."""
    return _packed(CONFIG, device)


def packed_with_cell_loss(device: torch.device) -> tuple[nn.Module, Loss]:
    """The same with the second loss it has by default, and its second set of logits."""
    return _packed(CONFIG.model_copy(update={"cell_loss_weight": 1.0}), device)


def _packed(config: MaskedConfig, device: torch.device) -> tuple[nn.Module, Loss]:
    model = MaskedModel(config, GENES, TOKENS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.reset_parameter(name, parameter, torch.Generator().manual_seed(0))

    def loss(batch: TensorBatch, step: int) -> torch.Tensor:
        prepared = model.prepare(batch, seed=0, step=step)
        return model(prepared) / prepared.n_targets

    return model.to(device), loss


def padded(device: torch.device) -> tuple[nn.Module, Loss]:
    """torch.nn.TransformerEncoder."""
    model = PaddedEncoder().to(device)

    def loss(batch: TensorBatch, step: int) -> torch.Tensor:
        genes, values, inside, answers = pad(batch, step)
        logits = model(genes, values, inside)
        return F.cross_entropy(logits.flatten(0, 1).float(), answers.flatten(), ignore_index=NOT_ASKED)

    return model, loss


def bert(device: torch.device) -> tuple[nn.Module, Loss]:
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

    def loss(batch: TensorBatch, step: int) -> torch.Tensor:
        genes, _, inside, answers = pad(batch, step)
        return model(input_ids=genes, attention_mask=inside.long(), labels=answers).loss

    return model, loss


def pad(batch: TensorBatch, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Masked genes, values, which tokens are of a cell, and answers; (cells, longest) each."""
    generator = torch.Generator().manual_seed(step)
    masked = (torch.rand(len(batch.genes), generator=generator) < MASK_FRAC).to(batch.genes.device)
    packed_tensors = (
        batch.genes.masked_fill(masked, MASK_TOKEN),
        batch.values,
        torch.ones_like(masked),
        batch.genes.masked_fill(~masked, NOT_ASKED),
    )
    fills = (0, 0.0, False, NOT_ASKED)
    genes, values, inside, answers = (
        pad_sequence(x.split(batch.lengths), batch_first=True, padding_value=fill)
        for x, fill in zip(packed_tensors, fills)
    )
    return genes, values, inside, answers


def draw_batches(steps: int, device: torch.device, seed: int = 0) -> Iterator[TensorBatch]:
    """Random cells; their lengths are what matters."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        # sigma 0.45 and this median give mean 1,940 after clipping
        lengths = np.clip(random.lognormal(np.log(MEAN * 0.91), 0.45, CELLS), SHORTEST, LONGEST).astype(np.int64)
        genes = np.concatenate([random.choice(GENES, n, replace=False) + 2 for n in lengths]).astype(np.int32)
        values = random.gamma(2.0, 0.5, len(genes)).astype(np.float32)
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        yield to_tensors(Batch(genes, values, cu_seqlens, np.arange(CELLS)), device)


def timed(
    loss: Loss, optimizer: torch.optim.Optimizer, batch: TensorBatch, step: int, context: AbstractContextManager[None]
) -> tuple[float, float]:
    """Seconds of forward, backward and optimizer step, and seconds of work: all threads' on a CPU."""
    synchronize(batch.genes.device)
    began, cpu_began = time.perf_counter(), time.process_time()
    with context:
        value = loss(batch, step)
    value.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    synchronize(batch.genes.device)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return wall, cpu if batch.genes.device.type == "cpu" else wall


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    device: torch.device, steps: int
) -> tuple[dict[tuple[str, str], list[tuple[float, float]]], list[int], list[int]]:
    """Seconds of each step by (model, precision); tokens of each step; tokens with padding."""
    makers = {
        PACKED: packed,
        "packed, with the cell loss": packed_with_cell_loss,
        "nn.TransformerEncoder, padded": padded,
    }
    if BertForMaskedLM is not None:
        makers["BertForMaskedLM sdpa, padded"] = bert
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    runs = {}
    for name, make in makers.items():
        model, loss = make(device)
        model.train()
        runs[name] = loss, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, with_padding = [], []
    for step, batch in enumerate(draw_batches(steps + 1, device)):
        print(f"step {step} of {steps}", file=sys.stderr, flush=True)
        for name, (loss, optimizer) in runs.items():
            for precision in ("fp32", "bf16"):
                autocast = torch.autocast(device.type, torch.bfloat16)
                context = autocast if precision == "bf16" else nullcontext()
                took = timed(loss, optimizer, batch, step, context)
                if step:  # the first allocates and warms up
                    seconds.setdefault((name, precision), []).append(took)
        if step:
            tokens.append(sum(batch.lengths))
            with_padding.append(CELLS * max(batch.lengths))
    return seconds, tokens, with_padding


def table(seconds: dict[tuple[str, str], list[tuple[float, float]]], tokens: list[int]) -> str:
    """One line for each model and precision: medians over steps, and how many times the work of packed it is."""
    lines = [
        "| model | precision | seconds of work a step | cells per second of work | tokens per second of work "
        "| cells/s by the clock | times the work of packed |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for (name, precision), took in seconds.items():
        wall, work = zip(*took)
        ratio = statistics.median(there / here for there, (_, here) in zip(work, seconds[PACKED, precision]))
        lines.append(
            f"| {name} | {precision} | {statistics.median(work):.2f} "
            f"| {statistics.median(CELLS / t for t in work):.2f} "
            f"| {statistics.median(n / t for n, t in zip(tokens, work)):,.0f} "
            f"| {statistics.median(CELLS / t for t in wall):.2f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def machine(device: torch.device) -> str:
    """What ran it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    flags = info.read_text()
    bf16 = "AMX" if "amx_bf16" in flags else "AVX512_BF16" if "avx512_bf16" in flags else "no bf16 instructions"
    return f"{models[0] if models else platform.machine()} ({bf16}), {torch.get_num_threads()} threads"


def commit() -> str:
    """The commit of this checkout, or a word that says there is none."""
    here = Path(__file__).resolve().parent
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each model (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="of torch on a CPU (default: torch's own choice)")
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
    seconds, tokens, with_padding = measure(device, arguments.steps)
    print(
        f"shape: H {HIDDEN}, {LAYERS} layers, {HEADS} heads, {GENES:,} genes, {CELLS} cells a step, "
        f"{statistics.mean(tokens) / CELLS:,.0f} genes a cell on average ({SHORTEST:,}-{LONGEST:,}), "
        f"{MASK_FRAC:.0%} masked; padding adds {sum(with_padding) / sum(tokens) - 1:.0%} tokens\n"
    )
    print(table(seconds, tokens))


if __name__ == "__main__":
    main()
