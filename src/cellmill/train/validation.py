"""Metrics that validation logs in addition to its loss, and the progress of a training.

Embedding metrics say how many directions it uses, and how much of it is sequencing depth or batch.
Each rank keeps only sums over its cells: with vectors z and log depths d, the number of cells and
the sums of z, z z^T, z d, d and d^2; and for each batch (a level of an obs column) the number of
cells and the sum of z. Source: Roy & Vetterli 2007 (effective rank, here of the covariance's
eigenvalues).
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cellmill.config.run import Train
from cellmill.data.stream.batch import Batch
from cellmill.errors import ConfigError, did_you_mean
from cellmill.models.family import Model
from cellmill.models.objective import Objective
from cellmill.parallel.mesh import Mesh, PipelineStages, any_part, last_part
from cellmill.runs.collapse import COLLAPSED, advise_on_collapse
from cellmill.runs.folder import cut_back

MAX_WIDTH = 2048  # the sums have width^2 numbers
VAL_LOSS = "val_loss"


class Monitor:
    """Metrics of embedding and objective in one validation; every rank of the training has one."""

    def __init__(
        self,
        model: Model | PipelineStages,
        levels: Mapping[str, Sequence[str]] = MappingProxyType({}),
        batch_column: str | None = None,
        best_metric: str = VAL_LOSS,
    ) -> None:
        self.model = any_part(model)
        self.last = last_part(model)
        self.width: int = self.model.vector_width if self.model.vector_width <= MAX_WIDTH else 0
        self.column = None if batch_column is None else [*levels].index(batch_column)
        self.sums = torch.zeros(self.width * (self.width + 2) + 3, dtype=torch.float64)
        n_levels = 0 if batch_column is None else len(levels[batch_column])
        self.level_sums = torch.zeros(n_levels, self.width + 1, dtype=torch.float64)
        """Number of cells and sum of vectors, by level."""
        self.parts: dict[str, Objective] = {}
        self.hiding: set[str] = set()  # those with metrics of hidden genes
        self.part_sums: dict[str, Tensor] = {}
        for name, part in self.model.objective.parts_by_name().items():
            metrics = [_name(metric, name) for metric in part.metric_names]
            if not part.n_sums or (part.uses_hidden_genes and best_metric not in metrics):
                continue
            self.parts[name] = part
            self.part_sums[name] = torch.zeros(part.n_sums, dtype=torch.float64)
            if part.uses_hidden_genes:
                self.hiding.add(name)

    @contextmanager
    def watching(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Add the cells of `batches`, whose losses are computed inside in this order."""
        if self.last is None:
            yield
            return
        vectors: list[Tensor] = []
        self.last.kept_vectors = vectors if self.width else None
        try:
            with self._collecting(self.parts.keys() - self.hiding):
                yield
        finally:
            self.last.kept_vectors = None
        for batch_vectors, batch in zip(vectors, batches):
            self._add(batch_vectors, batch)

    def watching_hidden_genes(self) -> AbstractContextManager[None]:
        """Add cells whose losses are computed inside, in views of step HIDDEN_GENES_STEP."""
        return self._collecting(self.hiding)

    @contextmanager
    def _collecting(self, names: Collection[str]) -> Iterator[None]:
        """Add the sums of these parts of the objective."""
        parts: dict[str, Objective] = {}
        if names and self.last is not None:
            watched = self.last.objective.parts_by_name()
            parts = {name: watched[name] for name in names}
        for part in parts.values():
            part.kept_sums = []
        try:
            yield
        finally:
            for name, part in parts.items():
                for sums in part.kept_sums or ():
                    self.part_sums[name] += sums.double().cpu()
                part.kept_sums = None

    def _add(self, vectors: Tensor, batch: Batch) -> None:
        # (cells, width); vectors after those of the batch's cells are of padding
        z = vectors[: len(batch.lengths)].double().cpu()
        lengths = torch.tensor(batch.lengths, dtype=torch.int64)
        depth = lengths.double()  # detected genes, if batches have no counts
        if batch.counts is not None:
            cell = torch.repeat_interleave(lengths)
            depth = torch.zeros_like(depth).index_add(0, cell, batch.counts.double())
        d = depth.clamp(min=1).log()
        n = z.new_tensor([len(z)])
        outer = (z.T @ z).flatten()
        self.sums += torch.cat([n, z.sum(0), outer, d @ z, d.sum()[None], (d @ d)[None]])
        if self.column is not None and batch.levels is not None:
            counted = torch.cat([torch.ones(len(z), 1, dtype=torch.float64), z], dim=1)
            self.level_sums.index_add_(0, batch.levels[:, self.column] - 1, counted)

    def line(self, mesh: Mesh) -> dict[str, float]:
        """Return the metrics for metrics.jsonl that can be computed. Collective over all ranks.

        Rank 0 warns of a collapsed embedding.
        """

        def add_up(local: Tensor) -> Tensor:
            # only the last pipeline stage has sums, and `Mesh.sum` divides by the number of stages
            return mesh.sum(local.to(mesh.device) * mesh.pp.size())

        line: dict[str, float] = {}
        for name, part in self.parts.items():
            metrics = part.validation_metrics(add_up(self.part_sums[name]).tolist())
            line |= {_name(metric, name): value for metric, value in metrics.items()}
        sums = add_up(torch.cat([self.sums, self.level_sums.flatten()])).cpu()
        cells, levels = sums.split([self.sums.numel(), self.level_sums.numel()])
        line |= _embedding_metrics(cells, self.width) | _batch_metrics(cells, levels, self.width)
        if line.get("effective_rank", COLLAPSED) < COLLAPSED and dist.get_rank() == 0:
            print(
                f"warning: the embedding of validation cells has effective rank {line['effective_rank']:.2f}: it has "
                f"collapsed to one direction; {advise_on_collapse(self.model.objective.config)}",
                flush=True,
            )
        return line


