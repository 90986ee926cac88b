"""The contract of a model family: what the loop, the layouts and the export ask of any model.

A family gives names and pure functions; it knows no process group, no mesh, no checkpoint and no sizes: the planner
measures them on the meta device. Its torch-free half is `cellmill.config.family.FamilyConfig`; `models.build` makes
`implementation(config, n_genes, tokens, objective)` from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from cellmill.models.batch import TensorBatch
from cellmill.models.initial import Fill
from cellmill.models.objective import Objective
from cellmill.parallel.tensor_parallel import Style


@dataclass(frozen=True)
class ParallelPlan:
    """Names of modules, by which layouts are applied."""

    blocks: str
    """Path of the ModuleList whose modules are sharded and recomputed one by one; they are all alike."""
    compiled: tuple[str, ...] = ()
    """Methods of a block to compile whole: functions of tensors alone, whose first dimension may vary."""
    tensor: Mapping[str, Style] = field(default_factory=dict)
    """Tensor-parallel style of each module, by path, in which `*` is any block; empty if not supported."""
    begin: tuple[str, ...] = ()
    """Modules and parameters that `Model.begin` reads; empty if a pipeline is not supported."""
    finish: tuple[str, ...] = ()
    """Those that `Model.finish` reads. A name in both is tied between the first and last stage of a pipeline."""


class Prepared(Protocol):
    """A batch with its masks drawn: what `forward` takes."""

    lengths: list[int]
    """Tokens of each cell."""
    n_targets: torch.Tensor
    """int64 scalar: number of targets that the loss is summed over."""


class Model(nn.Module):
    """Base of every family's model. Built on the meta device: `__init__` computes no values.

    Buffers are constants: equal on every rank, filled from `initialize`, saved if persistent.
    """

    plan: ParallelPlan
    width: int
    """H, of what goes from block to block."""
    gene_rows: frozenset[str] = frozenset()
    """Parameters with one row per token of the vocabulary: another vocabulary finds its genes in them."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective
        self.fills: dict[str, Fill] = {}
        """Initial values by name; set by `models.build`, before any layout is applied."""

    def prepare(self, batch: TensorBatch, *, seed: int, step: int) -> Any:
        """Draw masks and targets: a pure function of (seed, step, cell, place in the cell), without parameters."""
        return self.objective.prepare(batch, seed=seed, step=step)

    def forward(self, prepared: Any) -> torch.Tensor:
        """Return the loss summed over the targets, a float32 scalar. An empty batch gives 0 and zero gradients."""
        return self.finish(self.through(self.begin(prepared), prepared), prepared)

    def begin(self, prepared: Any) -> torch.Tensor:
        """Return what enters the first block, (T, H)."""
        raise NotImplementedError

    def through(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """(T, H) -> (T, H), through the blocks of this pipeline stage, or through all."""
        raise NotImplementedError

    def finish(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """Return the loss as in `forward`, from the output (T, H) of the last block."""
        raise NotImplementedError

    def embed(self, batch: TensorBatch) -> torch.Tensor:
        """Return one vector per cell, nothing masked, (cells, hidden) float32."""
        raise NotImplementedError

    def initial_value(self, name: str) -> Fill | None:
        """Initial values of a parameter directly on the model: the objective's, unless a family says otherwise."""
        return self.objective.initial_value(name)

    def initialize(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill the full CPU tensor of the parameter or buffer `name` with its initial values."""
        self.fills[name](tensor, generator)
