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
from cellmill.errors import DataError
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.perturbation import units as units_module
from cellmill.evaluate.tasks.perturbation.baselines import (
    predict_new_contexts,
    predict_new_perturbations,
)
from cellmill.evaluate.tasks.perturbation.change_scores import score_changes
from cellmill.evaluate.tasks.perturbation.folds import make_folds
from cellmill.evaluate.tasks.perturbation.gene_features import CO_EXPRESSION, prior_method
from cellmill.evaluate.tasks.perturbation.predictions import ChangePredictor
from cellmill.evaluate.tasks.perturbation.task import Perturbation
from cellmill.evaluate.tasks.perturbation.units import PerturbedUnits
from cellmill.runs.results import ScoredMethod
from tests.unit.evaluated import named
from tests.unit.small_corpus import read_obs

F = ScoredMethod("f")
CONFIG = PerturbationConfig(min_cells=4, seeds=2, top_genes=5)


@pytest.fixture(scope="module")
def screen(context: Context) -> Context:
    """Five perturbations and controls in two batches; two of the perturbations were not trained on."""
    names = [*context.model.vocabulary.symbols[:4], "unheard", "control"]
    number = np.arange(context.reader.n_obs)
    perturbation = pd.Series(np.array(names)[number % 6])
    scored = perturbation.isin(names[3:5]).to_numpy()
    in_first_batch = number // 6 % 2 == 1
    batch = pd.Series(np.where(in_first_batch, "x", "y"))
    roles = {"perturbation": perturbation, "batch": batch, "is_control": perturbation == "control"}
    return replace(context, roles=roles, scored=scored)


def test_scores_of_changes_equal_a_calculation_by_hand() -> None:
    measured = [
        [1.0, -1.0, 0.5, 9.0],
        [1.0, 1.0, 0.0, 0.0],
        [0.0, 3.0, 0.0, 0.0],
    ]
    predicted = [
        [2.0, -1.0, -0.1, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 1.0, 0.0, 0.0],
    ]
    perturbed = np.zeros((3, 4), bool)
    perturbed[0, 3] = True  # its own gene, the only one that changes much
    scores = score_changes(np.array(predicted), np.array(measured), perturbed, 2)
    assert scores["MAE"] == pytest.approx([1.6 / 3, 0.5, 0.5])
    pearson = np.corrcoef(predicted[0][:3], measured[0][:3])[0, 1]
    assert scores["Pearson"][0] == pytest.approx(pearson)
    assert np.isnan(scores["Pearson"]).tolist() == [False, True, False]
    assert scores["direction"][0] == 1
    assert scores["direction"][2] == 1
    assert scores["discrimination"][0] == 1
    # (0, 1, 0, 0) is 0.25 from the change of the second unit and 0.5 from its own
    assert scores["discrimination"][2] == 0.5
    predicted[2][1] = np.nan
    without = score_changes(np.array(predicted), np.array(measured), perturbed, 2)
    for metric, values in without.items():
        assert np.isnan(values[2]), metric
        np.testing.assert_array_equal(values[:2], scores[metric][:2])


