"""The contract of a model family: what the loop, the layouts and the export ask of any model.

A family gives names and pure functions; it knows no process group, no mesh and no checkpoint. Its torch-free half is
`cellmill.config.family.FamilyConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from cellmill.models.batch import TensorBatch
from cellmill.parallel.tensor_parallel import Style


@dataclass(frozen=True)
class ParallelPlan:
    """Names that a layout needs."""

    blocks: str
    """Path of the ModuleList whose modules are sharded and recomputed one by one."""
    compiled: tuple[str, ...] = ()
    """Methods of a block that `torch.compile` takes whole: of tensors alone, whose first dimension may vary."""
    tensor: Mapping[str, Style] = field(default_factory=dict)
    """What tensor parallel does to modules, by their paths, in which `*` is any block; none where it is not offered."""
    begin: tuple[str, ...] = ()
    """Modules and parameters that `Model.begin` reads; none where the model is not offered in stages."""
    finish: tuple[str, ...] = ()
    """Those that `Model.finish` reads. What both read is kept by the first and by the last stage of a pipeline."""


class Prepared(Protocol):
    """A batch with its masks drawn: what `forward` takes."""

    lengths: list[int]
    """Tokens of each cell."""
    n_targets: torch.Tensor
    """int64 scalar: over how many targets the loss is summed."""


class Model(nn.Module):
    """Base of every family's model. Built on the meta device: `__init__` computes no values."""

    plan: ParallelPlan
    width: int
    """H, of what goes from block to block."""
    gene_rows: frozenset[str] = frozenset()
    """Parameters whose first dimension is the vocabulary's tokens: another vocabulary finds its genes in them."""

    def prepare(self, batch: TensorBatch, *, seed: int, step: int) -> Any:
        """Draws masks and targets: a pure function of (seed, step, cell, place in the cell), without parameters."""
        raise NotImplementedError

    def forward(self, prepared: Any) -> torch.Tensor:
        """Loss summed over the targets, a float32 scalar. An empty batch gives 0 and zero gradients."""
        return self.finish(self.through(self.begin(prepared), prepared), prepared)

    def begin(self, prepared: Any) -> torch.Tensor:
        """(T, H): what enters the first block."""
        raise NotImplementedError

    def through(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """(T, H) -> (T, H): through those blocks that are here, a stage of a pipeline having some of them."""
        raise NotImplementedError

    def finish(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """From what leaves the last block, (T, H), to the loss as in `forward`."""
        raise NotImplementedError

    def predict(self, prepared: Any) -> torch.Tensor:
        """Predictions at the targets: (targets,) values, or (targets, classes) logits."""
        raise NotImplementedError

    def embed(self, batch: TensorBatch) -> torch.Tensor:
        """(cells, hidden) float32: one vector for each cell, nothing masked."""
        raise NotImplementedError

    def reset_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fills the full CPU tensor of the parameter `name` with its initial values."""
        raise NotImplementedError
