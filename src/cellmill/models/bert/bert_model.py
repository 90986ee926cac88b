"""BERT (Devlin et al. 2019) over genes in rank order: the architecture of Geneformer (Theodoris et al. 2023).

The token-type embedding of BERT has one used row, which `cellmill import` adds to the places. Dropout is on the
residual branches alone: BERT's on embeddings and on attention weights is left out.

Legend: T tokens of the batch, N targets, H hidden.
"""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from cellmill.config.tokens import Tokens
from cellmill.models.bert.config import BertFamilyConfig
from cellmill.models.encoder_batch import EncoderBatch
from cellmill.models.objective import Objective
from cellmill.models.post_norm import PostNormEncoder


class BertModel(PostNormEncoder):
    """See the module."""

    plan = replace(PostNormEncoder.plan, begin=("gene_embedding", "end_embedding", "place_embedding", "embedding_norm"))

    def __init__(self, config: BertFamilyConfig, n_genes: int, tokens: Tokens, objective: Objective) -> None:
        super().__init__(config, n_genes, objective)
        self.place_embedding = nn.Embedding(tokens.n_values + config.n_ends, config.hidden)
        self.embedding_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attach_heads(self.n_tokens)

    def inputs(self, prepared: EncoderBatch, at: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """(T, H), or (N, H) for the tokens `at`: the normed sum of gene and place."""
        genes, places = prepared.genes[at], self._places(prepared)[at]
        return self.embedding_norm(self.embedded_genes(genes) + F.embedding(places, self.place_embedding.weight))

    def _places(self, prepared: EncoderBatch) -> torch.Tensor:
        """(T,) int64: position of each token in its cell, <cls> and <eos> counted."""
        if not self.config.n_ends:
            return prepared.values  # of the rank tokenizer
        places = torch.arange(len(prepared.genes), device=prepared.genes.device)
        # padding is longer than a cell may be, or has no <cls>: it is read by nobody
        return (places - prepared.cu_seqlens[:-1].long()[prepared.cell]).clamp(max=len(self.place_embedding.weight) - 1)