def test_baselines_are_not_fitted_on_validation_perturbations(screen: Context) -> None:
    manifest = screen.model.manifest
    cells = screen.reader.obs_names
    perturbation = np.full(len(cells), "trained", object)
    perturbation[::3] = "control"
    for split, name in (("val", "validated"), ("test", "tested")):
        in_shards = read_obs(manifest, split).index
        names = [in_shard.partition(":")[2] for in_shard in in_shards]
        perturbation[cells.isin(names) & (perturbation != "control")] = name
    roles = {
        "perturbation": pd.Series(perturbation),
        "is_control": pd.Series(perturbation == "control"),
    }
    context = replace(screen, roles=roles, scored=perturbation == "tested")
    config = PerturbationConfig(held_out=["perturbation"], min_cells=4)
    held = PerturbedUnits.read(context, config, "perturbation")
    [(_, train, test)] = make_folds(held)
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
    mean = changes[:5].mean(0)
    # a unit without features has the mean
    np.testing.assert_array_equal(found["f + linear"][1], mean)
    # the others have the change of the unit with the most similar features, or the mean of two;
    # features are standardised over the units that have them, and compared by their cosine
    with_features = [0, 2, 3, 4]
    training = features[F][with_features]
    scaled = (features[F] - training.mean(0)) / training.std(0)
    for row in (0, 2):
        own = scaled[test[row]]
        cosines = {}
        for unit in with_features:
            product = own @ scaled[unit]
            cosines[unit] = product / np.linalg.norm(own) / np.linalg.norm(scaled[unit])
        second, first = sorted(with_features, key=cosines.__getitem__)[-2:]
        np.testing.assert_allclose(found["f + nearest"][row], changes[first])
        pair = (changes[first] + changes[second]) / 2
        np.testing.assert_allclose(found["f + kNN"][row], pair)
    one = named(predict_new_perturbations(changes, train, test, features, 1))
    np.testing.assert_array_equal(one["f + kNN"], found["f + nearest"])
    every = named(predict_new_perturbations(changes, train, test, features, 9))
    mean_with_features = changes[with_features].mean(0)
    for row in (0, 2):
        np.testing.assert_allclose(every["f + kNN"][row], mean_with_features)
    no_dose = np.full(8, "")
    contexts = named(predict_new_contexts(changes, train, test, names, no_dose, states))
    of_a = changes[[0, 2]].mean(0)
    predicted = contexts["same perturbation + mean"]
    np.testing.assert_allclose(predicted[0], of_a)
    # d is new
    np.testing.assert_allclose(predicted[2], mean)
    other = changes.copy()
    other[test] = 7.0
    again = named(predict_new_contexts(other, train, test, names, no_dose, states))
    for name, values in again.items():
        np.testing.assert_array_equal(values, contexts[name], "expression of tested units is read")


def test_genes_are_matched_by_id_symbol_or_alias() -> None:
    ids = ["ENSG00000115415", "ENSG00000173166"]
    symbols = ["STAT1", "RAPH1"]
    n_cells = np.ones(2, np.int64)
    medians = np.ones(2, np.float32)
    vocabulary = Vocabulary(ids, symbols, n_cells, medians)
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


def test_a_change_is_measured_within_batches(screen: Context) -> None:
    held = PerturbedUnits.read(screen, CONFIG, "perturbation")
    profiles = held.profiles
    assert len(held.group_of_unit) == 5
    assert set(held.group_of_unit[held.is_testable]) == {
        screen.model.vocabulary.symbols[3],
        "unheard",
    }
    # the first cell of an untrained perturbation has no stratum: its other cells count
    stratum = profiles.stratum.copy()
    stratum[held.unit_of_cell.tolist().index(3)] = -1
    changed = replace(profiles, stratum=stratum)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units_module, "read_profiles", lambda *_: changed)
        without = PerturbedUnits.read(screen, CONFIG, "perturbation")
    assert without.group_of_unit.tolist() == held.group_of_unit.tolist()
    assert without.is_testable.tolist() == held.is_testable.tolist()
    expression = profiles.expression.toarray()
    half = profiles.half
    n_starting = np.count_nonzero(half == 0)
    n_measured = np.count_nonzero(half == 1)
    assert abs(n_starting - n_measured) <= 2
    assert (half >= 0).tolist() == screen.roles["is_control"].tolist()
    changes = profiles.measure_changes(held.unit_of_cell, 5, profiles.average_controls(1))
    batch = screen.roles["batch"].to_numpy()
    for unit in range(5):
        changes_of_cells = []
        for cell in np.flatnonzero(held.unit_of_cell == unit):
            controls = (half == 1) & (batch == batch[cell])
            changes_of_cells.append(expression[cell] - expression[controls].mean(0))
        np.testing.assert_allclose(changes[unit], np.mean(changes_of_cells, axis=0), atol=1e-5)


