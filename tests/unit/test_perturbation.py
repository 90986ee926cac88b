"""Task perturbation: changes by hand, what is held out, and that no test cell is used."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.data.genes.names import perturbed_genes
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.shards.reader import read_names
from cellmill.errors import DataError
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.changes import predict_new_contexts, predict_new_perturbations
from cellmill.evaluate.tasks.held_out import CO_EXPRESSION, HeldOut, prior_method
from cellmill.evaluate.tasks.perturbation import Perturbation, change_scores
from cellmill.runs.results import ScoredMethod
from tests.unit.evaluated import named

F = ScoredMethod("f")
CONFIG = PerturbationConfig(min_cells=4, seeds=2, top_genes=5)


@pytest.fixture(scope="module")
def screen(context: Context) -> Context:
    """Five perturbations and controls in two batches; two of the perturbations were not trained on."""
    names = [*context.model.vocabulary.symbols[:4], "unheard", "control"]
    perturbation = pd.Series([names[cell % 6] for cell in range(context.reader.n_obs)])
    scored = perturbation.isin(names[3:5]).to_numpy()
    batch = pd.Series(["x" if cell // 6 % 2 else "y" for cell in range(context.reader.n_obs)])
    roles = {"perturbation": perturbation, "batch": batch, "is_control": perturbation == "control"}
    return replace(context, roles=roles, scored=scored)


def test_scores_of_changes_by_hand() -> None:
    seen = np.array([[1.0, -1.0, 0.5, 9.0], [1.0, 1.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0]])
    predicted = np.array([[2.0, -1.0, -0.1, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    perturbed = np.zeros((3, 4), bool)
    perturbed[0, 3] = True  # its own gene, the only one that changes much
    scores = change_scores(predicted, seen, perturbed, 2)
    assert scores["MAE"] == pytest.approx([1.6 / 3, 0.5, 0.5])
    assert scores["Pearson"][0] == pytest.approx(np.corrcoef([2, -1, -0.1], [1, -1, 0.5])[0, 1])
    np.testing.assert_array_equal(np.isnan(scores["Pearson"]), [False, True, False])
    assert scores["direction"][[0, 2]].tolist() == [1, 1]
    # of the last, (0, 1, 0, 0) is 0.25 from the second's change and 0.5 from its own
    assert scores["discrimination"][[0, 2]].tolist() == [1, 0.5]


def test_baselines_are_not_fitted_on_validation_perturbations(screen: Context) -> None:
    manifest = screen.model.manifest
    names = {
        split: {
            name.partition(":")[2]
            for shard in manifest.splits[split].shards
            for name in read_names(manifest.shard_path(shard), "obs")
        }
        for split in ("train", "val", "test")
    }
    cells = screen.reader.obs.index
    perturbation = np.where(np.arange(len(cells)) % 3 == 0, "control", "trained").astype(object)
    for split, name in (("val", "validated"), ("test", "tested")):
        perturbation[cells.isin([*names[split]]) & (perturbation != "control")] = name
    roles = {
        "perturbation": pd.Series(perturbation),
        "is_control": pd.Series(perturbation == "control"),
    }
    context = replace(screen, roles=roles, scored=perturbation == "tested")
    config = PerturbationConfig(held_out=["perturbation"], min_cells=4)
    held = HeldOut.of(context, config, "perturbation")
    [(_, train, test)] = held.folds()
    assert {*held.perturbation} == {"trained", "validated", "tested"}
    assert held.perturbation[train].tolist() == ["trained"]
    assert held.perturbation[test].tolist() == ["tested"]


def test_predictions_are_means_of_training_units_by_hand() -> None:
    rng = np.random.default_rng(0)
    changes = rng.normal(size=(8, 30))
    features = {F: rng.normal(size=(8, 3))}
    features[F][[1, 6]] = np.nan
    names = np.array(list("ababcabd"))
    states = rng.normal(size=(8, 30))
    train = np.arange(5)
    test = np.arange(5, 8)
    found = named(predict_new_perturbations(changes, train, test, features, 2))
    # no features: the mean
    np.testing.assert_array_equal(found["f + linear"][1], changes[:5].mean(0))
    has = changes[[0, 2, 3, 4]]
    assert all((row == has).all(1).any() for row in found["f + nearest"][[0, 2]])
    pairs = {tuple((a + b) / 2) for number, a in enumerate(has) for b in has[number + 1 :]}
    assert all(any(np.allclose(row, pair) for pair in pairs) for row in found["f + kNN"][[0, 2]])
    one = named(predict_new_perturbations(changes, train, test, features, 1))
    np.testing.assert_array_equal(one["f + kNN"], found["f + nearest"])
    every = named(predict_new_perturbations(changes, train, test, features, 9))
    np.testing.assert_allclose(every["f + kNN"][[0, 2]], [has.mean(0)] * 2)
    contexts = named(predict_new_contexts(changes, train, test, names, states))
    np.testing.assert_allclose(contexts["same perturbation + mean"][0], changes[[0, 2]].mean(0))
    # d is new
    np.testing.assert_allclose(contexts["same perturbation + mean"][2], changes[:5].mean(0))
    other = np.where(np.isin(np.arange(8), test)[:, None], 7.0, changes)
    again = named(predict_new_contexts(other, train, test, names, states))
    for name, predicted in again.items():
        np.testing.assert_array_equal(predicted, contexts[name], "of expression of tested units")


def test_genes_are_matched_by_id_symbol_or_alias() -> None:
    ids = ["ENSG00000115415", "ENSG00000173166"]
    symbols = ["STAT1", "RAPH1"]
    vocabulary = Vocabulary(ids, symbols, np.ones(2, np.int64), np.ones(2, np.float32))
    found = perturbed_genes(
        ["STAT1+RAPH1", "ENSG00000115415", "ISGF-3", "nothing", "nothing + STAT1"], vocabulary
    )
    assert found == {
        "STAT1+RAPH1": [0, 1],
        "ENSG00000115415": [0],
        "ISGF-3": [0],
        "nothing": [],
        "nothing + STAT1": [0],
    }


def test_a_change_is_measured_within_batches(
    screen: Context,
) -> None:
    held = HeldOut.of(screen, CONFIG, "perturbation")
    profiles = held.profiles
    assert len(held.group) == 5
    assert set(held.group[held.unseen]) == {screen.model.vocabulary.symbols[3], "unheard"}
    # the first cell of an untrained perturbation has no stratum: its other cells count
    none = np.where(
        np.arange(len(profiles.stratum)) == held.unit_of_cell.tolist().index(3),
        -1,
        profiles.stratum,
    )
    without = HeldOut.of(screen, CONFIG, "perturbation", replace(profiles, stratum=none))
    assert (without.group.tolist(), without.unseen.tolist()) == (
        held.group.tolist(),
        held.unseen.tolist(),
    )
    known = profiles.expression.toarray()
    half = profiles.half
    assert abs(int((half == 0).sum()) - int((half == 1).sum())) <= 2
    assert (half >= 0).tolist() == screen.roles["is_control"].tolist()
    found = profiles.changes(held.unit_of_cell, 5, profiles.control_means(1))
    batch = screen.roles["batch"].to_numpy()
    for unit in range(5):
        cells = np.flatnonzero(held.unit_of_cell == unit)
        of_cells = [
            known[cell] - known[(half == 1) & (batch == batch[cell])].mean(0) for cell in cells
        ]
        np.testing.assert_allclose(found[unit], np.mean(of_cells, axis=0), atol=1e-5)


def test_only_what_the_model_has_not_seen_is_tested(screen: Context) -> None:
    task = Perturbation(CONFIG)
    result = task.run(screen)
    assert result.figures["perturbation_folds"] == 1
    assert result.figures["perturbation_perturbations_tested"] == 2
    assert result.figures["perturbation_perturbations_with_a_gene"] == 4
    assert "saw cells of each" in result.figures["batch_no_folds"]
    rows = {row.method.name: row for row in result.rows}
    assert rows["split halves"].method.kind == "ceiling"
    assert rows["embedding of genes + linear"].method.kind == "model"
    assert result.metric == "Pearson, new perturbation"
    assert {verdict.against for verdict in result.verdicts}.isdisjoint({"split halves"})
    error = next(
        verdict
        for verdict in result.verdicts
        if verdict.metric == "mean absolute error, new perturbation"
    )
    means = {
        row.method.name: row.scores["MAE, new perturbation"].mean
        for row in result.rows
        if row.method.kind == "baseline"
    }
    assert means[error.against] == min(means.values())
    # two perturbations are tested
    assert {verdict.outcome for verdict in result.verdicts} <= {"undecided", "level"}
    json.dumps(result.to_json(), allow_nan=False)
    assert {gap.model for gap in result.gaps} == {None}
    for change, reason in (
        ({"scored": np.zeros_like(screen.scored)}, r"shard\.split_by"),
        (
            {"roles": {"batch": screen.roles["batch"]}},
            r"^the dataset has no perturbation and control columns$",
        ),
    ):
        with pytest.raises(Skipped, match=reason):
            task.run(replace(screen, **change))
    as_text = replace(
        screen, roles={**screen.roles, "is_control": screen.roles["is_control"].astype(str)}
    )
    with pytest.raises(DataError, match=r"'is_control': expected True or False, got 'False'$"):
        task.run(as_text)


def test_an_unrelated_model_is_tested_on_all_perturbations(
    screen: Context,
) -> None:
    result = Perturbation(CONFIG).run(replace(screen, scored=np.ones_like(screen.scored)))
    rows = {row.method.name: row for row in result.rows}
    gaps = {gap.column: gap for gap in result.gaps}
    assert (result.figures["perturbation_folds"], result.figures["batch_folds"]) == (2 * 3, 2)
    assert {"same perturbation + mean", "mean"} <= set(rows)
    assert {gap.ceiling[0] for gap in result.gaps} == {"split halves"}
    assert gaps["Pearson, new perturbation"].zero[0] == "mean"
    name, error = gaps["MAE, new perturbation"].zero
    trivial = {
        name: rows[name].scores["MAE, new perturbation"].mean for name in ("mean", "no change")
    }
    assert error == pytest.approx(min(trivial.values())) == pytest.approx(trivial[name])
    assert rows["best other perturbation"].method.kind == "ceiling"
    assert rows["best other perturbation"].value("Pearson, new batch") is None


def test_co_expression_uses_only_starting_controls(screen: Context) -> None:
    held = HeldOut.of(screen, CONFIG, "perturbation")
    profiles = held.profiles
    found = held.features[CO_EXPRESSION]
    starts = (
        profiles.expression[(profiles.half == 0) & (profiles.stratum >= 0)].toarray().astype(float)
    )
    spread = starts.std(0)
    correlation = np.corrcoef(starts[:, spread > 0].T)
    n = len(starts)
    rows = [
        held.perturbation.tolist().index(screen.model.vocabulary.symbols[gene]) for gene in range(4)
    ]
    place = [np.flatnonzero(profiles.genes[spread > 0] == gene)[0] for gene in range(4)]
    # loadings whose products are the correlation, as far as their components go: never more of a
    # gene than all of it
    assert found.shape[1] == min(50, n - 1, len(profiles.genes) - 1)
    products = found[rows] @ found[rows].T * (n - 1) / n
    expected = correlation[np.ix_(place, place)]
    values, vectors = np.linalg.eigh(correlation)
    leading = vectors[:, ::-1][:, : found.shape[1]] * np.sqrt(
        values[::-1][: found.shape[1]].clip(0)
    )
    np.testing.assert_allclose(products, leading[place] @ leading[place].T, atol=1e-4)
    assert (np.diag(products) <= np.diag(expected) + 1e-6).all()
    assert np.isnan(found[held.perturbation.tolist().index("unheard")]).all()
    changed = profiles.expression.tolil()
    changed[np.flatnonzero(profiles.half != 0)] = 7.0
    other = replace(held, profiles=replace(profiles, expression=changed.tocsr()))
    np.testing.assert_array_equal(other.features[CO_EXPRESSION], found)


def test_a_prior_may_have_unmeasured_genes(screen: Context, tmp_path: Path) -> None:
    symbols = screen.model.vocabulary.symbols
    ids = screen.model.vocabulary.gene_ids
    perturbation = screen.roles["perturbation"].replace(
        {symbols[1]: "TP63 + " + symbols[1], "unheard": "TP53"}
    )
    context = replace(
        screen,
        scored=np.ones_like(screen.scored),
        roles=screen.roles | {"perturbation": perturbation},
    )
    table = tmp_path / "string.tsv"
    lines = [
        (symbols[0], 1, 0),
        (ids[1], 0, 1),
        ("ENSG00000141510", 4, 4),
        ("TP63", 2, 3),
        (symbols[2], 5, 6),
    ]
    table.write_text("gene\ta\tb\n" + "".join("\t".join(map(str, line)) + "\n" for line in lines))
    config = CONFIG.model_copy(update={"priors": {"string": str(table)}})
    held = HeldOut.of(context, config, "perturbation")
    vectors = dict(zip(held.perturbation, held.features[prior_method("string")]))
    assert vectors[symbols[0]].tolist() == [1, 0]
    # found by the id of its gene, which the vocabulary lacks
    assert vectors["TP53"].tolist() == [4, 4]
    assert vectors["TP63 + " + symbols[1]].tolist() == [1, 2]  # the mean of its genes
    assert np.isnan(vectors[symbols[3]]).all()
    result = Perturbation(config).run(context)
    rows = {row.method.name: row for row in result.rows}
    assert {
        rows[f"prior string + {method}"].method.kind for method in ("linear", "nearest", "kNN")
    } == {"baseline"}
    assert rows["co-expression of controls + kNN"].method.kind == "baseline"
    assert result.figures["perturbation_perturbations_with_prior string"] == 4
    assert result.figures["perturbation_perturbations_with_co-expression of controls"] == 4
    said = [note for note in result.notes if note.startswith("prior string + ")]
    assert len(said) == 4
    assert all(" mean" in note and "new perturbation (" in note for note in said)
    pairs = {(line.compared, line.against) for line in result.differences}
    assert {
        ("prior string + linear", "mean"),
        ("embedding of genes + linear", "prior string + linear"),
    } <= pairs
    line = next(
        of
        for of in result.differences
        if of.compared == "prior string + kNN" and of.column[:3] == "MAE"
    )
    means = [
        rows[name].scores["MAE, new perturbation"].mean for name in ("prior string + kNN", "mean")
    ]
    assert line.mean == pytest.approx(means[0] - means[1])
    without = Perturbation(CONFIG).run(context)
    assert {row.method.name for row in without.rows} == {
        name for name in rows if not name.startswith("prior ")
    }
    table.write_text("Q9Y6K9\t1\t2\n")
    with pytest.raises(
        DataError,
        match=r"string\.tsv: none of its 1 names is an Ensembl id or symbol of the vocabulary",
    ):
        Perturbation(config).run(context)


def test_an_informative_prior_predicts_what_the_mean_cannot() -> None:
    rng = np.random.default_rng(1)
    programs = rng.normal(size=(3, 40))
    features = rng.normal(size=(30, 3))
    changes = features @ programs + 0.1 * rng.normal(size=(30, 40))
    found = predict_new_perturbations(changes, np.arange(24), np.arange(24, 30), {F: features}, 3)
    error = named({name: np.abs(values - changes[24:]).mean() for name, values in found.items()})
    assert error["f + linear"] < 0.15 < error["f + kNN"] < error["mean"]
