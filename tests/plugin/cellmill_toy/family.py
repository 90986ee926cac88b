"""A causal transformer over genes in rank order; positions are a rotary table, a buffer (Su et al.
2021, RoPE).

Legend: T tokens of the batch, H width of the model, h heads, d width of a head.
"""

from dataclasses import replace

import torch
from torch import nn

from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.stream.batch import Batch
from cellmill.models.blocks import Block, Entry, attention
from cellmill.models.family import Model, ParallelPlan
from cellmill.models.initial import Fill
from cellmill.models.objective import Objective
from cellmill.parallel.vocab_parallel import embed_tokens
from cellmill_toy.objective import CausalBatch, causal_batch
from cellmill_toy.options import ToyFamily


class ToyBlock(Block):
    """Causal attention of rotated queries and keys, and feed-forward."""

    def forward(self, x: torch.Tensor, angles: torch.Tensor, prepared: CausalBatch) -> torch.Tensor:  # type: ignore[override]
        """(T, H) -> (T, H); `angles` (T, 1, d / 2) are those of each token's place."""
        q, k, v = self.before(x)
        q, k = (_rotated(part, angles) for part in (q, k))
        attended = attention(
            q, k, v.contiguous(), prepared.cu_seqlens, prepared.lengths, causal=True
        )
        return self.after(x, attended.flatten(1), None)


class ToyModel(Model):
    """See the module."""

    plan = ParallelPlan(
        blocks="blocks",
        tensor={
            "gene_embedding": "vocabulary",
            "enter": "enter",
            "blocks.*.attention_norm": "norm",
            "blocks.*.qkv": "columns",
            "blocks.*.out": "rows",
            "blocks.*.ffn_norm": "norm",
            "blocks.*.up": "columns",
            "blocks.*.down": "rows",
            "norm": "leave",
        },
        begin=("gene_embedding",),
    )
    gene_rows = frozenset({"gene_embedding.weight", "gene_bias"})

    def __init__(
        self, config: ToyFamily, n_genes: int, tokens: Tokens, objective: Objective
    ) -> None:
        super().__init__(objective)
        self.width = config.hidden
        self.gene_embedding = nn.Embedding(n_genes + len(SPECIAL), config.hidden)
        self.enter = Entry()
        self.blocks = nn.ModuleList(
            ToyBlock(config.hidden, config.heads, 4 * config.hidden, dropout=0.0, index=i)
            for i in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.hidden)
        self.register_buffer(
            "angles", torch.empty(tokens.max_tokens, config.hidden // config.heads // 2)
        )
        self.plan = replace(
            self.plan, finish=("norm", *objective.attach(self, n_genes + len(SPECIAL)))
        )

    def initial_value(self, name: str) -> Fill | None:
        """The rotary table: place times frequency."""
        return _fill_angles if name == "angles" else super().initial_value(name)

    def begin(self, prepared: CausalBatch) -> torch.Tensor:
        """(T, H): gene embeddings."""
        return self.enter(embed_tokens(prepared.token_ids, self.gene_embedding.weight))

    def through(self, x: torch.Tensor, prepared: CausalBatch) -> torch.Tensor:
        """(T, H) -> (T, H)."""
        angles = self.angles[prepared.position.clamp(max=len(self.angles) - 1)][:, None]
        for block in self.blocks:
            x = block(x, angles, prepared)
        return x

    def finish(self, x: torch.Tensor, prepared: CausalBatch) -> torch.Tensor:
        """The objective's summed loss."""
        return self.objective.loss(self, self.norm(x), prepared)

    def embed(self, batch: Batch) -> torch.Tensor:
        """(cells, H) float32: the state of a cell's last token."""
        prepared = causal_batch(batch, skip=0)
        return self.states(prepared)[prepared.cu_seqlens[1:].long() - 1].float()

    def states(self, prepared: CausalBatch) -> torch.Tensor:
        """(T, H): the normed states of all tokens."""
        return self.norm(self.through(self.begin(prepared), prepared))


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """(T, h, d) rotated by (T, 1, d / 2) angles, each pair of columns by its own."""
    one, two = x.chunk(2, dim=-1)
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    return torch.cat([one * cos - two * sin, one * sin + two * cos], dim=-1)


def _fill_angles(tensor: torch.Tensor, generator: torch.Generator) -> object:
    places = torch.arange(tensor.shape[0])
    pairs = torch.arange(tensor.shape[1])
    return tensor.copy_(places[:, None] * 10_000.0 ** (-pairs[None] / tensor.shape[1]))
