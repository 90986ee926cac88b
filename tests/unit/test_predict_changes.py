"""Predicted expression for other packages: what the task scores, of no tested cell, as cells with
these means.
"""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from scipy.stats import false_discovery_control, mannwhitneyu

from cellmill.config.options import EvaluateOptions
from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.data.genes.names import perturbed_genes
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.task import Context, run_task
from cellmill.evaluate.tasks.perturbation.change_scores import METRICS, score_changes
from cellmill.evaluate.tasks.perturbation.changes_file import write_changes
from cellmill.evaluate.tasks.perturbation.folds import make_folds
from cellmill.evaluate.tasks.perturbation.predictions import ChangePredictor
from cellmill.evaluate.tasks.perturbation.task import Perturbation
from cellmill.evaluate.tasks.perturbation.units import PerturbedUnits
from cellmill.stages import evaluate as predict_changes
from tests.unit.evaluated import BRIDGES, make_context, run_bridge, with_obs

CONFIG = PerturbationConfig(held_out=["perturbation"], min_cells=4, seeds=2, top_genes=5)
RESPONSE = {
    "family": "profile",
    "heads": None,
    "layers": 1,
    "objective": "perturbation_response",
    "perturbation_column": "guide",
    "control": "control",
    "levels": {"guide": ("control",)},
}


@pytest.fixture(scope="module")
def screen(tmp_path_factory: pytest.TempPathFactory, corpus: dict[str, Path]) -> Context:
    """Seven perturbations and controls in two batches of unequal size; five of them were not
    trained on.
    """
    context = make_context(tmp_path_factory.mktemp("screen"), corpus, **RESPONSE)
    n_obs = context.reader.n_obs
    symbols = context.model.vocabulary.symbols
    names = [*symbols[:6], "unheard", "control"]
    number = np.arange(n_obs) % 8
    perturbation = pd.Series(np.array(names)[number])
    in_first_batch = np.arange(n_obs) // 8 % 3 * number % 5 > 0
    batch = pd.Series(np.where(in_first_batch, "x", "y"))
    roles = {"perturbation": perturbation, "batch": batch, "is_control": perturbation == "control"}
    scored = perturbation.isin(names[2:7]).to_numpy()
    return replace(context, roles=roles, scored=scored)


@pytest.fixture(scope="module")
def perturbed_cells() -> Any:
    sys.path.insert(0, str(BRIDGES))
    yield importlib.import_module("perturbed_cells")
    sys.path.remove(str(BRIDGES))


@pytest.fixture(scope="module", params=["unseen perturbations", "folds"])
def cells(
    request: pytest.FixtureRequest,
    screen: Context,
    perturbed_cells: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Context, Any, Path]:
    """The context, what a bridge reads, and its file: of a model that saw two perturbations, or
    none.
    """
    scored = np.ones_like(screen.scored) if request.param == "folds" else screen.scored
    context = replace(screen, scored=scored)
    out = tmp_path_factory.mktemp("changes") / "simulated.h5ad"
    write_changes(out, context, CONFIG, "digest")
    return context, perturbed_cells.read_changes(out), out


def measured_and_given(found: Any) -> tuple[np.ndarray, np.ndarray]:
    """(U, G) twice: changes measured from the cells of a file, and the controls that predictions
    start from.
    """
    obs = found.measured.obs
    expression = found.measured.X.toarray().astype(float)
    start_expression = found.start.X.toarray().astype(float)
    is_control = obs.group == "measured control"
    changes = []
    starts = []
    for name in found.perturbations:
        is_perturbed = (obs.perturbation == name).to_numpy()
        controls_of_cells = []
        starts_of_cells = []
        for stratum in obs.stratum[is_perturbed]:
            controls = is_control & (obs.stratum == stratum)
            in_stratum = found.start.obs.stratum == stratum
            controls_of_cells.append(expression[controls.to_numpy()].mean(0))
            starts_of_cells.append(start_expression[in_stratum.to_numpy()].mean(0))
        control = np.mean(controls_of_cells, axis=0)
        changes.append(expression[is_perturbed].mean(0) - control)
        starts.append(np.mean(starts_of_cells, axis=0))
    return np.array(changes), np.array(starts)


