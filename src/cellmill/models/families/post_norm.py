"""Transformers of post-norm blocks (Vaswani et al. 2017): the families `bert` and `scgpt`.

`bert` is BERT (Devlin et al. 2019) over genes in rank order, the architecture of Geneformer
(Theodoris et al. 2023). Only one row of BERT's token-type embedding is used; `cellmill import` adds
it to the positions. BERT's dropout on embeddings and attention weights is left out.

`scgpt` (Cui et al. 2024) embeds a token as the sum of a normed gene embedding and a normed perceptron
of the bin's number, without positions. The cell's vector is scaled to length 1 (L2), as in scGPT.

Legend: T tokens of the batch, N targets, H width of the model.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.config.parts.families import BertFamilyConfig, ScgptConfig
from cellmill.config.parts.family import PostNormConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import EncoderBatch, add_ends
from cellmill.models.blocks import Block, Entry
from cellmill.models.cell_encoder import TokenEncoder, first_state, mean_state
from cellmill.models.initial import with_std
from cellmill.models.objective import Objective
from cellmill.parallel.vocab_parallel import embed_tokens

ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU}


class PostNormBlock(Block):
    """A block with the norms after the residual sums; its modules have the names of `Block`."""

    def __init__(self, config: PostNormConfig, index: int) -> None:
        super().__init__(config.hidden, config.heads, config.ffn_width, config.dropout, index)
        self.attention_norm.eps = config.norm_eps
        self.ffn_norm.eps = config.norm_eps
        self.activation = ACTIVATIONS[config.activation]()

    def before(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).unbind(2)
        return q, k, v

    def after(
        self,
        x: Tensor,
        attended: Tensor,
        dropout_states: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        attention_states, ffn_states = dropout_states or (None, None)
        x = self.attention_norm(x + self._drop(self.out(attended), attention_states))
        inner = self.down(self.activation(self.up(x)))
        out: Tensor = self.ffn_norm(x + self._drop(inner, ffn_states))
        return out


class PostNormEncoder(TokenEncoder):
    """Base of both families. They define `inputs` and name the modules that it reads in `plan.begin`."""

    config: PostNormConfig
    norm: nn.Module

    def __init__(self, config: PostNormConfig, n_genes: int, objective: Objective) -> None:
        super().__init__(config.hidden, n_genes, objective)
        self.config = config
        self.head_activation = ACTIVATIONS[config.activation]
        self.head_norm_eps = config.norm_eps
        if config.n_ends:
            self.end_embedding = nn.Embedding(config.n_ends, config.hidden)
        self.blocks = nn.ModuleList(PostNormBlock(config, index) for index in range(config.layers))
        self.norm = Entry()  # each block ends with a norm

    def view(self, batch: Batch, *, seed: int, step: int) -> Batch:
        return add_ends(super().view(batch, seed=seed, step=step), self.config.n_ends)

    def begin(self, prepared: EncoderBatch) -> Tensor:
        return self.enter(self.inputs(prepared))

    def inputs(self, prepared: EncoderBatch, index: Tensor | slice = slice(None)) -> Tensor:
        """Embed all tokens, (T, H), or those in `index`, (N, H)."""
        raise NotImplementedError

    def embed_genes(self, token_ids: Tensor) -> Tensor:
        """Embed token ids, (N,) -> (N, H); those of <cls> and <eos> are negative."""
        vectors = embed_tokens(token_ids.clamp(min=0), self.gene_embedding.weight)
        if not self.config.n_ends:
            return vectors
        ends = F.embedding((-1 - token_ids).clamp(min=0), self.end_embedding.weight)
        return torch.where((token_ids < 0)[:, None], ends, vectors)

    def embed(self, batch: Batch) -> Tensor:
        """Return the vectors of whole cells, (cells, H) float32, after the block that `embed_layer` names."""
        prepared = EncoderBatch.from_batch(add_ends(batch, self.config.n_ends))
        n_blocks = len(self.blocks) + self.config.embed_layer
        states = self.through(self.begin(prepared), prepared, n_blocks)
        return self.cell_vectors(states, prepared)

    def cell_vectors(self, states: Tensor, prepared: EncoderBatch) -> Tensor:
        """(T, H) -> (cells, H) float32: the mean over genes, or the state of <cls>.

        The mean of a cell without genes is zero.
        """
        if self.config.pooling == "cls":
            return first_state(states, prepared)
        return mean_state(states, prepared, (prepared.token_ids >= 0).float())


class BertModel(PostNormEncoder):
    plan = replace(
        PostNormEncoder.plan,
        begin=("gene_embedding", "end_embedding", "place_embedding", "embedding_norm"),
    )

    def __init__(
        self, config: BertFamilyConfig, n_genes: int, tokens: Tokens, objective: Objective
    ) -> None:
        super().__init__(config, n_genes, objective)
        self.place_embedding = nn.Embedding(tokens.n_values + config.n_ends, config.hidden)
        self.embedding_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attach_heads(self.vocab_size)

    def inputs(self, prepared: EncoderBatch, index: Tensor | slice = slice(None)) -> Tensor:
        """Embed all tokens, (T, H), or those in `index`, (N, H): the normed sum of gene and position."""
        table = self.place_embedding.weight
        positions = prepared.values  # of genes, from the rank tokenizer
        if self.config.n_ends:
            # positions of <cls>, genes and <eos>; cells of padding, which are never read, may be longer
            # than the table
            positions = prepared.position.clamp(max=len(table) - 1)
        genes = self.embed_genes(prepared.token_ids[index])
        return self.embedding_norm(genes + F.embedding(positions[index], table))


class ScgptModel(PostNormEncoder):
    config: ScgptConfig
    plan = replace(
        PostNormEncoder.plan,
        begin=(
            "gene_embedding",
            "end_embedding",
            "gene_norm",
            "value_in",
            "value_out_norm",
            "hidden_value",
        ),
    )

    def __init__(
        self, config: ScgptConfig, n_genes: int, tokens: Tokens, objective: Objective
    ) -> None:
        super().__init__(config, n_genes, objective)
        hidden = config.hidden
        self.gene_norm = nn.LayerNorm(hidden, eps=config.norm_eps)
        first = with_std(nn.Linear(1, hidden), 1.0)
        second = with_std(nn.Linear(hidden, hidden), 1 / math.sqrt(hidden))
        self.value_in = nn.Sequential(first, nn.ReLU(), second)
        self.value_out_norm = nn.LayerNorm(hidden, eps=config.norm_eps)
        self.attach_heads(self.vocab_size)

    def inputs(self, prepared: EncoderBatch, index: Tensor | slice = slice(None)) -> Tensor:
        """Embed all tokens, (T, H), or those in `index`, (N, H); hidden values have a learned embedding."""
        token_ids = prepared.token_ids[index]
        # (N,): numbers of bins; <cls> has a value of its own
        values = torch.where(token_ids < 0, self.config.cls_value, prepared.values[index].float())
        dtype = next(self.value_in.parameters()).dtype
        embedded = self.value_out_norm(self.value_in(values[:, None].to(dtype)))
        gene_vectors = self.gene_norm(self.embed_genes(token_ids))
        return gene_vectors + self.with_hidden(embedded, prepared, index)

    def cell_vectors(self, states: Tensor, prepared: EncoderBatch) -> Tensor:
        """(T, H) -> (cells, H) float32, unit vectors (L2 norm 1)."""
        return F.normalize(super().cell_vectors(states, prepared), dim=1)
