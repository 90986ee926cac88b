"""Tokens at the ends of a cell that are no genes: <cls> before the first gene, <eos> after the last.

Their ids are negative, so they are in no vocabulary, are never masked, and cost no row of a table that has one row per
gene. They are added to a view before it is padded, so that layouts count them.
"""

from dataclasses import replace

from cellmill.models.batch import TensorBatch, with_extra_tokens

CLS, EOS = -1, -2
"""Token ids; row -1 - id of `end_embedding`."""


def with_ends(batch: TensorBatch, n_ends: int) -> TensorBatch:
    """Return the batch with <cls> (`n_ends` 1), or <cls> and <eos> (2), around each cell, with value and count 0."""
    if not n_ends:
        return batch
    ended = with_extra_tokens(batch, 1, n_ends - 1, CLS)
    if n_ends == 1:
        return ended
    return replace(ended, genes=ended.genes.index_fill(0, ended.cu_seqlens[1:].long() - 1, EOS))