def _embedding_metrics(sums: Tensor, width: int) -> dict[str, float]:
    """Return metrics from the sums over all ranks; none for fewer than two cells.

    effective_rank is the exponential of the entropy of the covariance's eigenvalues: the number of
    directions. depth_r2 is R² of a linear regression of log depth on the vectors, adjusted for
    their width, if there are more than 2 * `width` cells.
    """
    n = float(sums[0])
    if n < 2:
        return {}
    means = sums[1:].div(n).split([width, width * width, width, 2])
    mean, outer, with_depth, (depth, squared_depth) = means
    covariance = outer.view(width, width) - mean.outer(mean)
    values, directions = torch.linalg.eigh(covariance)
    positive = values.clamp(min=0)
    shares = positive / positive.sum().clamp(min=1e-300)
    entropy = -torch.special.xlogy(shares, shares).sum()
    line = {"effective_rank": float(entropy.exp())}
    variance = float(squared_depth - depth**2)
    if variance > 0 and n > 2 * width:
        is_used = values > values.max() * 1e-9
        with_directions = directions.T @ (with_depth - mean * depth)
        explained = float((with_directions[is_used].square() / values[is_used]).sum()) / variance
        line["depth_r2"] = 1 - (1 - explained) * (n - 1) / (n - width - 1)
    return line


def _batch_metrics(sums: Tensor, level_sums: Tensor, width: int) -> dict[str, float]:
    """Return batch_r2, the share of the embedding's variance between batches, if it is defined."""
    if not len(level_sums) or not width or sums[0] < 2:
        return {}
    n, level_totals = level_sums.view(-1, width + 1).split([1, width], dim=1)
    center = sums[1 : width + 1] / sums[0]
    outer = sums[width + 1 :][: width * width].view(width, width)
    total = float(outer.trace() - sums[0] * center @ center)
    level_means = level_totals / n.clamp(min=1)
    between = float((n * (level_means - center).square()).sum())
    return {"batch_r2": between / total} if total > 0 else {}