def test_only_what_the_model_has_not_seen_is_tested(screen: Context) -> None:
    task = Perturbation(CONFIG)
    result = task.run(screen)
    assert result.figures["perturbation_folds"] == 1
    assert result.figures["perturbation_perturbations_tested"] == 2
    assert result.figures["perturbation_perturbations_with_a_gene"] == 4
    assert "saw cells of every group" in result.figures["batch_no_folds"]
    rows = {row.method.name: row for row in result.rows}
    assert rows["split halves"].method.kind == "ceiling"
    assert rows["embedding of genes + linear"].method.kind == "model"
    assert result.metric == "Pearson, new perturbation"
    assert {verdict.against for verdict in result.verdicts}.isdisjoint({"split halves"})
    [error] = [
        verdict
        for verdict in result.verdicts
        if verdict.metric == "mean absolute error, new perturbation"
    ]
    errors = {}
    for row in result.rows:
        if row.method.kind == "baseline":
            errors[row.method.name] = row.scores["MAE, new perturbation"].mean
    assert errors[error.against] == min(errors.values())
    assert result.lower_is_better == ["MAE, new perturbation"]
    # two perturbations are tested
    assert {verdict.outcome for verdict in result.verdicts} <= {"undecided", "level"}
    json.dumps(result.to_json(), allow_nan=False)
    assert {gap.model for gap in result.gaps} == {None}


def test_a_dataset_without_tested_perturbations_is_skipped(screen: Context) -> None:
    task = Perturbation(CONFIG)
    all_trained = replace(screen, scored=np.zeros_like(screen.scored))
    with pytest.raises(Skipped, match=r"shard\.split_by"):
        task.run(all_trained)
    only_batches = replace(screen, roles={"batch": screen.roles["batch"]})
    with pytest.raises(
        Skipped, match=r"^the dataset lacks a column of perturbations \(or conditions\), or"
    ):
        task.run(only_batches)
    is_control = screen.roles["is_control"].astype(str)
    as_text = replace(screen, roles={**screen.roles, "is_control": is_control})
    with pytest.raises(DataError, match=r"'is_control': expected True or False, got 'False'$"):
        task.run(as_text)
    is_control = screen.roles["is_control"].astype(int)
    is_control.iloc[-1] = 2
    as_number = replace(screen, roles={**screen.roles, "is_control": is_control})
    with pytest.raises(DataError, match=r"'is_control': expected True or False, got 2$"):
        task.run(as_number)


def test_a_role_that_is_not_scored_keeps_its_reason(screen: Context) -> None:
    without_batch = {name: column for name, column in screen.roles.items() if name != "batch"}
    result = Perturbation(CONFIG).run(replace(screen, roles=without_batch))
    assert result.rows
    assert result.figures["batch_no_folds"] == "held out batch: the dataset has no batch column"
    one_batch = pd.Series(np.full(screen.reader.n_obs, "x"))
    every_cell = np.ones_like(screen.scored)
    roles = {**screen.roles, "batch": one_batch}
    result = Perturbation(CONFIG).run(replace(screen, roles=roles, scored=every_cell))
    assert result.figures["batch_no_folds"] == (
        f"held out batch: expected two or more values of batch with {CONFIG.min_cells} cells or more (min_cells), got 1"
    )


@pytest.mark.parametrize(
    ("renamed", "role", "reason"),
    [
        ("perturbation", "donor", "the dataset has no donor column"),
        ("condition", "condition", "its values are the perturbations; hold out perturbation"),
    ],
)
def test_a_role_that_cannot_be_held_out_is_the_reason(
    screen: Context, renamed: str, role: str, reason: str
) -> None:
    roles = {name: column for name, column in screen.roles.items() if name != "perturbation"}
    roles[renamed] = screen.roles["perturbation"]
    config = PerturbationConfig.model_validate({"held_out": [role]})
    with pytest.raises(Skipped, match=f"^held out {role}: {reason}$"):
        Perturbation(config).run(replace(screen, roles=roles))


