"""The torch-free half of a model family: its options, and what can be said of a model before it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cellmill.config.section import Section

if TYPE_CHECKING:
    from cellmill.config.run import Tokens


WEIGHTS_FORMAT = 2
"""What the numbers in a parameter mean; it grows when the same names and shapes come to mean something else.

1: rows of `qkv` are all queries, then all keys, then all values. 2: those of each head are together.
"""


CHUNK_LOGITS = 1 << 24
"""Logits over the vocabulary that a loss makes at once on a GPU: 64 MB, and enough targets for its products."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers that a plan needs, for one tensor-parallel process; counts are of elements or FLOPs, not bytes."""

    parameters: int
    """All trainable parameters."""
    block_parameters: int
    """Parameters of one block, the largest piece FSDP gathers at once, but for what lies outside the blocks."""
    blocks: int
    """Number of blocks."""
    flops_per_token: float
    """Forward and backward FLOPs of one token, attention left out."""
    flops_per_token_pair: float
    """Forward and backward FLOPs of attention for each (query, key) pair of a cell."""
    activations_per_token: int
    """Elements kept for the backward pass for each token, without activation checkpointing."""
    activations_per_token_checkpointed: int
    """The same with full activation checkpointing."""
    logits_per_token: float
    """Elements of logits for each token, on average; float32 in every precision, and once more as their gradient."""
    logits: int
    """Float32 elements that a chunked loss has at once, however many the tokens: a chunk's logits, and the gradients of
    table and bias, which it makes in the forward pass."""


class FamilyConfig(Section):
    """Base of every family's options."""

    family: str
    weight_keys: ClassVar[tuple[str, ...]] = ()
    """Options that must be equal for the weights of one model to mean the same in another."""

    def check_tokens(self, tokens: Tokens) -> None:
        """Raises ValueError when the family cannot be trained on such tokens."""
        raise NotImplementedError

    def cut_by_tp(self) -> dict[str, int]:
        """What tensor parallel cuts and must divide, by the option's name; empty where it cuts nothing."""
        return {}

    def cut_by_pp(self) -> dict[str, int]:
        """The blocks that a pipeline deals out, by the option's name; empty where it cuts nothing."""
        return {}

    def size(self, n_genes: int, tokens: Tokens, tp: int = 1, sequence_parallel: bool = False) -> ModelSize:
        """What one of `tp` tensor-parallel processes holds of a model over `n_genes` genes; all of it where tp is 1."""
        raise NotImplementedError
