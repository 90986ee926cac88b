"""Task leave_out: donors whole, on one side of each fold, and scores by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression

from cellmill.config.parts.tasks import LeaveOutConfig
from cellmill.evaluate.features import Features
from cellmill.evaluate.labels import choose_cells
from cellmill.evaluate.tasks.classify import LeaveOut, splits_of
from tests.unit.evaluated import make_context


@pytest.mark.parametrize(("most", "folds"), [(10, 4), (3, 3)])
def test_a_donor_is_tested_once_and_never_trained_on_then(most: int, folds: int) -> None:
    groups = pd.Series(["a", "b", None, "c", "d", "a", "b", "c", "d", "d"])
    splits = list(splits_of(groups, most))
    assert len(splits) == folds
    assert sorted(np.concatenate([test for _, test in splits])) == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    for train, test in splits:
        assert set(groups[train]) | set(groups[test]) == {"a", "b", "c", "d"}
        assert not set(groups[train]) & set(groups[test])
    assert list(splits_of(pd.Series(["a", "a", None]), most)) == []


def test_scores_are_those_of_classifiers_that_never_saw_the_donor(tmp_path: Path, simulated: Path) -> None:
    context = make_context(tmp_path, simulated)
    donors = pd.Series(np.arange(context.reader.n_obs) // 7 % 3, name="donor").astype(str)
    result = LeaveOut(LeaveOutConfig(name="leave_out", neighbors=5)).run(
        replace(context, roles={**context.roles, "donor": donors})
    )
    scored = np.flatnonzero(context.scored)
    chosen = choose_cells(context.reader.obs["cell_type"].iloc[scored], 3, seed=4)
    cells, labels = scored[chosen.cells], chosen.labels
    features = Features(context).of(sp.vstack(list(context.reader.rows()), format="csr")[cells])
    expected = {}
    for donor in sorted(set(donors)):
        test = (donors.iloc[cells] == donor).to_numpy()
        linear = LogisticRegression(solver="newton-cg", max_iter=1000)
        fitted = linear.fit(features["all genes"][~test], labels[~test])
        expected[donor] = float((fitted.predict(features["all genes"][test]) == labels[test]).mean())
    rows = {row["name"]: row for row in result.rows}
    of_row = rows["all genes + logistic regression, unscaled"]["accuracy, new donor_repetitions"]
    assert sorted(of_row) == pytest.approx(sorted(expected.values()))
    assert result.figures["donors"] == result.figures["donor_folds"] == 3
    assert result.metric == "accuracy, new donor"
    assert LeaveOut(LeaveOutConfig(name="leave_out")).run(context).skipped == "the dataset has no donor or batch column"
