"""The causal transformer, and cells drawn from it.

A token's embedding has its gene, its value and the logarithm of its rank, so the model knows how
many genes a cell has so far. Values are not centred within the cell as in the encoder, since the
cell's mean depends on later values. A generated cell also needs its depth, which says how many genes
will follow.

Cells are drawn gene by gene. All cells that are generated together have the same length at any
time; a cell that ends leaves the batch. Draws are keyed by seed, cell and position (Gumbel-max, Maddison
et al. 2014). Everything is computed in float64: float32 would round differently in other batches, so
that a cell would depend on the cells drawn with it.

Legend: T tokens of the batch, C cells, N genes of each cell so far, V size of the vocabulary, H width
of the model, h heads, d width of a head.
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
from cellmill.models.families.encoder import make_pre_norm_blocks, make_value_embedding
from cellmill.models.objective import Objective
from cellmill.models.objectives.next_gene import NextGene
from cellmill.parallel.vocab_parallel import embed_tokens

# keys of the draws, after cell and seed
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
        # values of kind place are positions, which the rank embedding has already
        has_values = tokens.value_kind in ("scalar", "class")
        self.value_embedding = make_value_embedding(tokens, hidden) if has_values else None
        self.rank_embedding = nn.Embedding(tokens.max_tokens.bit_length(), hidden)
        self.blocks = make_pre_norm_blocks(config, causal=True)
        self.norm = nn.LayerNorm(hidden)
        self.attach_heads(self.vocab_size)

    def begin(self, prepared: EncoderBatch) -> Tensor:
        return self.enter(self.inputs(prepared.token_ids, prepared.values, prepared.position))

    def inputs(self, token_ids: Tensor, values: Tensor, position: Tensor) -> Tensor:
        """Embed tokens, (T, H), from their ids, values and positions, (T,) each."""
        # floor(log2(position + 1)), exact below 2**24
        buckets = torch.frexp((position + 1).float()).exponent.long() - 1
        # a cell of padding may have more tokens than max_tokens
        ranks = self.rank_embedding(buckets.clamp(max=self.rank_embedding.num_embeddings - 1))
        x = embed_tokens(token_ids, self.gene_embedding.weight) + ranks
        if self.value_embedding is None:
            return x
        if values.is_floating_point():
            values = values[:, None].to(next(self.value_embedding.parameters()).dtype)
        return x + self.value_embedding(values)

    def cell_vectors(self, states: Tensor, prepared: EncoderBatch) -> Tensor:
        """Take each cell's mean or last state, (T, H) -> (C, H) float32; zeros for a cell without tokens."""
        if self.pooling == "mean":
            return mean_state(states, prepared)
        lengths = prepared.cu_seqlens.diff()
        last_tokens = prepared.cu_seqlens[1:].long() - 1
        if not len(states):
            return torch.zeros(len(lengths), self.width, device=lengths.device)
        return states.float()[last_tokens.clamp(min=0)] * (lengths > 0)[:, None]


@dataclass(frozen=True)
class Sampling:
    """How cells are drawn."""

    max_genes: int  # maximum number of genes of a cell, at most `tokens.max_tokens` of the model
    temperature: float = 1.0
    """Divisor of the logits of genes and bins. 0 takes the most probable gene and bin, and ends a cell
    whose end is more probable than not.
    """
    top_k: int | None = None  # number of most probable genes to draw from; None for all
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
    """Keys and values of attention for the tokens so far of C cells, block by block."""

    def __init__(self, model: AutoregressiveModel) -> None:
        self.model = model
        self.n_tokens = 0
        self.by_block: list[tuple[Tensor, Tensor]] = []
        """Keys and values of each block, (C, h, N, d) each."""

    def append(self, token_ids: Tensor, values: Tensor) -> Tensor:
        """Add a token to each cell, from `token_ids` and `values` (C,), and return its state, (C, H)."""
        x = self.model.inputs(token_ids, values, torch.full_like(token_ids, self.n_tokens))
        extended = []
        for index, block in enumerate(cast(list[Block], self.model.blocks)):
            query, key, value = (part[:, :, None] for part in block.before(x))
            if self.n_tokens:
                earlier_keys, earlier_values = self.by_block[index]
                key = torch.cat([earlier_keys, key], dim=2)
                value = torch.cat([earlier_values, value], dim=2)
            attended = F.scaled_dot_product_attention(query, key, value).flatten(1)
            x = block.after(x, attended, None)
            extended.append((key, value))
        self.n_tokens += 1
        self.by_block = extended
        return self.model.norm(x)

    def select_cells(self, is_kept: Tensor) -> None:
        """Keep only the cells in `is_kept`, (C,) bool."""
        self.by_block = [(keys[is_kept], values[is_kept]) for keys, values in self.by_block]


