"""Validation: metrics of the embedding against numpy, the best step, and the patience."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cellmill.config.load import check_options
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.run import Train
from cellmill.data.stream.batch import Batch
from cellmill.runs.collapse import advise_on_collapse
from cellmill.train.validation import Monitor, Progress, check_best_metric
from tests.checks import refused
from tests.models import model_on_cpu

WIDTH = 6
N = 200


class Mesh:
    """A mesh of one rank."""

    device = torch.device("cpu")
    pp = SimpleNamespace(size=lambda: 1)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _cells() -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors that know depth in part, and counts of one gene per cell."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(N, WIDTH, generator=generator) * torch.arange(1, WIDTH + 1)
    noise = torch.randn(N, generator=generator)
    return z, (5 + 0.1 * z[:, 0] + 0.05 * z[:, 3] + 0.1 * noise).exp().round().long()


def _metrics(z: torch.Tensor, counts: torch.Tensor) -> dict[str, float]:
    config = check_options(ObjectiveConfig, {"name": "masked_gene"}, "objective")
    objective = SimpleNamespace(config=config, parts_by_name=dict)
    model: Any = SimpleNamespace(vector_width=WIDTH, kept_vectors=None, objective=objective)
    monitor = Monitor(model)
    mesh = Mesh()
    for cells in torch.arange(len(z)).split(70):
        n = len(cells)
        ends = torch.arange(n + 1, dtype=torch.int32)
        batch = Batch(torch.full((n,), 2), torch.ones(n), ends, cells, counts[cells])
        with monitor.watching([batch]):
            # and cells of padding
            model.kept_vectors.append(torch.cat([z[cells], torch.full((3, WIDTH), 1e6)]))
        assert model.kept_vectors is None
    return monitor.line(mesh)


def test_metrics_equal_those_of_all_cells_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    z, counts = _cells()
    line = _metrics(z, counts)
    values = np.linalg.eigvalsh(np.cov(z.double().numpy().T, bias=True))
    share = values / values.sum()
    assert line["effective_rank"] == pytest.approx(np.exp(-(share * np.log(share)).sum()))
    depth = np.log(counts.numpy())
    features = np.column_stack([z.double().numpy(), np.ones(N)])
    left = depth - features @ np.linalg.lstsq(features, depth, rcond=None)[0]
    r2 = 1 - (left**2).sum() / ((depth - depth.mean()) ** 2).sum()
    assert line["depth_r2"] == pytest.approx(1 - (1 - r2) * (N - 1) / (N - WIDTH - 1))
    assert 0.3 < line["depth_r2"] < 0.95
    assert not capsys.readouterr().out
    assert set(_metrics(z[:9], counts)) == {"effective_rank"}
    assert _metrics(z[:1], counts) == {}, "metrics of a single cell"


def test_a_collapsed_embedding_is_warned_of_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellmill.train.validation.dist.get_rank", lambda: 0)
    z, counts = _cells()
    line = _metrics(z[:, :1] * torch.ones(WIDTH) + 1e-3 * z, counts)
    assert line["effective_rank"] < 1.1
    assert capsys.readouterr().out == (
        f"warning: the embedding of validation cells has effective rank {line['effective_rank']:.2f}: it has "
        "collapsed to one direction; lower train.lr, or choose objective cell_decoding\n"
    )


ADVERSARY = {"batch_column": "dataset", "batch_adversary": 1.0}
TWO_CLASSIFICATIONS = {
    "parts": {
        "hidden": {"name": "classification", "label_column": "b", "adversarial_scale": 0.1},
        "type": {"name": "classification", "label_column": "a"},
    }
}
FOR_CELLS = "choose family encoder or profile for embeddings, because objective next_gene is for generating cells"


@pytest.mark.parametrize(
    ("objective", "more", "said"),
    [
        ("masked_value", {}, "lower train.lr, or choose objective cell_decoding"),
        ("cell_decoding", {}, "lower train.lr"),
        ("cell_decoding", ADVERSARY, "lower objective.batch_adversary_scale, or train.lr"),
        ("next_gene", {}, FOR_CELLS),
        ("sum", TWO_CLASSIFICATIONS, "lower adversarial_scale of the objective, or train.lr"),
    ],
)
def test_advice_after_a_collapse_depends_on_the_objective(
    objective: str, more: dict[str, Any], said: str
) -> None:
    config = check_options(ObjectiveConfig, {"name": objective} | more, "objective")
    assert advise_on_collapse(config) == said


CASES: list[tuple[dict[str, Any], list[float], list[int], int | None]] = [
    # options, values, steps of best validations, step at which patience is over
    ({"early_stop_patience": 2}, [5, 4, 4, 3, 3.5, 3, 1], [1, 2, 4, 7], 6),
    ({"early_stop_patience": 2, "best_mode": "max"}, [1, 2, 1.5, 3, 3, 2, 9], [1, 2, 4, 7], 6),
    # slow progress is the best each time, and no improvement until it adds up to more than 0.5
    (
        {"early_stop_patience": 3, "early_stop_min_delta": 0.5},
        [3, 2.75, 2.5, 2.25, 2, 1.9, 1.8],
        [*range(1, 8)],
        7,
    ),
    ({"best_mode": "max"}, [5, 4, 3, 2, 1], [1], None),
]


@pytest.mark.parametrize(("options", "values", "best", "over"), CASES)
def test_the_best_step_survives_a_resume_at_any_validation(
    options: dict[str, Any], values: list[float], best: list[int], over: int | None
) -> None:
    train = Train.model_validate({"steps": 99} | options)
    progress = Progress()
    found = []
    ended = None
    for step, value in enumerate(values, start=1):
        progress = Progress(**(asdict(progress) | {"step": step, "val_loss": -value}))
        if progress.judge(value, train):
            found.append(step)
            assert (progress.best_step, progress.best_value, progress.best_val_loss) == (
                step,
                value,
                -value,
            )
        if ended is None and progress.patience_is_over(train):
            ended = step
    assert (found, ended) == (best, over)


def test_a_metric_that_no_validation_logs_is_refused() -> None:
    objective = model_on_cpu(
        9,
        None,
        objective="classification",
        label_column="a",
        levels={"a": ("x", "y")},
        hidden=8,
        heads=1,
        layers=1,
    ).objective
    for known in ("val_loss", "val_accuracy", "effective_rank"):
        check_best_metric(objective, known)
    with refused(
        "train.best_metric val_acuracy: validation of this objective does not log it; did you mean 'val_accuracy'?"
    ):
        check_best_metric(objective, "val_acuracy")
