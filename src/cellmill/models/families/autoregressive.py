"""The causal transformer, and cells drawn from it.

A token's embedding has its gene, its value and the logarithm of its rank, so the model knows how
far a cell has come. Values are not centred within the cell as in the encoder, since the cell's mean
depends on later values; and a generated cell needs its depth, which says how many genes are still
to come.

Cells are drawn gene by gene. All cells that are generated together have the same length at any time; a cell that ends
leaves them. Draws are keyed by seed, cell and position (Gumbel-max, Maddison et al. 2014), and all is computed in
float64: float32 would round differently for other batches, and a cell would depend on those beside it.

Legend: T tokens of the batch, C cells, N genes of each cell so far, V tokens of the vocabulary, H hidden, h heads, d
width of a head.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.config.parts.families import AutoregressiveConfig
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.models.batch import EncoderBatch
from cellmill.models.blocks import Block
from cellmill.models.cell_encoder import TokenEncoder, mean_state
from cellmill.models.counter_rng import keyed_bits
from cellmill.models.families.encoder import pre_norm_blocks, value_embedding
from cellmill.models.objective import Objective
from cellmill.models.objectives.next_gene import NextGene
from cellmill.parallel.vocab_parallel import embed_tokens

# keys of the draws
GENE = 1
VALUE = 2
END = 3


class AutoregressiveModel(TokenEncoder):
    plan = replace(TokenEncoder.plan, begin=("gene_embedding", "value_embedding", "rank_embedding"))
    start: nn.Parameter  # (H,): the state before the first gene, attached by `next_gene`
    gene_bias: nn.Parameter  # (V,): bias of the logits of genes, attached by `next_gene`

    def __init__(
        self, config: AutoregressiveConfig, n_genes: int, tokens: Tokens, objective: Objective
    ) -> None:
        hidden = config.hidden
        super().__init__(hidden, n_genes, objective)
        self.pooling = config.pooling
        # places are in the rank embedding already
        has_values = tokens.value_kind in ("scalar", "class")
        self.value_embedding = value_embedding(tokens, hidden) if has_values else None
        self.rank_embedding = nn.Embedding(tokens.max_tokens.bit_length(), hidden)
        self.blocks = pre_norm_blocks(config, causal=True)
        self.norm = nn.LayerNorm(hidden)
        self.attach_heads(self.n_tokens)

    def begin(self, prepared: EncoderBatch) -> Tensor:
        return self.enter(self.inputs(prepared.genes, prepared.values, prepared.position))

    def inputs(self, genes: Tensor, values: Tensor, places: Tensor) -> Tensor:
        """(T, H): embedded genes, (T,) token ids, with their values (T,), at places (T,) in their
        cells from 0.
        """
        # floor(log2(place + 1)), exact below 2**24; cells of padding may be longer than any other
        buckets = torch.frexp((places + 1).float()).exponent.long() - 1
        ranks = self.rank_embedding(buckets.clamp(max=self.rank_embedding.num_embeddings - 1))
        x = embed_tokens(genes, self.gene_embedding.weight) + ranks
        if self.value_embedding is None:
            return x
        if values.is_floating_point():
            values = values[:, None].to(next(self.value_embedding.parameters()).dtype)
        return x + self.value_embedding(values)

    def cell_vectors(self, states: Tensor, prepared: EncoderBatch) -> Tensor:
        """(T, H) -> (C, H) float32; zeros for a cell without tokens."""
        if self.pooling == "mean":
            return mean_state(states, prepared)
        lengths = prepared.cu_seqlens.diff()
        ends = prepared.cu_seqlens[1:].long() - 1
        if not len(states):
            return torch.zeros(len(lengths), self.width, device=lengths.device)
        return states.float()[ends.clamp(min=0)] * (lengths > 0)[:, None]


@dataclass(frozen=True)
class Sampling:
    """Draws of cells."""

    max_genes: int  # most genes of a cell, at most `max_tokens` of the model's tokens
    temperature: float = 1.0
    """Divides the logits of genes and bins; 0 takes the likeliest, and ends a cell when that is
    likelier.
    """
    top_k: int | None = None  # genes are drawn from this many likeliest ones; None draws from all
    seed: int = 0
    prompt: tuple[int, ...] = ()  # vocabulary rows of the first genes of every cell


@dataclass(frozen=True)
class GeneratedCell:
    """A cell as drawn."""

    genes: list[int]  # vocabulary rows in rank order
    values: list[float] | None
    """Value of each gene: predicted where continuous, else drawn bins; None if the model predicts
    none.
    """
    ended: bool  # False if the cell was cut at `max_genes`


class Cache:
    """Keys and values of the tokens of C cells, (C, h, N, d) each, block by block."""

    def __init__(self, model: AutoregressiveModel) -> None:
        self.model = model
        self.n_tokens = 0
        self.kept: list[tuple[Tensor, Tensor]] = []

    def append(self, genes: Tensor, values: Tensor) -> Tensor:
        """(C,) token ids and (C,) values of the next tokens -> (C, H): their states."""
        x = self.model.inputs(genes, values, torch.full_like(genes, self.n_tokens))
        kept = []
        for index, block in enumerate(cast(list[Block], self.model.blocks)):
            query, *new = (part[:, :, None] for part in block.before(x))
            if self.n_tokens:
                new = [torch.cat(parts, dim=2) for parts in zip(self.kept[index], new)]
            keys, values = new
            x = block.after(x, F.scaled_dot_product_attention(query, keys, values).flatten(1), None)
            kept.append((keys, values))
        self.n_tokens = self.n_tokens + 1
        self.kept = kept
        return self.model.norm(x)

    def keep(self, cells: Tensor) -> None:
        self.kept = [(keys[cells], values[cells]) for keys, values in self.kept]


@torch.inference_mode()
def generate_cells(
    model: AutoregressiveModel, sampling: Sampling, cells: range
) -> list[GeneratedCell]:
    """Return the cells with these numbers, drawn together. `model` becomes float64."""
    model, objective = model.double().eval(), cast(NextGene, model.objective)
    done: dict[int, GeneratedCell] = {}
    numbers = torch.tensor(cells, dtype=torch.int64, device=model.start.device)
    genes = numbers.new_empty(len(cells), 0)
    values = torch.empty(len(cells), 0, device=numbers.device)
    cache = Cache(model)
    states = model.start.expand(len(cells), -1)
    while len(numbers):
        place = genes.shape[1]
        ends = ends_before(model, states, numbers, sampling, place)
        full = place == min(sampling.max_genes, len(model.gene_bias) - len(SPECIAL))
        leaving = torch.ones_like(ends) if full else ends
        for row in leaving.nonzero().flatten().tolist():
            listed = (genes[row] - len(SPECIAL)).tolist()
            own = values[row].tolist() if objective.predicts_values else None
            done[int(numbers[row])] = GeneratedCell(listed, own, bool(ends[row]))
        staying = ~leaving
        numbers, genes, values, states = (
            part[staying] for part in (numbers, genes, values, states)
        )
        cache.keep(staying)
        if not len(numbers):
            break
        gene = next_genes(model, states, genes, numbers, sampling)
        value = next_values(model, states, gene, numbers, sampling, place)
        genes = torch.cat([genes, gene[:, None]], 1)
        values = torch.cat([values, value[:, None].float()], 1)
        states = cache.append(gene, value)
    return [done[number] for number in cells]


def ends_before(
    model: Any, states: Tensor, cells: Tensor, sampling: Sampling, place: int
) -> Tensor:
    """(C,) bool: whether each cell ends before `place`; not within the prompt, nor without any
    gene.
    """
    chance: Tensor = model.objective.end_logits(model, states).sigmoid()
    if place < max(1, len(sampling.prompt)):
        return torch.zeros_like(chance, dtype=torch.bool)
    if sampling.temperature == 0:
        return chance > 0.5
    return _uniform(keyed_bits(cells, sampling.seed, END, place)) < chance


def next_genes(
    model: Any, states: Tensor, genes: Tensor, cells: Tensor, sampling: Sampling
) -> Tensor:
    """(C,) token ids of the next genes of cells with states (C, H) that have `genes` (C, N): never
    one of these.
    """
    place = genes.shape[1]
    if place < len(sampling.prompt):
        return torch.full_like(cells, sampling.prompt[place] + len(SPECIAL))
    logits: Tensor = model.objective.gene_logits(model, states)
    logits[:, : len(SPECIAL)] = -torch.inf
    logits = logits.scatter(1, genes, -torch.inf)
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        least = logits.topk(sampling.top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return _drawn(logits, cells, sampling, GENE, place)


def next_values(
    model: Any,
    states: Tensor,
    genes: Tensor,
    cells: Tensor,
    sampling: Sampling,
    place: int,
) -> Tensor:
    """(C,) values of the next `genes` (C,), as tokens have them: predicted values, or drawn bins
    (int64).
    """
    if not model.objective.predicts_values:
        return torch.zeros_like(genes)
    predicted: Tensor = model.objective.values(model, states, genes)
    return (
        predicted if predicted.ndim == 1 else _drawn(predicted, cells, sampling, VALUE, place) + 1
    )


def _drawn(logits: Tensor, cells: Tensor, sampling: Sampling, kind: int, place: int) -> Tensor:
    if sampling.temperature == 0:
        return logits.argmax(1)
    columns = torch.arange(logits.shape[1], device=logits.device)
    uniform = _uniform(keyed_bits(cells[:, None], sampling.seed, kind, place, columns))
    return (logits.double() / sampling.temperature - (-uniform.log()).log()).argmax(1)


def _uniform(bits: Tensor) -> Tensor:
    """63 random bits as float64 between 0 and 1, both excluded."""
    return ((bits >> 11).double() + 0.5) * 2.0**-52
