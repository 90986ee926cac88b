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

    # path of the ModuleList of identical blocks, which are sharded and recomputed one by one
    blocks: str
    compiled: tuple[str, ...] = ()
    """Methods of a block to compile: functions of tensors only, whose first dimension may vary."""
    tensor: Mapping[str, Style] = field(default_factory=dict)
    """Tensor-parallel style of each module by path, with `*` for any block; empty if not supported.
    """
    # modules and parameters that `Model.begin` reads; empty if pipelines are not supported
    begin: tuple[str, ...] = ()
    finish: tuple[str, ...] = ()
    """Modules and parameters that `Model.finish` reads; names in both are tied between first and
    last stage.
    """


class Model(nn.Module):
    """Base class of all models, built on the meta device: `__init__` computes no values.

    Buffers are constants: equal on every rank, filled by `fills`, saved if persistent.
    """

    plan: ParallelPlan
    width: int  # H, the width of the residual stream
    gene_rows: frozenset[str] = frozenset()
    """Parameters with one row per token of the vocabulary, which `init_from` matches by gene."""
    # parameters that are never trained, whatever the fine-tuning method says
    frozen: frozenset[str] = frozenset()
    level_rows: Mapping[str, str] = MappingProxyType({})
    """Parameters with one row per level of an obs column, and the column; `init_from` matches rows
    by level.
    """
    heads: tuple[str, ...] | None = None
    """Modules and parameters that the objective added; the rest is the trunk, whose rate a
    fine-tuning method may set.

    Of a family that leaves it None, `models.build` takes what `plan.finish` names and `plan.begin`
    does not.
    """
    # activation of an objective's heads between linear layer and norm
    head_activation: type[nn.Module] = nn.GELU
    head_norm_eps: float = 1e-5  # epsilon of the norms of an objective's heads

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective
        self.fills: dict[str, Fill] = {}
        """Functions that fill parameters and buffers, by name; set by `models.build`, before any
        layout is applied.
        """
        self.kept_vectors: list[Tensor] | None = None
        """If not None, `finish` appends the vectors of each batch, (cells, vector width): those of
        `keep_vectors`.
        """
        self.kept_rows: list[tuple[Tensor, ...]] | None = None
        """If not None, `finish` appends the objective's `rows` of each batch, and returns 0 instead
        of the loss.
        """

    def after_blocks(self) -> frozenset[str]:
        """Return the paths of the trunk's modules and parameters behind the blocks, such as the
        last norm.
        """
        return (
            frozenset(self.plan.finish) - frozenset(self.plan.begin) - frozenset(self.heads or ())
        )

    @property
    def vector_width(self) -> int:
        """Width of the cell embedding; H unless a family narrows it."""
        return self.width

    def view(self, batch: Batch, *, seed: int, step: int) -> Batch:
        """Return the tokens that the model is given, of a batch on the CPU: `Objective.view`."""
        return self.objective.view(batch, seed=seed, step=step)

    def prepare(self, batch: Batch, *, seed: int, step: int) -> Any:
        """Draw masks and targets in a `view`: a pure function of (seed, step, cell, place), without
        parameters.

        The result has `lengths` (tokens of each cell, list[int]) and `n_targets` (int64 scalar, or
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

    def keep_vectors(self, vectors: Callable[[], Tensor]) -> None:
        """Append the result of `vectors` to `kept_vectors` while that is a list; called by
        `finish`.
        """
        if self.kept_vectors is not None:
            self.kept_vectors.append(vectors().detach())

    def embed(self, batch: Batch) -> Tensor:
        """Return one vector per cell with nothing masked, (cells, vector width) float32."""
        raise NotImplementedError

    def embed_padded(self, genes: Tensor, values: Tensor) -> Tensor:
        """As `embed`, of padded cells, in operations that other runtimes have; cells have at least
        one gene.

        `genes` and `values`, (cells, tokens), are padded with `<pad>` and 0. Families without it
        cannot be exported.
        """
        raise NotImplementedError

    def initial_value(self, name: str) -> Fill | None:
        """Return the initial value of a parameter of the model itself; by default the objective's."""
        return self.objective.initial_value(name)
