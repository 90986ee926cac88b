"""The causal transformer, and cells drawn from it.

A token's embedding has its gene, its value and the logarithm of its rank, so the model knows how
far a cell has come. Values are not centred within the cell as in the encoder, since the cell's mean
depends on later values; and a generated cell needs its depth, which says how many genes are still
to come.

Cells are drawn gene by gene. All cells that are generated together have the same length at any
time; a cell that ends leaves the batch. Draws are keyed by seed, cell and position (Gumbel-max, Maddison
et al. 2014), and everything is computed in float64: float32 would round differently in other
batches, and a cell would depend on its neighbours.

Legend: T tokens of the batch, C cells, N genes of each cell so far, V size of the vocabulary, H
hidden, h heads, d width of a head.
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
        # the rank embedding has positions already
        has_values = tokens.value_kind in ("scalar", "class")
        self.value_embedding = value_embedding(tokens, hidden) if has_values else None
        self.rank_embedding = nn.Embedding(tokens.max_tokens.bit_length(), hidden)
        self.blocks = pre_norm_blocks(config, causal=True)
        self.norm = nn.LayerNorm(hidden)
        self.attach_heads(self.vocab_size)

    def begin(self, prepared: EncoderBatch) -> Tensor:
        return self.enter(self.inputs(prepared.token_ids, prepared.values, prepared.position))

    def inputs(self, token_ids: Tensor, values: Tensor, position: Tensor) -> Tensor:
        """Return the embedded tokens, (T, H), from id, value and position, (T,) each."""
        # floor(log2(position + 1)), exact below 2**24; cells of padding may be longer than any other
        buckets = torch.frexp((position + 1).float()).exponent.long() - 1
        ranks = self.rank_embedding(buckets.clamp(max=self.rank_embedding.num_embeddings - 1))
        x = embed_tokens(token_ids, self.gene_embedding.weight) + ranks
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
    """Divisor of the logits of genes and bins; with 0 the likeliest gene, bin or end is taken."""
    top_k: int | None = None  # number of likeliest genes to draw from; None for all
    seed: int = 0
    prompt: tuple[int, ...] = ()  # vocabulary rows of the first genes of every cell


@dataclass(frozen=True)
class GeneratedCell:
    """A drawn cell."""

    genes: list[int]  # vocabulary rows in rank order
    values: list[float] | None
    """Predicted continuous values, or drawn bins, by gene; None if the model predicts no values."""
    ended: bool  # False if the cell was cut at `max_genes`


class Cache:
    """Keys and values of the tokens of C cells, (C, h, N, d) each, block by block."""

    def __init__(self, model: AutoregressiveModel) -> None:
        self.model = model
        self.n_tokens = 0
        self.blocks: list[tuple[Tensor, Tensor]] = []

    def append(self, token_ids: Tensor, values: Tensor) -> Tensor:
        """(C,) token ids and (C,) values of the next tokens -> (C, H): their states."""
        x = self.model.inputs(token_ids, values, torch.full_like(token_ids, self.n_tokens))
        extended = []
        for index, block in enumerate(cast(list[Block], self.model.blocks)):
            query, key, value = (part[:, :, None] for part in block.before(x))
            if self.n_tokens:
                earlier_keys, earlier_values = self.blocks[index]
                key = torch.cat([earlier_keys, key], dim=2)
                value = torch.cat([earlier_values, value], dim=2)
            attended = F.scaled_dot_product_attention(query, key, value).flatten(1)
            x = block.after(x, attended, None)
            extended.append((key, value))
        self.n_tokens += 1
        self.blocks = extended
        return self.model.norm(x)

    def keep(self, cells: Tensor) -> None:
        self.blocks = [(keys[cells], values[cells]) for keys, values in self.blocks]


@torch.inference_mode()
def generate_cells(
    model: AutoregressiveModel, sampling: Sampling, cells: range
) -> list[GeneratedCell]:
    """Return the cells with these numbers, drawn together. `model` becomes float64."""
    model = model.double().eval()
    objective = cast(NextGene, model.objective)
    done: dict[int, GeneratedCell] = {}
    numbers = torch.tensor(cells, dtype=torch.int64, device=model.start.device)
    token_ids = numbers.new_empty(len(cells), 0)
    values = torch.empty(len(cells), 0, device=numbers.device)
    cache = Cache(model)
    states = model.start.expand(len(cells), -1)
    max_genes = min(sampling.max_genes, len(model.gene_bias) - len(SPECIAL))
    while len(numbers):
        position = token_ids.shape[1]
        ends = draw_ends(model, states, numbers, sampling, position)
        leaves = torch.ones_like(ends) if position == max_genes else ends
        for row in leaves.nonzero().flatten().tolist():
            cell_genes = (token_ids[row] - len(SPECIAL)).tolist()
            cell_values = values[row].tolist() if objective.predicts_values else None
            done[int(numbers[row])] = GeneratedCell(cell_genes, cell_values, bool(ends[row]))
        stays = ~leaves
        numbers = numbers[stays]
        token_ids = token_ids[stays]
        values = values[stays]
        states = states[stays]
        cache.keep(stays)
        if not len(numbers):
            break
        next_ids = draw_genes(model, states, token_ids, numbers, sampling)
        next_values = draw_values(model, states, next_ids, numbers, sampling, position)
        token_ids = torch.cat([token_ids, next_ids[:, None]], 1)
        values = torch.cat([values, next_values[:, None].float()], 1)
        states = cache.append(next_ids, next_values)
    return [done[number] for number in cells]


def draw_ends(
    model: Any, states: Tensor, cells: Tensor, sampling: Sampling, position: int
) -> Tensor:
    """Return the cells that end before `position`, (C,) bool.

    No cell ends within the prompt, or without any gene.
    """
    chance: Tensor = model.objective.end_logits(model, states).sigmoid()
    if position < max(1, len(sampling.prompt)):
        return torch.zeros_like(chance, dtype=torch.bool)
    if sampling.temperature == 0:
        return chance > 0.5
    return _uniform(keyed_bits(cells, sampling.seed, END, position)) < chance


def draw_genes(
    model: Any, states: Tensor, earlier_ids: Tensor, cells: Tensor, sampling: Sampling
) -> Tensor:
    """Return the token ids of the next genes, (C,), of cells with states (C, H).

    `earlier_ids` (C, N) are the tokens that the cells have, which are not drawn again.
    """
    position = earlier_ids.shape[1]
    if position < len(sampling.prompt):
        return torch.full_like(cells, sampling.prompt[position] + len(SPECIAL))
    logits: Tensor = model.objective.gene_logits(model, states)
    logits[:, : len(SPECIAL)] = -torch.inf
    logits = logits.scatter(1, earlier_ids, -torch.inf)
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        least = logits.topk(sampling.top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return _draw(logits, cells, sampling, GENE, position)


def draw_values(
    model: Any,
    states: Tensor,
    token_ids: Tensor,
    cells: Tensor,
    sampling: Sampling,
    position: int,
) -> Tensor:
    """Return the values of the next genes, (C,): predicted values, or drawn bins (int64)."""
    if not model.objective.predicts_values:
        return torch.zeros_like(token_ids)
    predicted: Tensor = model.objective.predict_values(model, states, token_ids)
    if predicted.ndim == 1:
        return predicted
    return _draw(predicted, cells, sampling, VALUE, position) + 1


def _draw(logits: Tensor, cells: Tensor, sampling: Sampling, kind: int, position: int) -> Tensor:
    """(C, n) -> (C,) int64: a column of each row, by Gumbel-max."""
    if sampling.temperature == 0:
        return logits.argmax(1)
    columns = torch.arange(logits.shape[1], device=logits.device)
    uniform = _uniform(keyed_bits(cells[:, None], sampling.seed, kind, position, columns))
    gumbel = -(-uniform.log()).log()
    return (logits.double() / sampling.temperature + gumbel).argmax(1)


def _uniform(bits: Tensor) -> Tensor:
    """Return 63 random bits as float64 between 0 and 1, both excluded."""
    return ((bits >> 11).double() + 0.5) * 2.0**-52