def mean_of(cells: ad.AnnData, name: str) -> np.ndarray:
    """(G,): mean over the cells of a perturbation, or of the control."""
    is_perturbed = (cells.obs.perturbation == name).to_numpy()
    return cells.X[is_perturbed].toarray().mean(0)  # type: ignore[no-any-return]


def test_scores_of_the_profiles_equal_the_task(cells: tuple[Context, Any, Path]) -> None:
    context, found, path = cells
    about = ad.read_h5ad(path).uns["cellmill_changes"]
    folds = int(about["n_folds"])
    result = run_task(Perturbation(CONFIG), context)
    rows = {row.method.name: row for row in result.rows if row.method.kind != "ceiling"}
    assert sorted(found.changes) == sorted(rows)
    assert "embedding, supervised by guide + response head" in rows
    assert found.kinds == {name: row.method.kind for name, row in rows.items()}
    assert [*found.kinds.values()].count("probe") == 6
    measured, starts = measured_and_given(found)
    genes = perturbed_genes(found.perturbations, context.model.vocabulary)
    perturbed = np.zeros(measured.shape, bool)
    for unit, name in enumerate(found.perturbations):
        symbols = [context.model.vocabulary.symbols[row] for row in genes[name]]
        perturbed[unit] = found.start.var_names.isin(symbols)
    # discrimination compares perturbations that are tested together: in folds fewer than in a file
    metrics = METRICS if folds == 1 else ("MAE", "Pearson", "direction")
    for name, row in rows.items():
        # no change is 0, for which no Pearson is defined
        change = np.round(found.profiles(name) - starts, 5)
        scores = score_changes(change, measured, perturbed, CONFIG.top_genes)
        for metric in metrics:
            defined = scores[metric][np.isfinite(scores[metric])]
            score = row.scores.get(f"{metric}, new perturbation")
            if score is None:
                assert len(defined) == 0
            else:
                first = score.repetitions[0]
                assert defined.mean() == pytest.approx(first, abs=1e-4), (name, metric)


def test_the_file_has_both_halves_of_the_controls(cells: tuple[Context, Any, Path]) -> None:
    context, found, path = cells
    stored = ad.read_h5ad(path)
    profiles = PerturbedUnits.read(context, CONFIG, "perturbation").profiles
    rows = context.reader.obs_names.get_indexer(stored.obs_names)
    assert rows.tolist() == sorted(set(rows))
    expression = profiles.expression[rows].toarray()
    np.testing.assert_array_equal(stored.X.toarray(), expression)
    is_control = context.roles["is_control"].to_numpy()
    is_tested = context.roles["perturbation"].isin(found.perturbations).to_numpy()
    groups = {
        "start control": profiles.half == 0,
        "measured control": profiles.half == 1,
        "measured": is_tested & context.scored & ~is_control,
    }
    for group, is_in_group in groups.items():
        in_file = rows[stored.obs.group == group]
        assert in_file.tolist() == np.flatnonzero(is_in_group).tolist()
    perturbation = context.roles["perturbation"].to_numpy()[rows]
    assert stored.obs.perturbation.tolist() == perturbation.tolist()
    vocabulary = context.model.vocabulary
    assert stored.var_names.tolist() == [vocabulary.gene_ids[row] for row in profiles.genes]
    assert found.start.var_names.tolist() == [vocabulary.symbols[row] for row in profiles.genes]
    assert found.control == "control"
    assert found.perturbations == sorted({*perturbation} - {"control"})


def test_predictions_read_no_expression_of_the_tested_cells(
    cells: tuple[Context, Any, Path],
) -> None:
    context, found, _ = cells
    held = PerturbedUnits.read(context, CONFIG, "perturbation")
    profiles = held.profiles
    for fold in make_folds(held):
        if fold.repetition:
            continue
        changed = profiles.expression.tolil()
        tested = np.isin(held.unit_of_cell, fold.tested)
        # nor of the controls of the measured changes
        changed[np.flatnonzero(tested | (profiles.half == 1))] = 7.0
        other = replace(profiles, expression=changed.tocsr())
        blind = np.full_like(context.vectors, np.nan)
        blind[~tested] = context.vectors[~tested]
        elsewhere = replace(held, context=replace(context, vectors=blind), profiles=other)
        predicted = next(ChangePredictor(elsewhere).predict([fold]))
        rows = [found.perturbations.index(name) for name in held.perturbation[fold.tested]]
        methods = [name for name in found.changes if found.kinds[name] != "probe"]
        for values, name in zip(predicted.values(), methods, strict=True):
            np.testing.assert_allclose(values, found.changes[name][rows], atol=1e-6, err_msg=name)


