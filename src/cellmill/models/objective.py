"""The contract of an objective, in one file: targets, loss and the metrics of `evaluate`.

An objective holds no parameters. Its modules (heads) become attributes of the model, under names
that the objective chooses, so that checkpoints, layouts and exports treat them like all others.

Its options class (`config.parts.objective.ObjectiveConfig`) says what it needs and suits, without
importing torch: `families` that can train it, `needs_counts` in batches, whether it `draws_view` or
`owns_tokens` in a sum, the `label_option` by which a run counts as supervised, whether it
`reads_cells`, and its defaults for section `stream`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.config.corpus import MISSING
from cellmill.config.parallel import Style
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.config.plugin import refuse_former_names
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.tokenizer import Tokenizer
from cellmill.models.initial import Fill
from cellmill.runs.results import Verdict, compare

# steps that key views and masks outside training (`models/draws.py`)
EVALUATION_STEP = 0  # task `reconstruct`
VALIDATION_STEP = -1
HIDDEN_GENES_STEP = -2  # metric hidden_genes: its views hide the same genes from all cells
STATISTICS_STEP = -3  # `GeneStatistics` of training cells
MIN_VARIANCE_FRAC = 1e-9  # of the sum of squares; a smaller variance is a rounding error
FORMER_NAMES = {
    "tensor": "tensor_parallel_styles",
    "row_widths": "coupled_widths",
    "rows": "coupled_rows",
    "loss_of_rows": "loss_of_coupled_rows",
    "validates_rows": "validates_coupled_loss",
    "level_numbers": "level_codes",
    "leaves": "parts_by_name",
}
Tensors = tuple[Tensor, ...]
Judgement = tuple[dict[str, Any], list[Verdict]]
"""Metrics of a task, and verdicts against a baseline."""


@dataclass(frozen=True)
class GeneStatistics:
    """Statistics of training tokens by gene: the baseline in `judge`."""

    n_tokens: np.ndarray  # `(genes,)` int64: tokens of each gene
    mean: np.ndarray
    """`(genes,)` float64: mean value of each gene's tokens; for a gene without tokens, of all tokens."""
    global_mean: float
    n_cells: int
    by_rank: np.ndarray | None = None
    """`(buckets, genes)` int64: tokens of each gene by log2 of their position in the cell
    (`data.rank_order.rank_buckets`).
    """
    count_profile: np.ndarray | None = None
    """`(genes,)` float64 with sum 1: mean over cells of each gene's fraction of the counts to predict.

    These are the cell's counts, or what its view hides of them if only this is to be predicted. No gene
    has 0: one further cell has all genes in equal parts. None unless the objective needs counts.
    """
    log_count_profile: np.ndarray | None = None
    """Likewise of each gene's fraction of log(1 + counts to predict)."""
    shown: "GeneStatistics | None" = None
    """Statistics of the tokens that views show; None unless a part of a sum reads a view of another."""


class ObjectiveModel(Protocol):
    """A model as its objective sees it: `models.family.Model` with heads as attributes."""

    training: bool
    width: int  # H, the width of a state; a state belongs to one of T tokens, in family profile to a cell
    head_activation: type[nn.Module]  # of heads, between linear layer and norm
    head_norm_eps: float  # of the norms of heads

    @property
    def vector_width(self) -> int:
        """Width of a cell's vector; H unless the family narrows it."""

    def states(self, prepared: Any) -> Tensor:
        """Run the model on what `prepare` returned, up to the norm after the blocks: `(T, H)`."""

    def cell_vectors(self, states: Tensor, prepared: Any) -> Tensor:
        """Pool states `(T, H)` to the vector of each cell, `(cells, vector_width)` float32."""

    def add_level_rows(self, column: str, *names: str) -> None:
        """Name parameters with a row per level of an obs column, whose rows `init_from` matches."""

    def __getattr__(self, name: str) -> Any:
        """Get a head, or what only some families have, such as `gene_embedding`."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Add a head: a module, or a parameter."""


