"""Task few_shot: its draws, and its scores by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from cellmill.config.parts.tasks import FewShotConfig
from cellmill.evaluate.features import Features
from cellmill.evaluate.labels import choose_cells
from cellmill.evaluate.tasks.classify import FEWEST_TESTED, FewShot, draw_shots
from tests.unit.evaluated import make_context


def test_each_class_gives_its_shots_and_all_others_are_tested() -> None:
    labels = np.array(["a"] * 12 + ["b"] * 9 + ["rare"] * 3)
    (_, train, test), (number, other, _) = draw_shots(labels, ["a", "b"], 4, draws=2, seed=0)
    assert number == 1
    assert sorted(labels[train]) == ["a"] * 4 + ["b"] * 4
    assert sorted([*train, *test]) == list(range(21))
    assert set(other) != set(train)


def test_scores_are_those_of_classifiers_that_saw_the_shots(
    tmp_path: Path, simulated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = make_context(tmp_path, simulated)
    scored = np.flatnonzero(context.scored)
    chosen = choose_cells(context.reader.obs["cell_type"].iloc[scored], 8, seed=4)
    labels = chosen.labels
    most = min(chosen.classes.values()) - FEWEST_TESTED  # of which every class keeps just enough for the test
    config = FewShotConfig(name="few_shot", shots=[3, most, most + 1, 500], draws=2, neighbors=15)
    result = FewShot(config).run(context)
    found = result.figures["n_classes"]
    assert (found["3"], found[str(most)], found["500"]) == (len(chosen.classes), len(chosen.classes), 0)
    assert found[str(most + 1)] < len(chosen.classes)
    counts = sp.vstack(list(context.reader.rows()), format="csr")[scored[chosen.cells]]
    features = Features(context).of(counts)
    expected: dict[str, list[float]] = {}
    for _, train, test in draw_shots(labels, list(chosen.classes), 3, draws=2, seed=4):
        for name, classifier in (
            ("logistic regression, unscaled", LogisticRegression(solver="newton-cg", max_iter=1000)),
            ("kNN", KNeighborsClassifier(3)),
        ):
            for kind in ("embedding", "all genes"):
                fitted = classifier.fit(features[kind][train], labels[train])
                accuracy = float((fitted.predict(features[kind][test]) == labels[test]).mean())
                expected.setdefault(f"{kind} + {name}", []).append(accuracy)
    rows = {row["name"]: row for row in result.rows}
    for name, accuracies in expected.items():
        assert rows[name]["3 per class_repetitions"] == pytest.approx(accuracies)
    assert result.metric == "3 per class"
    assert len(rows) == 4 * 3
    left_out = result.figures["classes_left_out"]
    assert (left_out["3"], left_out[str(most)], left_out["500"]) == ("none", "none", ", ".join(chosen.classes))
    assert result.verdicts[0].metric == "accuracy, 3 per class"
    json.dumps(result.to_json(), allow_nan=False)
