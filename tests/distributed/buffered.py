"""A family whose model has buffers, persistent and not, on the root and in each block."""

from typing import ClassVar, Literal

import torch

from cellmill.config import plugin
from cellmill.config.parts.families import EncoderConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.models.families.encoder import EncoderModel
from cellmill.models.initial import Fill, normal
from cellmill.models.objective import Objective
from cellmill.models.objectives.shared.masking import MaskedBatch

PERIOD = 7


def register() -> None:
    """Make the family known in this process."""
    plugin.BUILT_IN["family"]["buffered"] = BufferedConfig


class BufferedConfig(EncoderConfig):
    implementation: ClassVar[str] = "tests.distributed.buffered:BufferedModel"
    family: Literal["buffered"] = "buffered"


class BufferedModel(EncoderModel):
    """The masked encoder with offsets by position in the cell, and blocks whose input is scaled."""

    def __init__(
        self, config: EncoderConfig, n_genes: int, tokens: Tokens, objective: Objective
    ) -> None:
        super().__init__(config, n_genes, tokens, objective)
        self.register_buffer("offsets", torch.empty(PERIOD, config.hidden), persistent=False)
        self.register_buffer("order", torch.empty(PERIOD, dtype=torch.int64))
        for block in self.blocks:
            block.register_buffer("scale", torch.empty(()))
            block.initial_value = {"scale": between_halves}.get

    def begin(self, prepared: MaskedBatch) -> torch.Tensor:
        starts = prepared.cu_seqlens[:-1].long()[prepared.token_cells]
        position = torch.arange(len(starts), device=starts.device) - starts
        offsets = self.offsets[self.order[position % PERIOD]]
        return self.enter(self.inputs(prepared) + offsets)

    def through(self, x: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        keys = self.enter_keys(prepared.token_keys)
        for block in self.blocks:
            x = block(x * block.scale, prepared.cu_seqlens, prepared.lengths, keys)
        return x

    def initial_value(self, name: str) -> Fill | None:
        own = {"order": permutation, "offsets": normal(0.1)}
        return own.get(name) or super().initial_value(name)


def permutation(tensor: torch.Tensor, generator: torch.Generator) -> object:
    return tensor.copy_(torch.randperm(PERIOD, generator=generator))


def between_halves(tensor: torch.Tensor, generator: torch.Generator) -> object:
    return tensor.uniform_(0.5, 1.5, generator=generator)