class Objective:
    """Base of every objective. Its methods are called in this order:

    - `__init__`, from options; a sum then sets `in_view` of its parts
    - `attach`, once `levels` is set (in a sum also `suffix` and `number_columns`); may set `coupled_widths`,
      `n_sums`, `in_validation_loss` and `validates_coupled_loss`, which are final only then
    - `view`, then `prepare`, of each batch on the CPU; `Model.prepare` sets `training` before
    - `loss`, from the model's states; or `observe` of every batch, then `judge` once if there is a target
    """

    former_names: ClassVar[Mapping[str, str]] = MappingProxyType(FORMER_NAMES)
    """New names by former ones, which subclasses may not define."""

    # heads
    tensor_parallel_styles: Mapping[str, Style] = MappingProxyType({})
    """Tensor-parallel style of heads, by path in the model; others are replicated."""
    gene_rows: frozenset[str] = frozenset()
    """Parameters of heads with a row per token of the vocabulary; `init_from` matches them by gene."""

    # batches
    training: bool = True
    """False while `prepare` is called for validation or evaluation; set by `Model.prepare`."""
    in_view: bool = False
    """True for a part of a sum whose batch is a view that another part drew.

    The random draws of its `prepare` then need keys that the view's draws did not use
    (`models/draws.py`).
    """
    has_target_per_cell: bool = False
    """True if the target is a label, number or vector that a cell may lack (`CellObjective`).

    Training logs the fraction of cells that have one as `labelled_frac`.
    """

    # loss
    part_weights: Mapping[str, float] = MappingProxyType({})
    """Weight of each part of a loss that is a vector, by name; empty for one loss."""
    coupled_widths: tuple[int, ...] = ()
    """Width of each table of `coupled_rows`; none if the loss of a cell depends on no other cell."""

    # validation
    in_validation_loss: bool = True
    """False for a part whose loss `val_loss` leaves out; metrics.jsonl still has it by its name."""
    validates_coupled_loss: bool = False
    """True if `loss` needs shares in validation too; a `CellObjective` derives it."""
    metric_names: tuple[str, ...] = ()
    """Metrics that validation logs in addition, such as accuracy: keys of `validation_metrics`."""
    n_sums: int = 0
    """Number of sums over cells or targets that `validation_metrics` reads."""
    kept_sums: list[Tensor] | None = None
    """If a list, `loss` appends these sums over a micro-batch to it, `(n_sums,)` float64."""
    uses_hidden_genes: bool = False
    """True if `validation_metrics` needs views of step HIDDEN_GENES_STEP
    (`objectives/shared/views.py`).

    Validation draws them only if one of the metrics is `train.best_metric`.
    """

    def __init_subclass__(cls) -> None:
        for base in cls.__mro__[1:]:
            refuse_former_names(cls, vars(base).get("former_names", {}))

    def __init__(self, config: ObjectiveConfig, tokens: Tokens) -> None:
        self.config = config
        self.tokens = tokens
        self.number_columns = sorted(config.columns().numbers)
        """obs columns whose numbers batches carry, in their order; in a sum those of all parts."""
        self.suffix = ""
        """`_` and the part's name, if this is not the objective's; set by a sum before `attach`.

        Heads that several parts may have, such as those of labels, end their names in it.
        """
        self.levels: Mapping[str, Sequence[str]] = {}
        """Levels of the obs columns of a batch, in order; set by `models.build` before `attach`."""

    def known_levels(self, column: str) -> list[str]:
        """List the levels of an obs column except MISSING, in the order of their codes."""
        return [level for level in self.levels[column] if level != MISSING]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer, which makes values again from a part of a cell's counts."""
        return self.tokens.load()(self.tokens)

    def level_codes(self, batch: Batch, column: str) -> Tensor:
        """Return each cell's level code in an obs column, `(cells,)` int64: from 1, 0 if unknown.

        The level MISSING is 0 too: a cell without a value has no label, batch or perturbation.
        """
        assert batch.levels is not None, "the batch has no levels"
        codes: Tensor = batch.levels[:, [*self.levels].index(column)]
        levels = self.levels[column]
        if MISSING in levels:
            codes = codes.masked_fill(codes == 1 + levels.index(MISSING), 0)
        return codes

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        """Add heads to `model` on the meta device, as its attributes.

        `vocab_size` is the number of token ids, genes and special tokens.
        Return the names of all modules and parameters of the model that `loss` reads, including
        the heads. Those that `Model.begin` reads too are tied between the first and the last
        pipeline stage.
        """
        raise NotImplementedError

    def parts_by_name(self) -> "Mapping[str, Objective]":
        """Return the parts of a sum by name, or this objective under the name ""."""
        return {"": self}

    def validation_metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Compute the metrics in `metric_names` from `kept_sums` over all validation cells, `(n_sums,)`."""
        return {}

    def initial_value(self, name: str) -> Fill | None:
        """Return the function that fills a parameter added by `attach`; None for an unknown name."""
        return None

    def view(self, batch: Batch, *, seed: int, step: int) -> Batch:
        """Choose the tokens of a batch, on the CPU, that the model is given; by default all.

        An objective that `uses_hidden_genes` returns the views of its metrics at step HIDDEN_GENES_STEP.

        A pure function of (seed, step, cell) and the cell's counts in their order. A subclass of Batch
        carries what `prepare` needs of hidden tokens.
        """
        return batch

    def prepare(self, batch: Batch, *, seed: int, step: int) -> Any:
        """Draw masks and targets in a view.

        A pure function of its arguments and of `self.training`, which reads no parameters. The result
        has `lengths`, the tokens of each cell, list[int], and `n_targets`, int64: a scalar, or
        `(parts,)` with `part_weights`.
        """
        raise NotImplementedError

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: Any) -> Tensor:
        """Sum the loss over the targets, a float32 scalar, from the normed states `(T, H)`.

        An objective with `part_weights` returns one sum per part, `(parts,)`, each over its own targets:
        `n_targets` `(parts,)`.
        """
        raise NotImplementedError

    def coupled_rows(self, model: ObjectiveModel, states: Tensor, prepared: Any) -> Tensors:
        """Make the rows of a micro-batch for each table, `(n, width)` float32.

        A cell has at most one row. Its first number is not 0, since rows of zeros are empty slots of
        the global batch, whose rows training gathers. Of three cells, the second without a target:

            rows of the first micro-batch     [1, x] of cell 1
            rows of the second                [1, x] of cell 3
            table, with a slot per cell       [1, x] of cell 1, [1, x] of cell 3, zeros

        What `prepare` returned then gets the attribute `shares`, a `RowShare` for each table: `loss` adds
        `share.loss(rows)`. See `train.batch_rows`.
        """
        raise NotImplementedError

    def loss_of_coupled_rows(self, *tables: Tensor) -> Tensors:
        """Sum the loss of each table over its rows, `(slots, width)`, to a float scalar.

        Rows of zeros are empty slots. The order of rows has no effect.
        """
        raise NotImplementedError

    def observe(self, model: ObjectiveModel, prepared: Any) -> Tensors:
        """Return the tensors that `judge` compares, a row per target; batches are concatenated.

        For a loss over tokens, the first has the vocabulary row of each target's gene, `(targets,)`
        int64.
        """
        raise NotImplementedError

    def judged_labels(self) -> Mapping[str, Sequence[str]]:
        """List the labels that the model knows, by obs column.

        `evaluate` lists cells with other labels, and leaves them out of `judge`.
        """
        return {}

    def judge_observed(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Score the observed targets by `judge`; without a target, return only `n_targets`."""
        if observed and not len(observed[0]):
            return {"n_targets": 0}, []
        return self.judge(*observed, statistics=statistics)

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Score the observed targets: metrics, and verdicts against a baseline without a model.

        Metric `n_targets` is the number of targets, counted as in training. There is at least one.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class RowShare:
    """A micro-batch's share of the loss of a global batch over one table of coupled rows.

    `train.batch_rows` computes that loss (`Objective.loss_of_coupled_rows`) and its gradient once per
    step, before the micro-batches run.
    """

    value: Tensor  # float scalar: the loss, times the micro-batch's fraction of the rows
    gradient: Tensor  # `(n, width)` float32: of the loss, with respect to the micro-batch's rows

    def loss(self, rows: Tensor) -> Tensor:
        """Return `value` as a float32 scalar whose gradient with respect to `rows` is `gradient`."""
        product = (self.gradient * rows).sum()
        return (self.value + (product - product.detach())).float()


