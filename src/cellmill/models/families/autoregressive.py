"""The causal transformer: gene, value and rank embeddings, pre-norm blocks, a norm; heads come from the objective.

A token's embedding has its gene, its value and the logarithm of its rank, so the model knows how far a cell has come.
The state of a token is a function of the tokens up to it. Values are therefore not centred within the cell as in the
encoder, since the cell's mean tells of later values; and a cell that is generated needs its depth, which says how many
genes are still to come.

Legend: T tokens of the batch, C cells, V tokens of the vocabulary, H hidden.
"""

from dataclasses import replace

import torch
from torch import nn

from cellmill.config.parts.families import AutoregressiveConfig
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.models.batch import EncoderBatch
from cellmill.models.cell_encoder import TokenEncoder, mean_state
from cellmill.models.families.encoder import pre_norm_blocks, value_embedding
from cellmill.models.objective import Objective
from cellmill.parallel.vocab_parallel import embed_tokens


class AutoregressiveModel(TokenEncoder):
    """See the module."""

    plan = replace(TokenEncoder.plan, begin=("gene_embedding", "value_embedding", "rank_embedding"))
    start: nn.Parameter  # (H,): the state before the first gene, attached by `next_gene`
    gene_bias: nn.Parameter  # (V,): bias of the logits of genes, attached by `next_gene`

    def __init__(self, config: AutoregressiveConfig, n_genes: int, tokens: Tokens, objective: Objective) -> None:
        super().__init__(objective)
        self.width = hidden = config.hidden
        self.pooling = config.pooling
        n_tokens = n_genes + len(SPECIAL)
        self.gene_embedding = nn.Embedding(n_tokens, hidden)
        # places are in the rank embedding already
        has_values = tokens.value_kind in ("scalar", "class")
        self.value_embedding = value_embedding(tokens, hidden) if has_values else None
        self.rank_embedding = nn.Embedding(tokens.max_tokens.bit_length(), hidden)
        self.blocks = pre_norm_blocks(config, causal=True)
        self.norm = nn.LayerNorm(hidden)
        self.attach_heads(n_tokens)

    def begin(self, prepared: EncoderBatch) -> torch.Tensor:
        """(T, H): the embedded tokens."""
        places = torch.arange(len(prepared.genes), device=prepared.genes.device) - prepared.cu_seqlens[prepared.cell]
        return self.enter(self.inputs(prepared.genes, prepared.values, places))

    def inputs(self, genes: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(T, H): embedded genes, (T,) token ids, with their values (T,), at places (T,) in their cells from 0."""
        x = embed_tokens(genes, self.gene_embedding.weight) + self.rank_embedding(self._rank_buckets(places))
        if self.value_embedding is None:
            return x
        if values.is_floating_point():
            values = values[:, None].to(next(self.value_embedding.parameters()).dtype)
        return x + self.value_embedding(values)

    def _rank_buckets(self, places: torch.Tensor) -> torch.Tensor:
        """floor(log2(place + 1)), (T,) int64; cells of padding may be longer than any other."""
        buckets = torch.frexp((places + 1).float()).exponent - 1  # exact below 2**24
        return buckets.long().clamp(max=self.rank_embedding.num_embeddings - 1)

    def cell_vectors(self, states: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
        """(T, H) -> (C, H) float32; zeros for a cell without tokens."""
        if self.pooling == "mean":
            return mean_state(states, prepared)
        lengths, ends = prepared.cu_seqlens.diff(), prepared.cu_seqlens[1:].long() - 1
        if not len(states):
            return torch.zeros(len(lengths), self.width, device=lengths.device)
        return states.float()[ends.clamp(min=0)] * (lengths > 0)[:, None]
