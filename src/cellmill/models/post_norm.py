"""Transformers of post-norm blocks (Vaswani et al. 2017): what the families `bert` and `scgpt` share.

Legend: T tokens of the batch, H hidden.
"""

import torch
from torch import nn
from torch.nn import functional as F

from cellmill.config.post_norm import PostNormConfig
from cellmill.config.tokens import SPECIAL
from cellmill.models.batch import TensorBatch
from cellmill.models.blocks import Block, Entry
from cellmill.models.cell_encoder import CellEncoder
from cellmill.models.encoder_batch import EncoderBatch, whole
from cellmill.models.end_tokens import with_ends
from cellmill.models.family import ParallelPlan
from cellmill.models.objective import Objective
from cellmill.parallel.segments import segment_sum
from cellmill.parallel.vocab_parallel import embed_tokens

ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU}


class PostNormBlock(Block):
    """A block whose norms follow the residual sums; modules have the names of `Block`."""

    def __init__(self, config: PostNormConfig, index: int) -> None:
        super().__init__(config.hidden, config.heads, config.ffn_width, config.dropout, index)
        self.attention_norm.eps = self.ffn_norm.eps = config.norm_eps
        self.activation = ACTIVATIONS[config.activation]()

    def before(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(T, H) -> query, key and value, (T, h, H / h) each."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).unbind(2)
        return q, k, v

    def after(
        self, x: torch.Tensor, attended: torch.Tensor, drops: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Residual input and attention output, (T, H) each, and states of both dropouts -> (T, H)."""
        x = self.attention_norm(x + self._drop(self.out(attended), drops and drops[0]))
        inner = self.down(self.activation(self.up(x)))
        out: torch.Tensor = self.ffn_norm(x + self._drop(inner, drops and drops[1]))
        return out


class PostNormEncoder(CellEncoder):
    """Base of both families, which define `inputs`, and add the modules it reads to `plan.begin`."""

    plan = ParallelPlan(
        blocks="blocks",
        compiled=("before", "after"),
        tensor={
            "gene_embedding": "vocabulary",
            "enter": "enter",
            "enter_keys": "enter",
            "blocks.*.qkv": "columns",
            "blocks.*.out": "rows",
            "blocks.*.attention_norm": "norm",
            "blocks.*.up": "columns",
            "blocks.*.down": "rows",
            "blocks.*.ffn_norm": "norm",
            "norm": "leave",
        },
    )
    gene_rows = frozenset({"gene_embedding.weight"})
    norm: nn.Module

    def __init__(self, config: PostNormConfig, n_genes: int, objective: Objective) -> None:
        super().__init__(objective)
        self.config, self.width, self.n_tokens = config, config.hidden, n_genes + len(SPECIAL)
        self.head_activation, self.head_norm_eps = ACTIVATIONS[config.activation], config.norm_eps
        self.gene_embedding = nn.Embedding(self.n_tokens, config.hidden)
        if config.n_ends:
            self.end_embedding = nn.Embedding(config.n_ends, config.hidden)
        self.enter, self.enter_keys = Entry(), Entry()
        self.blocks = nn.ModuleList(PostNormBlock(config, index) for index in range(config.layers))
        self.norm = Entry()  # each block ends with a norm

    def view(self, batch: TensorBatch, *, seed: int, step: int) -> TensorBatch:
        """Return the objective's view with <cls> and <eos>."""
        return self.with_ends(super().view(batch, seed=seed, step=step))

    def with_ends(self, batch: TensorBatch) -> TensorBatch:
        """Return the batch with <cls> and <eos>, as the options say."""
        return with_ends(batch, self.config.n_ends)

    def begin(self, prepared: EncoderBatch) -> torch.Tensor:
        """(T, H): the embedded tokens."""
        return self.enter(self.inputs(prepared))

    def inputs(self, prepared: EncoderBatch, at: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """(T, H), or (N, H) for the tokens `at`."""
        raise NotImplementedError

    def embedded_genes(self, genes: torch.Tensor) -> torch.Tensor:
        """(N,) token ids, negative for <cls> and <eos>, -> (N, H)."""
        vectors = embed_tokens(genes.clamp(min=0), self.gene_embedding.weight)
        if not self.config.n_ends:
            return vectors
        ends = F.embedding((-1 - genes).clamp(min=0), self.end_embedding.weight)
        return torch.where((genes < 0)[:, None], ends, vectors)

    def through(self, x: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
        """(T, H) -> (T, H)."""
        return self._blocks(x, prepared, len(self.blocks))

    def embed(self, batch: TensorBatch) -> torch.Tensor:
        """(cells, H) float32: the vectors of whole cells, from the block that `embed_layer` names."""
        prepared = whole(self.with_ends(batch))
        last = len(self.blocks) + self.config.embed_layer
        return self.cell_vectors(self._blocks(self.begin(prepared), prepared, last), prepared)

    def cell_vectors(self, states: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
        """(T, H) -> (cells, H) float32: the mean over genes, zeros for a cell without any; or the state of <cls>."""
        if self.config.pooling == "cls":
            return states[prepared.cu_seqlens[:-1].long()].float()
        is_gene = (prepared.genes >= 0).float()
        summed = (states.float() * is_gene[:, None], is_gene)
        sums, numbers = (segment_sum(part, prepared.cell, prepared.cu_seqlens) for part in summed)
        return sums / numbers.clamp(min=1)[:, None]

    def _blocks(self, x: torch.Tensor, prepared: EncoderBatch, number: int) -> torch.Tensor:
        """Apply the first `number` blocks."""
        token_keys = self.enter_keys(prepared.token_keys)
        for block in list(self.blocks)[:number]:
            x = block(x, prepared.cu_seqlens, prepared.lengths, token_keys)
        return x
