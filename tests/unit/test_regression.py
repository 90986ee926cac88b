"""Objective regression: the loss pearson against numpy."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.shards.obs import numbers_in
from cellmill.models.objectives.labels import anticorrelation


def test_the_loss_pearson_is_one_minus_the_correlation_of_the_cells() -> None:
    table = torch.zeros(12, 3)
    table[:9] = torch.from_numpy(np.random.default_rng(0).normal(size=(9, 3)))
    table[:9, 0] = 1
    table[:9, 2] += 0.5 * table[:9, 1]
    x, y = table[:9, 1].numpy(), table[:9, 2].numpy()
    assert anticorrelation(table).item() == pytest.approx(9 * (1 - np.corrcoef(x, y)[0, 1]), abs=1e-6)
    moved = table * torch.tensor([1.0, 3.0, 1.0]) + table[:, :1] * torch.tensor([0.0, 7.0, 0.0])
    assert anticorrelation(moved).item() == pytest.approx(anticorrelation(table).item(), abs=1e-6)


@pytest.mark.parametrize("loss", ["mse", "pearson"])
def test_the_judge_has_rank_correlation_and_errors_in_the_unit_of_the_column(loss: str) -> None:
    given = {"name": "regression", "target_column": "age", "loss": loss, "target_mean": 40.0, "target_std": 12.0}
    config, rng = ObjectiveConfig.model_validate(given), np.random.default_rng(0)
    numbers = rng.integers(0, 6, 50).astype(np.float32)  # many ties
    predicted = (numbers + rng.normal(0, 2, 50)).round(1).astype(np.float32)
    objective = config.load()(config, Tokens.model_validate({}))
    figures, _ = objective.judge(numbers, predicted, train=None)
    assert figures["spearman"] == pytest.approx(scipy.stats.spearmanr(numbers, predicted).statistic)
    assert figures["pearson"] == pytest.approx(scipy.stats.pearsonr(numbers, predicted).statistic)
    own = {name: figures.get(name) for name in ("root_mean_squared_error", "mean_absolute_error")}
    if loss == "pearson":  # predictions have no unit
        assert own == {"root_mean_squared_error": None, "mean_absolute_error": None}
        return
    ages, of_model = (40 + 12 * values.astype(np.float64) for values in (numbers, predicted))
    assert own["root_mean_squared_error"] == pytest.approx(((ages - of_model) ** 2).mean() ** 0.5)
    assert own["mean_absolute_error"] == pytest.approx(np.abs(ages - of_model).mean())


@pytest.mark.parametrize("n", [0, 1, 5])
def test_cells_that_do_not_differ_have_a_finite_gradient(n: int) -> None:
    table = torch.zeros(6, 3)
    table[:n] = torch.tensor([1.0, 0.3, 0.2])
    table[: n // 2, 2] = 0.8
    loss = anticorrelation(table.requires_grad_())
    loss.backward()
    assert loss.item() == pytest.approx(n)
    assert table.grad is not None
    assert table.grad.isfinite().all()


def test_text_is_a_number_only_where_a_reader_would_take_it_for_one() -> None:
    scores = pd.Categorical(["1.5", None, "-2e3", "nan"])
    np.testing.assert_array_equal(numbers_in(scores), [1.5, np.nan, -2000, np.nan])
    assert numbers_in(pd.Categorical(["1_2", "1_3", "2_1"])) is None