def test_predicted_cells_have_the_predicted_means(
    cells: tuple[Context, Any, Path], perturbed_cells: Any
) -> None:
    _, found, path = cells
    obs = found.measured.obs
    n_controls = found.start.n_obs
    expected = []
    for name in found.perturbations:
        expected += np.count_nonzero(obs.perturbation == name) * [name]
    expected += n_controls * ["control"]
    for method in found.changes:
        made = found.predicted(method)
        assert made.obs.perturbation.tolist() == expected
        controls = made.X[-n_controls:].toarray()
        np.testing.assert_array_equal(controls, found.start.X.toarray())
        assert made.var_names.equals(found.measured.var_names)
        means = [mean_of(made, name) for name in found.perturbations]
        np.testing.assert_allclose(means, found.profiles(method).clip(0), atol=1e-5)
        assert made.X.min() >= 0
        assert made.X.max() <= np.log1p(1e4) + 1e-5
    again = perturbed_cells.read_changes(path)
    assert (again.predicted("mean").X != found.predicted("mean").X).nnz == 0


def test_predicted_cells_start_from_controls_of_their_strata(
    cells: tuple[Context, Any, Path], perturbed_cells: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found, _ = cells
    monkeypatch.setattr(perturbed_cells, "with_means", lambda drawn, *_: drawn)
    made = found.predicted("mean")
    controls = found.start.X.toarray()
    number_by_control = {row.tobytes(): number for number, row in enumerate(controls)}
    stratum_by_control = found.start.obs.stratum.to_numpy()
    obs = found.measured.obs
    for name in found.perturbations:
        strata = obs.stratum[obs.perturbation == name]
        is_perturbed = (made.obs.perturbation == name).to_numpy()
        rows = made.X[is_perturbed].toarray().astype(controls.dtype)
        drawn = [number_by_control[row.tobytes()] for row in rows]
        assert stratum_by_control[drawn].tolist() == sorted(strata)
        # no control of a stratum is drawn more often than another by more than one
        times = np.bincount(drawn, minlength=len(controls))
        for stratum in set(strata):
            assert np.ptp(times[stratum_by_control == stratum]) <= 1


def test_cells_gain_or_lose_a_gene_to_reach_its_mean(perturbed_cells: Any) -> None:
    generator = np.random.default_rng(0)
    cells = np.zeros((100, 6))
    cells[:40, :5] = 2.0
    means = np.array([0.8, 0.4, 1.2, 0.0, 3.0, 0.02])
    made = perturbed_cells.with_means(cells, means, np.full(6, 4.0), generator)
    np.testing.assert_allclose(made.mean(0), means)
    expressed_before = cells > 0
    expressed = made > 0
    # as it was; half of the cells; half as many more; none; all, each with more; one that had none
    assert expressed.sum(0).tolist() == [40, 20, 60, 0, 100, 1]
    assert np.array_equal(made[:, 0], cells[:, 0])
    assert not expressed[~expressed_before[:, 1], 1].any()
    assert expressed[expressed_before[:, 2], 2].all()
    least = perturbed_cells.with_means(cells, means - 9, np.ones(6), generator)
    np.testing.assert_allclose(least, 0)
    most = perturbed_cells.with_means(cells, np.full(6, 99.0), np.ones(6), generator)
    np.testing.assert_allclose(most, np.log1p(1e4))


def screen_of_cells(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Controls (300, 5), their weights, and the means wanted of five genes: as before, lower,
    higher, all, new.
    """
    is_detected = generator.random((300, 5)) < [0.5, 0.5, 0.3, 0.9, 0.0]
    values = generator.gamma(4, 0.5, (300, 5))
    controls = np.where(is_detected, values, 0)
    weights = np.repeat([2.0, 1.0], 150)
    weights /= weights.sum()
    means = weights @ controls * [1, 0.4, 1.8, 2, 0]
    means[4] = 0.3
    return controls, weights, means


def test_sampled_cells_have_the_predicted_means_on_average(perturbed_cells: Any) -> None:
    generator = np.random.default_rng(0)
    controls, weights, means = screen_of_cells(generator)
    n_cells = 40_000
    made = perturbed_cells.sample_with_means(
        sp.csr_matrix(controls), weights, means, n_cells, generator
    )
    errors = np.abs(made.mean(0) - means)
    assert (errors < 4 * made.std(0) / n_cells**0.5 + 1e-9).all()
    detected_frac = (made > 0).mean(0)
    detected_before = weights @ (controls > 0)
    expected = detected_before * [1, 0.4, 1.8, 1.1, 0]
    np.testing.assert_allclose(detected_frac[:4], expected[:4], atol=0.05)
    assert made.min() >= 0


def test_the_mean_of_sampled_cells_scatters_like_a_sample_s(perturbed_cells: Any) -> None:
    """A metric that takes var / n off the squared error of a mean is then right, and off exact
    means is not.
    """
    generator = np.random.default_rng(0)
    controls, weights, means = screen_of_cells(generator)
    sparse = sp.csr_matrix(controls)
    variances_of_means = []
    squared_errors = []
    for _ in range(400):
        made = perturbed_cells.sample_with_means(sparse, weights, means, 50, generator)
        exact = perturbed_cells.with_means(made, means, np.ones(5), generator)
        np.testing.assert_allclose(exact.mean(0), means, atol=1e-6)
        variances_of_means.append(made.var(0, ddof=1).sum() / 50)
        squared_errors.append(np.sum((made.mean(0) - means) ** 2))
    assert np.mean(squared_errors) == pytest.approx(np.mean(variances_of_means), rel=0.1)


def test_each_perturbation_has_as_many_sampled_cells(
    cells: tuple[Context, Any, Path], perturbed_cells: Any
) -> None:
    _, found, path = cells
    made = found.sampled("mean")
    for name in found.perturbations:
        n_measured = np.count_nonzero(found.measured.obs.perturbation == name)
        assert np.count_nonzero(made.obs.perturbation == name) == n_measured
    controls = made.X[-found.start.n_obs :].toarray()
    np.testing.assert_array_equal(controls, found.start.X.toarray())
    again = perturbed_cells.read_changes(path).sampled("mean")
    assert (again.X != made.X).nnz == 0
    assert made.X.max() <= np.log1p(1e4) + 1e-5


def test_genes_are_named_like_perturbations(
    cells: tuple[Context, Any, Path], perturbed_cells: Any, tmp_path: Path
) -> None:
    changed = ad.read_h5ad(cells[2])
    ids = changed.var_names[:4].tolist()
    symbols = changed.var["symbol"].astype(str).tolist()
    # the third gene has the symbol of the first, and a perturbation has the id of the second
    symbols[2] = symbols[0]
    changed.var["symbol"] = symbols
    changed.uns["cellmill_changes"]["perturbations"][0] = ids[1]
    changed.write_h5ad(tmp_path / "changed.h5ad")
    names = perturbed_cells.read_changes(tmp_path / "changed.h5ad").start.var_names
    assert names[:4].tolist() == [symbols[0], ids[1], ids[2], symbols[3]]


def test_a_perturbation_at_two_doses_counts_once(screen: Context, tmp_path: Path) -> None:
    perturbation = pd.Series(np.array(["a", "control"])[np.arange(screen.reader.n_obs) % 2])
    dose = pd.Series(np.where(np.arange(screen.reader.n_obs) % 4 < 2, "1", "2"))
    is_control = perturbation == "control"
    roles = {"perturbation": perturbation, "is_control": is_control, "dose": dose}
    context = replace(screen, roles=roles, scored=~is_control.to_numpy())
    config = CONFIG.model_copy(update={"doses": "column"})
    with pytest.raises(DataError, match=r"expected two perturbations of .* got 1 and 1; set"):
        write_changes(tmp_path / "changes.h5ad", context, config, "digest")


def test_unseen_perturbations_are_held_out(tmp_path: Path, corpus: dict[str, Path]) -> None:
    perturbation = np.array(["a", "b", "c", "control"])[np.arange(600) % 4]
    changed = {"perturbation": perturbation, "is_control": perturbation == "control"}
    files = with_obs(corpus, tmp_path, "simulated", **changed)
    given = {key: files[key] for key in ("model", "manifest", "cells", "embedding")}
    given["out"] = tmp_path / "changes" / "simulated.h5ad"

    def run(**evaluate: Any) -> None:
        options = EvaluateOptions.model_validate({"evaluate": evaluate})
        predict_changes.predict_changes(options=options, **given)

    with pytest.raises(
        ConfigError, match=r"^evaluate\.tasks: no task perturbation, whose predictions these are"
    ):
        run()
    tasks: dict[str, Any] = {"perturbation": {"held_out": ["batch"]}}
    with pytest.raises(ConfigError, match="held_out: expected perturbation among them"):
        run(tasks=tasks)
    tasks["perturbation"] = {}
    with pytest.raises(
        DataError, match=r"one that the model saw no cell of, got 3 and 0; set shard\.split_by"
    ):
        run(tasks=tasks)
    assert not given["out"].exists()
    run(tasks=tasks, cells="all")
    made = ad.read_h5ad(given["out"])
    assert made.uns["cellmill_changes"]["perturbations"].tolist() == ["a", "b", "c"]
    assert made.obs["group"].value_counts().to_dict() == {
        "measured": 450,
        "start control": 75,
        "measured control": 75,
    }


def test_contexts_of_a_split_file_may_be_labels(tmp_path: Path, corpus: dict[str, Path]) -> None:
    perturbation = np.array(["a", "b", "c", "control"])[np.arange(600) % 4]
    lines = np.array(["x", "y"])[np.arange(600) // 4 % 2]
    changed = {"perturbation": perturbation, "is_control": perturbation == "control", "line": lines}
    files = with_obs(corpus, tmp_path, "simulated", **changed)
    split = tmp_path / "split.toml"
    split.write_text('[training]\nsimulated = "train"\n[fewshot."simulated.y"]\ntest = ["b"]\n')
    section = {"cells": "all", "tasks": {"perturbation": {"split_file": str(split)}}}
    given = {key: files[key] for key in ("model", "manifest", "cells", "embedding")}
    given["options"] = EvaluateOptions.model_validate({"evaluate": section})
    out = tmp_path / "changes" / "simulated.h5ad"
    predict_changes.predict_changes(**given, labels="line|batch", out=out)
    changes = ad.read_h5ad(out).uns["cellmill_changes"]
    assert changes["perturbations"].tolist() == ["b | y"]
    with pytest.raises(DataError, match=r"simulated has no column label; name one in the table"):
        predict_changes.predict_changes(**given, out=out)


def test_cell_eval_judges_each_method(cells: tuple[Context, Any, Path], tmp_path: Path) -> None:
    _, found, path = cells
    values = run_bridge("cell-eval", "cell_bridge", tmp_path / "out.json", changes=path, threads=2)
    made = json.loads((tmp_path / "out.json").read_text())
    assert list(values) == [*found.changes, "split halves"]
    measured_control = mean_of(found.measured, "control")
    start_control = mean_of(found.start, "control")
    for method in found.changes:
        correlations = []
        errors = []
        for name, profile in zip(found.perturbations, found.profiles(method)):
            measured = mean_of(found.measured, name) - measured_control
            predicted = profile.clip(0) - start_control
            correlations.append(np.corrcoef(predicted, measured)[0, 1])
            errors.append(np.abs(predicted - measured).mean())
        scores = values[method]
        assert scores["pearson_delta"] == pytest.approx(np.mean(correlations), abs=1e-4)
        assert scores["mae_delta"] == pytest.approx(np.mean(errors), abs=1e-5)
    assert made["version"]
    assert made["n_perturbations"] == len(found.perturbations)


def differential(cells: np.ndarray, controls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(G,) twice: log2 fold changes of means, and p of Wilcoxon's test corrected by Benjamini and
    Hochberg.
    """
    mean = np.expm1(cells).mean(0) + 1e-9
    control_mean = np.expm1(controls).mean(0) + 1e-9
    p = mannwhitneyu(cells, controls, axis=0, use_continuity=False, method="asymptotic").pvalue
    p = np.nan_to_num(p, nan=1.0)
    return np.log2(mean / control_mean), false_discovery_control(p)


def genes_that_differ(found: Any, method: str) -> dict[str, float]:
    """The metrics of profile vcc2026 on differential expression alone, without the package."""
    predicted = found.sampled(method)

    def expression(cells: ad.AnnData, name: str) -> np.ndarray:
        is_perturbed = (cells.obs.perturbation == name).to_numpy()
        return cells.X[is_perturbed].toarray().astype(float)  # type: ignore[no-any-return]

    controls = expression(found.measured, found.control)
    jaccard = []
    errors = []
    for name in found.perturbations:
        change, p = differential(expression(predicted, name), controls)
        measured_change, measured_p = differential(expression(found.measured, name), controls)
        is_other_gene = found.measured.var_names != name
        called = (p < 0.05) & is_other_gene
        differs = (measured_p < 0.05) & is_other_gene
        n_either = np.count_nonzero(called | differs)
        jaccard.append(np.count_nonzero(called & differs) / n_either if n_either else 1.0)
        if np.count_nonzero(differs) >= 10:
            error = np.abs(change - measured_change)[differs].mean()
            errors.append(error / np.abs(measured_change[differs]).mean())
    values = {"jaccard": float(np.mean(jaccard))}
    if errors:
        values["nmae"] = float(np.mean(errors))
    return values


def changed_cells(
    given: Path, path: Path, keep: int | None = None, methods: int | None = None
) -> Path:
    """The cells of `given` with changes that the simulation lacks, of the first perturbations and
    methods.
    """
    changed = ad.read_h5ad(given)
    about = changed.uns["cellmill_changes"]
    names = about["perturbations"][:keep]
    about["perturbations"] = names
    about["changes"] = about["changes"][:methods, : len(names)]
    about["methods"] = about["methods"][:methods]
    about["kinds"] = about["kinds"][:methods]
    expression = changed.X.toarray()
    predicted_shifts = np.linspace(0.5, 1.5, len(about["methods"]))
    for number, name in enumerate(names):
        rows = np.flatnonzero(changed.obs.perturbation == name)
        genes = slice(25 * number, 25 * number + 60)
        expression[rows, genes] += 1.5
        for method, shift in enumerate(predicted_shifts):
            about["changes"][method, number, genes] += shift
    changed.X = sp.csr_matrix(expression)
    kept = changed.obs.perturbation.isin([*names, about["control"]]).to_numpy()
    changed[kept].copy().write_h5ad(path)
    return path


def test_cell_eval2_gives_our_numbers_for_each_method(
    cells: tuple[Context, Any, Path], perturbed_cells: Any, tmp_path: Path
) -> None:
    path = changed_cells(cells[2], tmp_path / "changed.h5ad")
    found = perturbed_cells.read_changes(path)
    values = run_bridge(
        "cell-eval2", "cell2_bridge", tmp_path / "out.json", changes=path, threads=2
    )
    assert list(values) == [*found.changes]
    theirs = {"jaccard": "de_wilcoxon_sig_jaccard", "nmae": "de_wilcoxon_lfc_nmae"}
    for method, values_of_method in values.items():
        expected = genes_that_differ(found, method)
        for name, metric in theirs.items():
            value = values_of_method[metric]
            if name in expected:
                assert value == pytest.approx(expected[name], abs=1e-6), (method, metric)
            else:
                assert value is None, (method, metric)
    made = json.loads((tmp_path / "out.json").read_text())
    counts = {row["n"] for row in made["rows"] if row["metric"] == "de_wilcoxon_sig_jaccard"}
    assert counts == {len(found.perturbations)}
    assert (made["de_backend"], made["device"]) == ("scanpy", "cpu")


def test_a_single_perturbation_has_no_rank(
    cells: tuple[Context, Any, Path], tmp_path: Path
) -> None:
    path = changed_cells(cells[2], tmp_path / "one.h5ad", keep=1, methods=2)
    values = run_bridge(
        "cell-eval2", "cell2_bridge", tmp_path / "out.json", changes=path, threads=2
    )
    assert len(values) == 2
    for scores in values.values():
        assert scores["pds_cosine"] is None
        assert scores["expr_mse_unbiased"] is not None


def test_a_visible_gpu_changes_nothing(
    cells: tuple[Context, Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = changed_cells(cells[2], tmp_path / "two.h5ad", keep=2, methods=1)
    without = run_bridge(
        "cell-eval2", "cell2_bridge", tmp_path / "cpu.json", changes=path, threads=2
    )
    lines = ["class cuda:", "    is_available = staticmethod(lambda: True)", "class Tensor: ..."]
    (tmp_path / "torch.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert (
        run_bridge("cell-eval2", "cell2_bridge", tmp_path / "gpu.json", changes=path, threads=2)
        == without
    )