@torch.inference_mode()
def generate_cells(
    model: AutoregressiveModel, sampling: Sampling, cells: range
) -> list[GeneratedCell]:
    """Draw the cells with the numbers in `cells`. `model` becomes float64, in eval mode."""
    model = model.double().eval()
    objective = cast(NextGene, model.objective)
    finished: dict[int, GeneratedCell] = {}  # by number
    # of the cells that are not finished, (C,) or (C, N); their states are those before the next gene
    numbers = torch.tensor(cells, dtype=torch.int64, device=model.start.device)
    token_ids = numbers.new_empty(len(cells), 0)
    values = torch.empty(len(cells), 0, device=numbers.device)
    cache = Cache(model)
    states = model.start.expand(len(cells), -1)
    max_genes = min(sampling.max_genes, len(model.gene_bias) - len(SPECIAL))
    while len(numbers):
        position = token_ids.shape[1]
        ends = draw_ends(model, states, numbers, sampling, position)
        is_finished = torch.ones_like(ends) if position == max_genes else ends
        for row in is_finished.nonzero().flatten().tolist():
            cell_genes = (token_ids[row] - len(SPECIAL)).tolist()
            cell_values = values[row].tolist() if objective.has_value_head else None
            finished[int(numbers[row])] = GeneratedCell(cell_genes, cell_values, bool(ends[row]))
        goes_on = ~is_finished
        numbers = numbers[goes_on]
        token_ids = token_ids[goes_on]
        values = values[goes_on]
        states = states[goes_on]
        cache.select_cells(goes_on)
        if not len(numbers):
            break
        next_ids = draw_genes(model, states, token_ids, numbers, sampling)
        next_values = draw_values(model, states, next_ids, numbers, sampling, position)
        token_ids = torch.cat([token_ids, next_ids[:, None]], 1)
        values = torch.cat([values, next_values[:, None].float()], 1)
        states = cache.append(next_ids, next_values)
    return [finished[number] for number in cells]


def draw_ends(
    model: Any, states: Tensor, cells: Tensor, sampling: Sampling, position: int
) -> Tensor:
    """Draw which cells end before `position`, (C,) bool, from their states (C, H).

    `cells` (C,) are the cells' numbers. No cell ends within the prompt, or without any gene.
    """
    probability: Tensor = model.objective.predict_end_logits(model, states).sigmoid()
    if position < max(1, len(sampling.prompt)):
        return torch.zeros_like(probability, dtype=torch.bool)
    if sampling.temperature == 0:
        return probability > 0.5
    return _uniform(keyed_bits(cells, sampling.seed, END, position)) < probability


def draw_genes(
    model: Any, states: Tensor, earlier_ids: Tensor, cells: Tensor, sampling: Sampling
) -> Tensor:
    """Draw the token id of each cell's next gene, (C,), from the states (C, H).

    `earlier_ids` (C, N) are the tokens that the cells have, which are not drawn again. `cells` (C,) are
    the cells' numbers.
    """
    position = earlier_ids.shape[1]
    if position < len(sampling.prompt):
        return torch.full_like(cells, sampling.prompt[position] + len(SPECIAL))
    logits: Tensor = model.objective.predict_gene_logits(model, states)
    logits[:, : len(SPECIAL)] = -torch.inf
    logits = logits.scatter(1, earlier_ids, -torch.inf)
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        lowest_kept = logits.topk(sampling.top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest_kept, -torch.inf)
    return _draw(logits, cells, sampling, GENE, position)


def draw_values(
    model: Any,
    states: Tensor,
    token_ids: Tensor,
    cells: Tensor,
    sampling: Sampling,
    position: int,
) -> Tensor:
    """Return the values of the next genes, (C,): predicted values, or drawn bins (int64).

    `token_ids` (C,) are the next genes, `cells` (C,) the cells' numbers.
    """
    if not model.objective.has_value_head:
        return torch.zeros_like(token_ids)
    predicted: Tensor = model.objective.predict_values(model, states, token_ids)
    if predicted.ndim == 1:
        return predicted
    return _draw(predicted, cells, sampling, VALUE, position) + 1  # bins count from 1


def _draw(logits: Tensor, cells: Tensor, sampling: Sampling, key: int, position: int) -> Tensor:
    """Draw a column of each row of `logits` (C, n) by Gumbel-max, (C,) int64."""
    if sampling.temperature == 0:
        return logits.argmax(1)
    columns = torch.arange(logits.shape[1], device=logits.device)
    uniform = _uniform(keyed_bits(cells[:, None], sampling.seed, key, position, columns))
    gumbel = -(-uniform.log()).log()
    return (logits.double() / sampling.temperature + gumbel).argmax(1)


def _uniform(bits: Tensor) -> Tensor:
    """Return 63 random bits as float64 between 0 and 1, both excluded."""
    return ((bits >> 11).double() + 0.5) * 2.0**-52
