"""Task map: accuracy, refusal and novelty by loops; a model that copies a baseline is level with it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.config.parts.tasks import MapConfig
from cellmill.evaluate.features.cell_features import compute_features, read_rows
from cellmill.evaluate.methods import TRAINING_COMPONENTS
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.classification.map import MapCells, NewTypeScores
from cellmill.runs.results import TaskResult

SMALL = {"neighbors": 5, "max_types": 2, "min_cells": 5}


def with_donors(context: Context, vectors: np.ndarray, n_donors: int = 4, **roles: Any) -> Context:
    n = context.reader.n_obs
    donors = pd.Series([f"d{number}" for number in np.arange(n) // 2 % n_donors], name="donor")
    return replace(context, vectors=vectors, roles={**context.roles, "donor": donors, **roles})


def run(context: Context, **options: Any) -> TaskResult:
    return MapCells(MapConfig.model_validate(SMALL | options)).run(context)


def score(result: TaskResult, method: str, column: str) -> float | None:
    (row,) = [row for row in result.rows if row.method.name == method]
    return row.value(column)


@pytest.fixture(scope="module")
def clustered(context: Context) -> Context:
    """Vectors of a cluster for each label."""
    codes = pd.factorize(context.roles["label"], sort=True)[0]
    draw = np.random.default_rng(0)
    centers = 4 * draw.normal(size=(codes.max() + 1, 16))
    vectors = centers[codes] + draw.normal(size=(len(codes), 16))
    return with_donors(context, vectors.astype(np.float32))


def test_votes_refusals_and_novelty_equal_those_of_loops(clustered: Context) -> None:
    result = run(clustered, refuse_frac=0.1)
    cells = np.flatnonzero(clustered.scored)
    labels = clustered.roles["label"].astype(str).to_numpy()[cells]
    donors = clustered.roles["donor"].to_numpy()[cells]
    vectors = clustered.vectors[cells].astype(np.float64)
    away = np.linalg.norm(vectors[:, None] - vectors, axis=2)
    np.fill_diagonal(away, np.inf)

    def map_by_loops(
        train: np.ndarray, test: np.ndarray
    ) -> tuple[list[str], list[float], list[bool]]:
        reference = []
        for cell in train:
            others = [other for other in train if donors[other] != donors[cell]]
            reference.append(np.mean(sorted(away[cell, others])[:5]))
        names, novelty, refused = [], [], []
        for cell in test:
            nearest = sorted(train, key=lambda other: away[cell, other])[:5]
            votes: dict[str, float] = {}
            for donor in sorted({donors[other] for other in nearest}):
                of_donor = [labels[other] for other in nearest if donors[other] == donor]
                for label in of_donor:
                    votes[label] = votes.get(label, 0) + 1 / len(of_donor)
            names.append(max(votes, key=lambda label: votes[label]))
            novelty.append(float(np.mean(away[cell, nearest])))
            n_nearer = sum(distance < novelty[-1] for distance in reference)
            refused.append(n_nearer >= 0.9 * (len(reference) + 1))
        return names, novelty, refused

    right, new_refused, areas = [], [], []
    types = pd.Series(labels).value_counts(sort=True).index
    types = sorted(types, key=lambda name: (-(labels == name).sum(), name))[:2]
    for donor in np.unique(donors):
        test = np.flatnonzero(donors == donor)
        train = np.flatnonzero(donors != donor)
        names, _, refused = map_by_loops(train, test)
        right += [name == label and not no for name, label, no in zip(names, labels[test], refused)]
        for name in types:
            is_new = labels[test] == name
            _, novelty, refused = map_by_loops(train[labels[train] != name], test)
            new_refused.append(np.mean(np.array(refused)[is_new]))
            areas.append(roc_auc_score(is_new, novelty))
    # float16 vectors move a few cells over a threshold
    row = "embedding + vote of donors"
    assert score(result, row, "accuracy") == pytest.approx(np.mean(right), abs=0.01)
    assert score(result, row, "refused, new type") == pytest.approx(np.mean(new_refused), abs=0.02)
    assert score(result, row, "novelty AUROC") == pytest.approx(np.mean(areas), abs=0.005)
    assert np.mean(areas) > 0.95
    known = result.figures["refused_of_known_types"]
    assert 0.02 < known[row] < 0.2
    assert known.keys() == {row.method.name for row in result.rows}


def test_a_verdict_names_the_role_that_is_left_out(clustered: Context) -> None:
    roles = {**clustered.roles, "batch": clustered.roles["donor"]}
    del roles["donor"]
    metrics = {verdict.metric for verdict in run(replace(clustered, roles=roles)).verdicts}
    assert "accuracy, batches not seen" in metrics
    assert "accuracy, donors not seen" not in metrics


def test_two_donors_decide_nothing(clustered: Context) -> None:
    result = run(with_donors(clustered, clustered.vectors, n_donors=2), max_types=3)
    assert {difference.n for difference in result.differences} == {2}
    assert {verdict.outcome for verdict in result.verdicts} == {"undecided"}


def test_units_of_new_types_are_those_that_were_tested() -> None:
    """Of five folds and four types, three folds tested two types: two units."""
    scores = NewTypeScores(5, ["a", "b", "c", "d"])
    is_new = np.array([True, False])
    result = SimpleNamespace(
        novelty=np.array([0.9, 0.1]), can_refuse=True, is_refused=np.array([True, False])
    )
    for fold, name in ((0, "a"), (1, "a"), (2, "d")):
        scores.record(fold, name, cast(Any, "method"), is_new, cast(Any, result))
    assert [column.n_units for column in scores.make_columns()] == [2, 2]


def test_refusals_of_a_type_of_one_donor_are_not_counted(clustered: Context) -> None:
    """A type that only the tested donor has is far from all others, so all its cells are refused."""
    options = {"refuse_frac": 0.01, "max_types": 1}
    row = "embedding + vote of donors"
    before = run(clustered, **options).figures["refused_of_known_types"][row]
    label = clustered.roles["label"].astype(str).to_numpy().astype(object)
    vectors = clustered.vectors.copy()
    is_new = (clustered.roles["donor"] == "d0").to_numpy() & (np.arange(len(label)) % 3 == 0)
    label[is_new] = "unheard"
    vectors[is_new] += 100
    own_type = replace(
        clustered,
        vectors=vectors,
        roles={**clustered.roles, "label": pd.Series(label, name="cell_type")},
    )
    after = run(own_type, **options).figures["refused_of_known_types"][row]
    assert after == pytest.approx(before, abs=0.02)


def test_references_of_a_regression_do_not_know_the_type(clustered: Context) -> None:
    noise = np.random.default_rng(1).normal(size=clustered.vectors.shape)
    mixed = replace(clustered, vectors=(0.3 * clustered.vectors + noise).astype(np.float32))
    result = run(mixed, refuse_frac=0.1)
    cells = np.flatnonzero(mixed.scored)
    labels = mixed.roles["label"].astype(str).to_numpy()[cells]
    donors = mixed.roles["donor"].to_numpy()[cells]
    vectors = mixed.vectors[cells].astype(np.float64)

    def fit_novelty(train: np.ndarray, test: np.ndarray) -> np.ndarray:
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        probabilities = model.fit(vectors[train], labels[train]).predict_proba(vectors[test])
        return np.asarray(1 - probabilities.max(1))

    shares = []
    for donor in np.unique(donors):
        for name in result.figures["types_left_out"].split(", "):
            train = (donors != donor) & (labels != name)
            by_donor = []
            for other in np.unique(donors[train]):
                is_other = donors == other
                by_donor.append(fit_novelty(train & ~is_other, train & is_other))
            reference = np.concatenate(by_donor)
            novelty = fit_novelty(train, (donors == donor) & (labels == name))
            n_less = (reference < novelty[:, None]).sum(1)
            shares.append((n_less >= 0.9 * (len(reference) + 1)).mean())
    found = score(result, "embedding + logistic regression", "refused, new type")
    assert found == pytest.approx(np.mean(shares), abs=0.005)


def test_a_copy_of_a_baseline_is_level_with_it(context: Context) -> None:
    cells = np.arange(context.reader.n_obs)
    counts = read_rows(context.reader, cells)
    components = compute_features(context, cells, counts, context.vectors)[TRAINING_COMPONENTS]
    result = run(with_donors(context, components.astype(np.float32)), max_types=1)
    for column in ("accuracy", "novelty AUROC"):
        for classifier in ("vote of donors", "logistic regression"):
            own = score(result, f"embedding + {classifier}", column)
            assert own == score(result, f"{TRAINING_COMPONENTS.name} + {classifier}", column)
    assert [verdict.outcome for verdict in result.verdicts if verdict.difference] == []


def test_terms_get_credit_for_their_superclasses(clustered: Context) -> None:
    names = ["T cell", "B cell", "neuron", "hepatocyte"]
    codes = pd.factorize(clustered.roles["label"], sort=True)[0]
    label = pd.Series([names[code] for code in codes], name="cell_type")
    vectors = 0.3 * clustered.vectors + np.random.default_rng(1).normal(
        size=clustered.vectors.shape
    )
    mixed = with_donors(clustered, vectors.astype(np.float32), label=label)
    result = run(mixed, max_types=1)
    row = "embedding + vote of donors"
    accuracy = score(result, row, "accuracy")
    credit = score(result, row, "credit")
    assert accuracy is not None
    assert credit is not None
    assert accuracy < credit < 1, "superclasses are partly right"


def test_an_atlas_without_the_label_that_is_no_term_climbs(clustered: Context) -> None:
    codes = pd.factorize(clustered.roles["label"], sort=True)[0]
    vectors = 0.3 * clustered.vectors + np.random.default_rng(1).normal(
        size=clustered.vectors.shape
    )
    mixed = with_donors(clustered, vectors.astype(np.float32))
    names = np.array(["T cell", "B cell", "neuron", "hepatocyte"], object)[codes]
    is_first = (mixed.roles["donor"] == "d0").to_numpy()
    names[is_first & (codes == 3)] = "unheard"
    mixed.roles["label"] = pd.Series(names, name="cell_type")  # type: ignore[index]
    result = run(mixed, max_types=1)
    row = "embedding + vote of donors"
    assert 0 < (score(result, row, "accuracy") or 0) < 1
    assert score(result, row, "credit") is None, "some label is no term"


def test_the_task_is_skipped_without_donors_or_labels(context: Context) -> None:
    with pytest.raises(Skipped, match=r"^the scored cells have no two donors or batches$"):
        run(context)
    with pytest.raises(Skipped, match=r"^the scored cells have no two donors or batches$"):
        run(with_donors(context, context.vectors, n_donors=1))
    with pytest.raises(Skipped, match=r"^the dataset has no label column$"):
        run(replace(context, roles={}))
    kinds = pd.Series(np.arange(context.reader.n_obs) // 2 % 2, name="kind").astype(str)
    message = r"^whichever fold of the 2 donors is left out, the other scored cells have one class$"
    with pytest.raises(Skipped, match=message):
        run(with_donors(context, context.vectors, n_donors=2, label=kinds))
    assert MapConfig().missing_role(["label"]) == "donor or batch"


@pytest.mark.full
def test_options_of_the_task_are_read(clustered: Context) -> None:
    before = run(clustered)
    for options in ({"neighbors": 25}, {"refuse_frac": 0.5}, {"most_folds": 2}, {"max_types": 4}):
        assert run(clustered, **options).rows != before.rows, options
    assert run(clustered) == before