def test_an_unrelated_model_is_tested_on_all_perturbations(screen: Context) -> None:
    unrelated = replace(screen, scored=np.ones_like(screen.scored))
    result = Perturbation(CONFIG).run(unrelated)
    rows = {row.method.name: row for row in result.rows}
    gaps = {gap.column: gap for gap in result.gaps}
    assert result.figures["perturbation_folds"] == 2 * 3
    assert result.figures["batch_folds"] == 2
    assert {"same perturbation + mean", "mean"} <= set(rows)
    assert {gap.ceiling[0] for gap in result.gaps} == {"split halves"}
    assert gaps["Pearson, new perturbation"].zero[0] == "mean"
    name, error = gaps["MAE, new perturbation"].zero
    errors = {}
    for trivial in ("mean", "no change"):
        errors[trivial] = rows[trivial].scores["MAE, new perturbation"].mean
    assert error == pytest.approx(min(errors.values()))
    assert error == pytest.approx(errors[name])
    assert rows["best other perturbation"].method.kind == "ceiling"
    assert rows["best other perturbation"].value("Pearson, new batch") is None


def test_co_expression_uses_only_starting_controls(screen: Context) -> None:
    held = PerturbedUnits.read(screen, CONFIG, "perturbation")
    profiles = held.profiles
    loadings = ChangePredictor(held).features[CO_EXPRESSION]
    is_start = (profiles.half == 0) & (profiles.stratum >= 0)
    starts = profiles.expression[is_start].toarray().astype(float)
    varies = starts.std(0) > 0
    correlation = np.corrcoef(starts[:, varies].T)
    n_cells = len(starts)
    width = loadings.shape[1]
    assert width == min(50, n_cells - 1, len(profiles.genes) - 1)
    # the leading components of the correlation, largest first: (genes, width)
    values, vectors = np.linalg.eigh(correlation)
    largest = np.argsort(-values)[:width]
    scales = np.sqrt(values[largest].clip(0))
    leading = vectors[:, largest] * scales
    units = held.perturbation.tolist()
    of_genes = []
    expected = []
    for gene in range(4):
        of_genes.append(loadings[units.index(screen.model.vocabulary.symbols[gene])])
        [position] = np.flatnonzero(profiles.genes[varies] == gene)
        expected.append(leading[position])
    # products of loadings are correlations, of which components have no more than all
    products = np.inner(of_genes, of_genes) * (n_cells - 1) / n_cells
    np.testing.assert_allclose(products, np.inner(expected, expected), atol=1e-4)
    assert (np.diag(products) <= 1 + 1e-6).all()
    assert np.isnan(loadings[units.index("unheard")]).all()
    changed = profiles.expression.tolil()
    changed[np.flatnonzero(profiles.half != 0)] = 7.0
    changed_profiles = replace(profiles, expression=changed.tocsr())
    other = replace(held, profiles=changed_profiles)
    np.testing.assert_array_equal(ChangePredictor(other).features[CO_EXPRESSION], loadings)


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
    table.write_text(
        "gene\ta\tb\n"
        f"{symbols[0]}\t1\t0\n"
        f"{ids[1]}\t0\t1\n"
        "ENSG00000141510\t4\t4\n"
        "TP63\t2\t3\n"
        f"{symbols[2]}\t5\t6\n"
    )
    config = CONFIG.model_copy(update={"priors": {"string": str(table)}})
    held = PerturbedUnits.read(context, config, "perturbation")
    vectors = dict(zip(held.perturbation, ChangePredictor(held).features[prior_method("string")]))
    assert vectors[symbols[0]].tolist() == [1, 0]
    # found by the id of its gene, which the vocabulary lacks
    assert vectors["TP53"].tolist() == [4, 4]
    assert vectors["TP63 + " + symbols[1]].tolist() == [1, 2]  # the mean of its genes
    assert np.isnan(vectors[symbols[3]]).all()
    result = Perturbation(config).run(context)
    rows = {row.method.name: row for row in result.rows}
    for method in ("linear", "nearest", "kNN"):
        assert rows[f"prior string + {method}"].method.kind == "baseline"
    assert rows["co-expression of controls + kNN"].method.kind == "baseline"
    assert result.figures["perturbation_perturbations_with_prior string"] == 4
    assert result.figures["perturbation_perturbations_with_co-expression of controls"] == 4
    said = [note for note in result.notes if note.startswith("prior string + ")]
    assert len(said) == 4
    endings = ("new perturbation (", "new perturbation: undecided.")  # an interval, or the same
    assert all(" mean" in note and any(ending in note for ending in endings) for note in said)
    differences = {}
    for line in result.differences:
        differences[line.compared, line.against, line.column] = line.mean
    pairs = {(compared, against) for compared, against, _ in differences}
    assert ("prior string + linear", "mean") in pairs
    assert ("embedding of genes + linear", "prior string + linear") in pairs
    column = "MAE, new perturbation"
    own = rows["prior string + kNN"].scores[column].mean
    mean = rows["mean"].scores[column].mean
    difference = differences["prior string + kNN", "mean", column]
    assert difference == pytest.approx(own - mean)
    without = Perturbation(CONFIG).run(context)
    assert {row.method.name for row in without.rows if row.method.kind != "probe"} == {
        name for name in rows if not name.startswith(("prior ", "probe: "))
    }
    table.write_text("Q9Y6K9\t1\t2\n")
    with pytest.raises(
        DataError,
        match=r"string\.tsv: none of its 1 names is an Ensembl id or symbol of the vocabulary",
    ):
        Perturbation(config).run(context)


