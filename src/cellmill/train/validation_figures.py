"""Figures of an objective beside its validation loss, such as the accuracy of a classifier, from sums over cells."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cellmill.errors import ConfigError, did_you_mean
from cellmill.models.family import Model
from cellmill.models.objective import Objective
from cellmill.parallel.mesh import Mesh
from cellmill.parallel.pipeline_stages import PipelineStages
from cellmill.train.embedding_monitor import FIGURES
from cellmill.train.training_progress import VAL_LOSS


class ValidationFigures:
    """Figures of one validation. Every rank of the training has one."""

    def __init__(self, model: Model | PipelineStages) -> None:
        part: Any = model.parts[0] if isinstance(model, PipelineStages) else model
        last: Any = model.last if isinstance(model, PipelineStages) else model
        self.leaves: dict[str, Objective] = part.objective.leaves()
        self.kept: dict[str, Objective] = {} if last is None else last.objective.leaves()
        self.sums = {
            name: torch.zeros(leaf.n_sums, dtype=torch.float64) for name, leaf in self.leaves.items() if leaf.n_sums
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Add the cells whose losses are computed inside."""
        watched = {name: leaf for name, leaf in self.kept.items() if name in self.sums}
        for leaf in watched.values():
            leaf.kept_sums = []
        try:
            yield
        finally:
            for name, leaf in watched.items():
                for sums in leaf.kept_sums or ():
                    self.sums[name] += sums.double().cpu()
                leaf.kept_sums = None

    def line(self, mesh: Mesh) -> dict[str, float]:
        """Return the figures for metrics.jsonl, where they can be told. Collective: every rank."""
        line: dict[str, float] = {}
        for name, own in self.sums.items():
            # the last pipeline stage alone has sums, and `Mesh.sum` divides by the number of stages
            sums = mesh.sum(own.to(mesh.device) * mesh.pp.size()).tolist()
            figures = self.leaves[name].validation_figures(sums)
            line |= {_name(figure, name): value for figure, value in figures.items()}
        return line


def check_best_metric(objective: Objective, metric: str) -> None:
    """Raise ConfigError unless validation logs the metric of `train.best_metric`."""
    known = [VAL_LOSS, *(f"{VAL_LOSS}_{name}" for name in objective.parts)]
    known += [_name(figure, name) for name, leaf in objective.leaves().items() for figure in leaf.figure_names]
    known += FIGURES
    if metric not in known:
        raise ConfigError(
            f"train.best_metric {metric}: validation of this objective does not log it; {did_you_mean(metric, known)}"
        )


def _name(figure: str, part: str) -> str:
    return f"val_{figure}_{part}" if part else f"val_{figure}"