def value_loss(predicted: Tensor, values: Tensor, first_bin: int = 1) -> Tensor:
    """Sum the loss over N values: squared errors of `(N,)`, or cross-entropy of logits `(N, bins)`."""
    if predicted.ndim == 2:
        return F.cross_entropy(predicted, values - first_bin, reduction="sum")
    return (predicted - values).square().sum()


def expected_bins(logits: Tensor, first_bin: int = 1) -> Tensor:
    """Average the bins by their probabilities, from logits `(N, bins)` to `(N,)` float32."""
    bins = torch.arange(logits.shape[1], device=logits.device, dtype=logits.dtype)
    return logits.softmax(1) @ (bins + first_bin)


def r2_over(baseline_error: float, error: float) -> float | None:
    """Compute R² of a squared error over a baseline's; None for a baseline without error."""
    return 1 - error / baseline_error if baseline_error > 0 else None


def pearson(x: np.ndarray, y: np.ndarray) -> float | None:
    """Compute Pearson's r of `x` and `y`, `(n,)` float64 each; None if either is constant."""
    for values in (x, y):
        if values.var() <= MIN_VARIANCE_FRAC * np.square(values).mean():
            return None
    return float(np.corrcoef(x, y)[0, 1])


def cross_entropy_verdicts(name: str, baseline: str, difference: float) -> list[Verdict]:
    """Judge a difference of cross-entropies: a negative one is better than the baseline."""
    return [compare(name, baseline, "nats cross-entropy", difference, lower_is_better=True)]


def r2_verdicts(name: str, baseline: str, r2: float | None) -> list[Verdict]:
    """Judge an R² over a baseline; no verdict if it is undefined."""
    return [] if r2 is None else [compare(name, baseline, "R²", r2)]