def test_a_combination_has_genes_at_any_delimiter(screen: Context, tmp_path: Path) -> None:
    symbols = screen.model.vocabulary.symbols
    table = tmp_path / "string.tsv"
    table.write_text(f"{symbols[0]}\t1\t0\n{symbols[3]}\t0\t1\n{symbols[1]}\t5\t6\n")
    results = []
    for delimiter in "+*":
        combination = f"{symbols[0]}{delimiter}{symbols[3]}"
        perturbation = screen.roles["perturbation"].replace({symbols[3]: combination})
        context = replace(screen, roles=screen.roles | {"perturbation": perturbation})
        options = {"combination_delimiter": delimiter, "priors": {"string": str(table)}}
        config = CONFIG.model_copy(update=options)
        held = PerturbedUnits.read(context, config, "perturbation")
        unit = held.perturbation.tolist().index(combination)
        assert sorted(held.genes[unit]) == [0, 3]
        assert ChangePredictor(held).features[prior_method("string")][unit].tolist() == [0.5, 0.5]
        results.append(Perturbation(config).run(context))
    assert results[0] == results[1]


def test_a_gene_named_as_a_control_word_keeps_its_gene(screen: Context) -> None:
    symbols = screen.model.vocabulary.symbols
    perturbation = screen.roles["perturbation"].replace({symbols[3]: "CTRL"})
    context = replace(screen, roles=screen.roles | {"perturbation": perturbation})
    units = PerturbedUnits.read(context, CONFIG, "perturbation")
    assert units.gene_names[units.perturbation.tolist().index("CTRL")] == ["CTRL"]


def test_an_informative_prior_predicts_what_the_mean_cannot() -> None:
    rng = np.random.default_rng(1)
    programs = rng.normal(size=(3, 40))
    features = rng.normal(size=(30, 3))
    changes = features @ programs + 0.1 * rng.normal(size=(30, 40))
    train = np.arange(24)
    test = np.arange(24, 30)
    found = named(predict_new_perturbations(changes, train, test, {F: features}, 3))
    errors = {name: np.abs(values - changes[test]).mean() for name, values in found.items()}
    assert errors["f + linear"] < 0.15
    assert 0.15 < errors["f + kNN"] < errors["mean"]
