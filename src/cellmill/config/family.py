"""The torch-free half of a model family: its options, and what can be said of a model before it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cellmill.config.plugin import Plugin
from cellmill.config.tokens import Tokens

WEIGHTS_FORMAT = 2
"""What the numbers in a parameter mean; it grows when the same names and shapes come to mean something else.

1: rows of `qkv` are all queries, then all keys, then all values. 2: those of each head are together.
"""


CHUNK_LOGITS = 1 << 24
"""Logits over the vocabulary that a loss makes at once on a GPU: 64 MB, and enough targets for its products."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers that a plan needs, for one tensor-parallel process; counts are of elements or FLOPs, not bytes.

    A model is what goes before its blocks (begin), blocks that are all alike, and what follows them (finish): a
    pipeline cuts between any two of these.
    """

    blocks: int
    """Number of blocks."""
    block_parameters: int
    """Parameters of one block, the largest piece FSDP gathers at once, but for what lies outside the blocks."""
    begin_parameters: int
    """Parameters read before the blocks."""
    finish_parameters: int
    """Parameters read after them."""
    shared_parameters: int
    """Those that are read both before and after; the first and the last stage of a pipeline each have them."""
    block_flops_per_token: float
    """Forward and backward FLOPs of one token in one block, attention left out."""
    begin_flops_per_token: float
    finish_flops_per_token: float
    block_flops_per_token_pair: float
    """Forward and backward FLOPs of one block's attention for each (query, key) pair of a cell."""
    width: int
    """Elements of a token that go from block to block."""
    block_activations_per_token: int
    """Elements one block keeps for the backward pass for each token, `width` of them its input."""
    block_activations_per_token_selective: int
    """The same with selective activation checkpointing."""
    begin_activations_per_token: int
    finish_activations_per_token: int
    working_per_token: int
    """Elements that a block's backward pass makes, for each token, before it lets go of as many."""
    logits_per_token: float
    """Elements of logits for each token, on average; float32 in every precision, and once more as their gradient."""
    most_logits: int | None
    """More than so many a loss over the vocabulary does not make at once; None where it makes all."""
    table_gradients: int
    """Float32 elements of the vocabulary's gradients that such a loss makes in the forward pass."""
    block_sums_per_token: int
    """Elements of a token that tensor parallel puts together in a block, forward and as many again backward."""
    begin_sums_per_token: float
    """The same before the blocks, in both passes together; without sequence parallel."""
    finish_sums_per_token: float

    @property
    def parameters(self) -> int:
        """All trainable parameters."""
        return self.blocks * self.block_parameters + self.outside_parameters

    @property
    def outside_parameters(self) -> int:
        """Those outside the blocks."""
        return self.begin_parameters + self.finish_parameters - self.shared_parameters

    @property
    def flops_per_token(self) -> float:
        """Forward and backward FLOPs of one token, attention left out."""
        return self.blocks * self.block_flops_per_token + self.begin_flops_per_token + self.finish_flops_per_token

    @property
    def flops_per_token_pair(self) -> float:
        """Forward and backward FLOPs of attention for each (query, key) pair of a cell."""
        return self.blocks * self.block_flops_per_token_pair

    @property
    def activations_per_token(self) -> int:
        """Elements kept for the backward pass for each token, without activation checkpointing."""
        outside = self.begin_activations_per_token + self.finish_activations_per_token
        return self.blocks * self.block_activations_per_token + outside

    @property
    def activations_per_token_selective(self) -> int:
        """The same with selective activation checkpointing: what all blocks keep, and what one of them recomputes."""
        kept = self.block_activations_per_token_selective
        again = self.block_activations_per_token - (kept - self.width)
        outside = self.begin_activations_per_token + self.finish_activations_per_token
        return self.blocks * kept + again + outside

    @property
    def activations_per_token_checkpointed(self) -> int:
        """The same with full activation checkpointing: inputs of all blocks, and what one of them recomputes."""
        return (
            self.activations_per_token
            - (self.blocks - 1) * self.block_activations_per_token
            + (self.blocks * self.width)
        )


class FamilyConfig(Plugin):
    """Base of every family's options."""

    kind: ClassVar[str] = "family"
    key: ClassVar[str] = "family"
    default: ClassVar[str | None] = "masked"
    moved: ClassVar[dict[str, str]] = {
        "objective": "objective.name",
        "mask_frac": "objective.mask_frac",
        "cell_loss_weight": "objective.cell_loss_weight",
    }

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