@dataclass
class Progress:
    """Progress of a run; saved in every checkpoint."""

    step: int = 0
    cells: int = 0
    logged_steps: int = 0  # steps with a line in metrics.jsonl
    wall_s: float = 0.0
    train_loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None  # at `best_step`
    best_step: int | None = None
    val_step: int | None = None
    skipped_steps: int = 0  # steps whose loss or gradient norm was not finite
    skipped_in_a_row: int = 0  # without steps skipped because the loss scale was too large
    loss_scale: float | None = None
    good_steps: int = 0  # steps applied since the loss scale last changed
    best_value: float | None = None  # `train.best_metric` at `best_step`
    patience_value: float | None = None
    """Value to improve on by more than `train.early_stop_min_delta`."""
    stale_validations: int = 0  # validations since the last improvement

    def forget_best(self) -> None:
        """Forget the best validation: later ones are over other cells and cannot be compared with it."""
        self.best_step = None
        self.best_value = None
        self.best_val_loss = None
        self.patience_value = None
        self.stale_validations = 0

    def judge(self, value: float, train: Train) -> bool:
        """Take the value of `train.best_metric` after this step, and return whether it is the best."""
        sign = 1 if train.best_mode == "min" else -1
        improves = self.patience_value is None
        if self.patience_value is not None:
            improves = sign * (self.patience_value - value) > train.early_stop_min_delta
        if improves:
            self.patience_value = value
            self.stale_validations = 0
        else:
            self.stale_validations += 1
        if self.best_value is not None and sign * value >= sign * self.best_value:
            return False
        self.best_value = value
        self.best_val_loss = self.val_loss
        self.best_step = self.step
        return True

    def patience_is_over(self, train: Train) -> bool:
        """Return whether the run ends here by `train.early_stop_patience`."""
        patience = train.early_stop_patience
        return patience is not None and self.stale_validations >= patience

    def end_line(self, metric: str) -> str:
        """Return the line about a run that ends by its patience."""
        return (
            f"step {self.step}: {metric} has not improved in {self.stale_validations} validations (best "
            f"{self.best_value:.6g} at step {self.best_step}); the training ends here (train.early_stop_patience)"
        )


def read_progress(state: dict[str, Any], train: Train, n_val_cells: int) -> Progress:
    """Read the progress in the state of a checkpoint.

    If `train.val_cells` has changed, later validations may be over other cells. The best one so far is then
    forgotten, with a warning on the first rank. `n_val_cells` is the number of cells of a validation now.
    """
    progress = Progress(**state["progress"])
    before = state["options"]["train"].get("val_cells")
    # both numbers may be larger than the number of validation cells of the shards
    had_all = before is None or before >= n_val_cells
    has_all = train.val_cells is None or train.val_cells > n_val_cells
    is_same = before == train.val_cells or (had_all and has_all)
    if not is_same and progress.best_step is not None:
        progress.forget_best()
        if dist.get_rank() == 0:
            warn(
                f"train.val_cells is {train.val_cells}, and was {before} up to step {progress.step}: the best "
                "checkpoint and patience are judged by validations from here on only"
            )
    return progress


def cut_curve(metrics: Path, progress: Progress) -> None:
    """Remove the lines of metrics.jsonl after the step of a checkpoint. Warn if earlier lines are missing."""
    missing = progress.logged_steps - cut_back(metrics, progress.step)
    if missing > 0:
        warn(
            f"{metrics}: expected {progress.logged_steps} logged steps up to step {progress.step}, {missing} are "
            "missing (damaged or deleted); stop, restore the file from a copy and run the same command again, or the "
            "curve keeps the gap"
        )


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def check_best_metric(objective: Objective, metric: str) -> None:
    """Raise ConfigError unless validation logs the metric of `train.best_metric`."""
    logged = [VAL_LOSS, *(f"{VAL_LOSS}_{name}" for name in objective.part_weights)]
    for name, part in objective.parts_by_name().items():
        logged += [_name(metric, name) for metric in part.metric_names]
    logged += ["effective_rank", "depth_r2", "batch_r2"]
    if metric not in logged:
        raise ConfigError(
            f"train.best_metric {metric}: validation of this objective does not log it; {did_you_mean(metric, logged)}"
        )


def _name(metric: str, part: str) -> str:
    return f"val_{metric}_{part}" if part else f"val_{metric}"
