"""The contract of a model family: the interface that training, layouts and export use.

A family defines names and pure functions. It knows no process group, mesh or checkpoint, and no
sizes: the planner measures them on the meta device. Its torch-free options are a
`cellmill.config.parts.family.FamilyConfig`, from which `models.build` makes `implementation(config,
n_genes, tokens, objective)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from cellmill.config.parallel import Style
from cellmill.data.stream.batch import Batch
from cellmill.models.initial import Fill
from cellmill.models.objective import Objective


@dataclass(frozen=True)
class ParallelPlan:
    """Module names to which parallel layouts are applied."""

    blocks: str
    """Path of the ModuleList of identical blocks, which are sharded and recomputed one by one."""
    compiled: tuple[str, ...] = ()
    """Methods of a block to compile: functions of tensors only, whose first dimension may vary."""
    tensor: Mapping[str, Style] = field(default_factory=dict)
    """Tensor-parallel style of each module by path, `*` for any block; empty if not supported."""
    begin: tuple[str, ...] = ()
    """Modules and parameters that `Model.begin` reads; empty if pipelines are not supported."""
    finish: tuple[str, ...] = ()
    """Modules and parameters that `Model.finish` reads.

    Names in `begin` and `finish` are tied between the first and the last pipeline stage.
    """


class Model(nn.Module):
    """Base class of all models, built on the meta device: `__init__` computes no values.

    Buffers are constants: equal on every rank, filled by `fills`, saved if persistent.
    """

    plan: ParallelPlan
    width: int  # H, the width of the residual stream
    gene_rows: frozenset[str] = frozenset()
    """Parameters with one row per token of the vocabulary, which `init_from` matches by gene."""
    frozen: frozenset[str] = frozenset()
    """Parameters that are never trained, whatever the fine-tuning method says."""
    level_rows: Mapping[str, str] = MappingProxyType({})
    """Column of each parameter with a row per level of an obs column, from `add_level_rows`."""
    heads: tuple[str, ...] | None = None
    """Modules and parameters that the objective added.

    The rest is the trunk, whose rate a fine-tuning method may set. If a family leaves it None,
    `models.build` takes what is in `plan.finish` and not in `plan.begin`.
    """
    head_activation: type[nn.Module] = nn.GELU
    """Activation of an objective's heads between linear layer and norm."""
    head_norm_eps: float = 1e-5  # epsilon of the norms of an objective's heads

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective
        self.fills: dict[str, Fill] = {}
        """Functions that fill parameters and buffers, by name; set by `models.build`."""
        self.kept_vectors: list[Tensor] | None = None
        """If not None, `finish` appends each batch's vectors, (cells, width), by `keep_vectors`."""
        self.kept_rows: list[tuple[Tensor, ...]] | None = None
        """If not None, `finish` appends the objective's `coupled_rows` and returns 0 instead of the loss."""

    def after_blocks(self) -> frozenset[str]:
        """Return paths of the trunk's modules and parameters after the blocks, as of the last norm."""
        return frozenset(self.plan.finish) - {*self.plan.begin, *(self.heads or ())}

    @property
    def vector_width(self) -> int:
        """Width of the cell embedding; H unless a family narrows it."""
        return self.width

    def view(self, batch: Batch, *, seed: int, step: int) -> Batch:
        """Return the tokens that the model is given, of a batch on the CPU: `Objective.view`."""
        return self.objective.view(batch, seed=seed, step=step)

    def prepare(self, batch: Batch, *, seed: int, step: int) -> Any:
        """Draw masks and targets in a `view`.

        It is a pure function of its arguments and of `self.training`, and reads no parameters. The
        result has `lengths` (tokens of each cell, list[int]) and `n_targets` (int64 scalar, or
        (parts,)).
        """
        self.objective.training = self.training
        return self.objective.prepare(batch, seed=seed, step=step)

    def forward(self, prepared: Any) -> Tensor:
        """Return the loss summed over the targets, float32, () or (parts,); 0 for an empty batch."""
        return self.finish(self.through(self.begin(prepared), prepared), prepared)

    def begin(self, prepared: Any) -> Tensor:
        """Return the input (T, H) of the first block."""
        raise NotImplementedError

    def through(self, x: Tensor, prepared: Any) -> Tensor:
        """(T, H) -> (T, H): apply the blocks, in a pipeline those of this stage."""
        raise NotImplementedError

    def finish(self, x: Tensor, prepared: Any) -> Tensor:
        """Return the loss, as `forward`, from the output (T, H) of the last block."""
        raise NotImplementedError

    def states(self, prepared: Any) -> Tensor:
        """(T, H): the normed output of the last block, for objectives that predict in `evaluate`."""
        raise NotImplementedError

    def cell_vectors(self, states: Tensor, prepared: Any) -> Tensor:
        """(T, H) -> (cells, vector width) float32, for objectives that predict from cell vectors."""
        raise NotImplementedError

    def add_level_rows(self, column: str, *names: str) -> None:
        """Name parameters with a row per level of an obs column, whose rows `init_from` matches."""
        self.level_rows = {**self.level_rows, **dict.fromkeys(names, column)}

    def keep_vectors(self, vectors: Callable[[], Tensor]) -> None:
        """Append the result of `vectors` to `kept_vectors` if that is a list; called by `finish`."""
        if self.kept_vectors is not None:
            self.kept_vectors.append(vectors().detach())

    def embed(self, batch: Batch) -> Tensor:
        """Return one vector per cell with nothing masked, (cells, vector width) float32."""
        raise NotImplementedError

    def embed_padded(self, token_ids: Tensor, values: Tensor) -> Tensor:
        """Return `embed` of padded cells, in operations that other runtimes have.

        `token_ids` and `values`, (cells, tokens), are padded with `<pad>` and 0; cells have at least one
        gene. Families without it cannot be exported.
        """
        raise NotImplementedError

    def initial_value(self, name: str) -> Fill | None:
        """Return the initial value of a parameter of the model itself; by default the objective's."""
        return self.objective.initial_value(name)
