"""Predicted expression for other packages: what the task scores, of no tested cell, as cells with these means."""

import importlib
import json
import os
import subprocess
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
from cellmill.evaluate.task import Context, named_supervised
from cellmill.evaluate.tasks.changes import HeldOut
from cellmill.evaluate.tasks.perturbation import METRICS, Perturbation, change_scores, write_changes
from cellmill.stages import evaluate as predict_changes
from tests.unit.evaluated import make_context, make_evaluated, with_obs

CONFIG = PerturbationConfig(held_out=["perturbation"], min_cells=4, seeds=2, top_genes=5)
BRIDGES = Path(__file__).resolve().parents[2] / "workflow" / "bridges"
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
def screen(tmp_path_factory: pytest.TempPathFactory, simulated: Path) -> Context:
    """Seven perturbations and controls in two batches of unequal size; five of them were not trained on."""
    context = make_context(tmp_path_factory.mktemp("screen"), simulated, **RESPONSE)
    n_obs, symbols = context.reader.n_obs, context.model.vocabulary.symbols
    names = [*symbols[:6], "unheard", "control"]
    perturbation = pd.Series([names[cell % 8] for cell in range(n_obs)])
    batch = pd.Series(["x" if cell // 8 % 3 * (cell % 8) % 5 else "y" for cell in range(n_obs)])
    roles = {"perturbation": perturbation, "batch": batch, "is_control": perturbation == "control"}
    return replace(context, roles=roles, scored=perturbation.isin(names[2:7]).to_numpy())


@pytest.fixture(scope="module")
def perturbed_cells() -> Any:
    sys.path.insert(0, str(BRIDGES))
    yield importlib.import_module("perturbed_cells")
    sys.path.remove(str(BRIDGES))


@pytest.fixture(scope="module", params=["unseen perturbations", "folds"])
def cells(
    request: pytest.FixtureRequest, screen: Context, perturbed_cells: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Context, Any, Path]:
    """The context, what a bridge reads, and its file: of a model that saw two perturbations, or none."""
    scored = screen.scored if request.param != "folds" else np.ones_like(screen.scored)
    context, out = replace(screen, scored=scored), tmp_path_factory.mktemp("changes") / "simulated.h5ad"
    write_changes(out, context, CONFIG, "digest")
    return context, perturbed_cells.read_changes(out), out


def measured_and_given(found: Any) -> tuple[np.ndarray, np.ndarray]:
    """(U, G) twice: changes measured from the cells of a file, and the controls that predictions start from."""
    obs, dense = found.measured.obs, found.measured.X.toarray().astype(float)
    start, seen, given = found.start.X.toarray().astype(float), [], []
    for name in found.perturbations:
        mine = (obs.perturbation == name).to_numpy()
        strata = obs.stratum[mine].to_numpy()
        of_stratum = {s: (obs.group == "measured control") & (obs.stratum == s) for s in np.unique(strata)}
        controls = {s: dense[cells.to_numpy()].mean(0) for s, cells in of_stratum.items()}
        starts = {s: start[(found.start.obs.stratum == s).to_numpy()].mean(0) for s in controls}
        seen.append(dense[mine].mean(0) - np.mean([controls[s] for s in strata], axis=0))
        given.append(np.mean([starts[s] for s in strata], axis=0))
    return np.array(seen), np.array(given)


def mean_of(cells: ad.AnnData, name: str) -> np.ndarray:
    """(G,): mean over the cells of a perturbation, or of the control."""
    return np.asarray(cells.X[(cells.obs.perturbation == name).to_numpy()].mean(axis=0)).ravel()


def test_scores_of_the_profiles_are_those_of_the_task(cells: tuple[Context, Any, Path]) -> None:
    context, found, path = cells
    about = ad.read_h5ad(path).uns["cellmill_changes"]
    folds = int(about["n_folds"])
    result = named_supervised(Perturbation(CONFIG).run(context), context.supervised)
    rows = {row["name"]: row for row in result.rows if row["kind"] != "ceiling"}
    assert sorted(found.changes) == sorted(rows)
    assert "embedding, supervised by guide + response head" in rows
    assert found.kinds == {name: row["kind"] for name, row in rows.items()}
    seen, given = measured_and_given(found)
    genes = perturbed_genes(found.perturbations, context.model.vocabulary)
    perturbed = np.zeros(seen.shape, bool)
    for unit, name in enumerate(found.perturbations):
        symbols = [context.model.vocabulary.symbols[row] for row in genes[name]]
        perturbed[unit] = found.start.var_names.isin(symbols)
    for name, row in rows.items():
        change = np.round(found.profiles(name) - given, 5)  # no change is 0, of which no Pearson is defined
        scores = change_scores(change, seen, perturbed, CONFIG.top_genes)
        # discrimination is among perturbations that are tested together: in folds fewer than a file has
        for metric in METRICS if folds == 1 else ("MAE", "Pearson", "direction"):
            first = (row.get(f"{metric}, new perturbation_repetitions") or [np.nan])[0]
            mean = np.nanmean(scores[metric]) if np.isfinite(scores[metric]).any() else np.nan
            assert mean == pytest.approx(first, abs=1e-4, nan_ok=True), (name, metric)


def test_the_file_has_measured_cells_and_both_halves_of_the_controls_in_order(cells: tuple[Context, Any, Path]) -> None:
    context, found, path = cells
    stored, names = ad.read_h5ad(path), context.reader.obs.index
    held = HeldOut.of(context, CONFIG, "perturbation")
    assert held is not None
    profiles = held.profiles
    place = names.get_indexer(stored.obs_names)
    assert (np.diff(place) > 0).all()
    np.testing.assert_array_equal(stored.X.toarray(), profiles.expression[place].toarray())
    control = context.roles["is_control"].to_numpy()
    halves = {"start control": 0, "measured control": 1}
    for group, half in halves.items():
        assert place[stored.obs.group == group].tolist() == np.flatnonzero(profiles.half == half).tolist()
    tested = context.roles["perturbation"].isin(found.perturbations).to_numpy()
    assert place[stored.obs.group == "measured"].tolist() == np.flatnonzero(tested & context.scored & ~control).tolist()
    given = context.roles["perturbation"].to_numpy()[place]
    assert stored.obs.perturbation.tolist() == given.tolist()
    assert stored.var_names.tolist() == [context.model.vocabulary.gene_ids[row] for row in profiles.genes]
    assert found.start.var_names.tolist() == [context.model.vocabulary.symbols[row] for row in profiles.genes]
    assert found.control == "control"
    assert found.perturbations == sorted({*given} - {"control"})


def test_predictions_read_no_expression_of_the_tested_cells(cells: tuple[Context, Any, Path]) -> None:
    context, found, _ = cells
    held = HeldOut.of(context, CONFIG, "perturbation")
    assert held is not None
    profiles = held.profiles
    for fold in held.folds():
        if fold[0]:
            continue
        changed = profiles.expression.tolil()
        tested = np.isin(held.unit_of_cell, fold[2])
        changed[np.flatnonzero(tested | (profiles.half == 1))] = 7.0  # nor of the controls of the measured changes
        other = replace(profiles, expression=changed.tocsr())
        blind = np.full_like(context.vectors, np.nan)
        blind[~tested] = context.vectors[~tested]
        elsewhere = replace(held, context=replace(context, vectors=blind), profiles=other)
        _, test, predicted = next(elsewhere.predictions([fold]))
        rows = [found.perturbations.index(name) for name in held.perturbation[test]]
        for values, name in zip(predicted.values(), found.changes, strict=True):
            np.testing.assert_allclose(values, found.changes[name][rows], atol=1e-6, err_msg=name)


def test_predicted_cells_begin_as_controls_of_the_strata_and_have_the_predicted_means(
    cells: tuple[Context, Any, Path], perturbed_cells: Any
) -> None:
    _, found, path = cells
    obs = found.measured.obs
    for name in found.perturbations:
        drawn = np.concatenate([*found._draw(name, np.random.default_rng(0))])
        mine = obs.stratum[obs.perturbation == name].to_numpy()
        assert found.start.obs.stratum.iloc[drawn].tolist() == sorted(mine)
        times = np.bincount(drawn, minlength=found.start.n_obs)
        for stratum in np.unique(mine):
            of_stratum = times[(found.start.obs.stratum == stratum).to_numpy()]
            assert np.ptp(of_stratum) <= 1
    for method in found.changes:
        made = found.predicted(method)
        assert made.obs.perturbation[: -found.start.n_obs].tolist() == [
            name for name in found.perturbations for _ in range((obs.perturbation == name).sum())
        ]
        assert set(made.obs.perturbation[-found.start.n_obs :]) == {"control"}
        np.testing.assert_array_equal(made.X[-found.start.n_obs :].toarray(), found.start.X.toarray())
        assert made.var_names.equals(found.measured.var_names)
        means = [mean_of(made, name) for name in found.perturbations]
        np.testing.assert_allclose(means, found.profiles(method).clip(0), atol=1e-5)
        assert made.X.min() >= 0
        assert made.X.max() <= np.log1p(1e4) + 1e-5
    again = perturbed_cells.read_changes(path)
    assert (again.predicted("mean").X != found.predicted("mean").X).nnz == 0


def test_a_gene_gets_its_mean_by_the_number_of_cells_that_have_it(perturbed_cells: Any) -> None:
    generator = np.random.default_rng(0)
    cells = np.zeros((100, 6))
    cells[:40, :5] = 2.0
    means = np.array([0.8, 0.4, 1.2, 0.0, 3.0, 0.02])
    made = perturbed_cells.with_means(cells, means, np.full(6, 4.0), generator)
    np.testing.assert_allclose(made.mean(0), means)
    # as it was; half of the cells; half as many more; none; all, each with more; one that had none
    assert (made > 0).sum(0).tolist() == [40, 20, 60, 0, 100, 1]
    assert np.array_equal(made[:, 0], cells[:, 0])
    assert ((made[:, 1] > 0) <= (cells[:, 1] > 0)).all()
    assert ((made[:, 2] > 0) >= (cells[:, 2] > 0)).all()
    np.testing.assert_allclose(perturbed_cells.with_means(cells, means - 9, np.ones(6), generator), 0)
    most = perturbed_cells.with_means(cells, np.full(6, 99.0), np.ones(6), generator)
    np.testing.assert_allclose(most, np.log1p(1e4))


def test_a_gene_is_called_as_perturbations_are(perturbed_cells: Any) -> None:
    var = pd.DataFrame({"symbol": ["A", "B", "A", "C"]}, index=["E1", "E2", "E3", "E4"])
    assert perturbed_cells._gene_names(var, ["A", "E2"]) == ["A", "E2", "E3", "C"]


def test_the_stage_holds_out_what_the_model_did_not_see_or_says_what_to_set(tmp_path: Path, simulated: Path) -> None:
    corpus = make_evaluated(tmp_path, simulated)
    perturbation = np.array(["a", "b", "c", "control"])[np.arange(600) % 4]
    (tmp_path / "other").mkdir()
    changed = {"perturbation": perturbation, "is_control": perturbation == "control"}
    files = with_obs(corpus, tmp_path / "other", "simulated", **changed)
    given = {key: files[key] for key in ("model", "manifest", "cells", "embedding")}
    given["out"] = tmp_path / "changes" / "simulated.h5ad"

    def run(**evaluate: Any) -> None:
        predict_changes.predict_changes(options=EvaluateOptions.model_validate({"evaluate": evaluate}), **given)

    with pytest.raises(ConfigError, match=r"^evaluate\.tasks: no task perturbation, whose predictions these are"):
        run()
    tasks: dict[str, Any] = {"perturbation": {"held_out": ["batch"]}}
    with pytest.raises(ConfigError, match="held_out: expected perturbation among them"):
        run(tasks=tasks)
    tasks["perturbation"] = {}
    with pytest.raises(DataError, match=r"one that the model saw no cell of, got 3 and 0; set shard\.split_by"):
        run(tasks=tasks)
    assert not given["out"].exists()
    run(tasks=tasks, cells="all")
    made = ad.read_h5ad(given["out"])
    assert made.uns["cellmill_changes"]["perturbations"].tolist() == ["a", "b", "c"]
    assert made.obs["group"].value_counts().to_dict() == {"measured": 450, "start control": 75, "measured control": 75}


def test_cell_eval_judges_each_method(cells: tuple[Context, Any, Path], tmp_path: Path) -> None:
    _, found, path = cells
    values = run_bridge("cell_bridge.py", "cell_eval", path, tmp_path / "out.json")
    made = json.loads((tmp_path / "out.json").read_text())
    assert list(values) == [*found.changes, "split halves"]
    control = mean_of(found.measured, "control")
    seen = [mean_of(found.measured, name) - control for name in found.perturbations]
    for method in found.changes:
        change = found.profiles(method).clip(0) - mean_of(found.start, "control")
        pearson = [np.corrcoef(own, other)[0, 1] for own, other in zip(change, seen)]
        assert values[method]["pearson_delta"] == pytest.approx(np.mean(pearson), abs=1e-4)
        assert values[method]["mae_delta"] == pytest.approx(np.abs(change - np.array(seen)).mean(), abs=1e-5)
    assert made["version"]
    assert made["n_perturbations"] == len(found.perturbations)


def run_bridge(script: str, package: str, changes: Path, out: Path) -> dict[str, dict[str, float | None]]:
    """Values of a bridge by method and metric, of the interpreter of CELLMILL_CELL_EVAL or CELLMILL_CELL_EVAL2."""
    python = os.environ.get(f"CELLMILL_{package.upper()}", sys.executable)
    if subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(f"{package.replace('_', '-')} is not installed in {python}")
    words = [python, str(BRIDGES / script), f"--changes={changes}", "--threads=2", f"--out={out}"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}  # theirs are their own
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    values: dict[str, dict[str, float | None]] = {}
    for row in json.loads(out.read_text())["rows"]:
        values.setdefault(row["name"], {})[row["metric"]] = row["value"]
    return values


def differential(cells: np.ndarray, controls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(G,) twice: log2 fold changes of means, and p of Wilcoxon's test corrected by Benjamini and Hochberg."""
    means = [np.expm1(values).mean(0) + 1e-9 for values in (cells, controls)]
    p = mannwhitneyu(cells, controls, axis=0, use_continuity=False, method="asymptotic").pvalue
    return np.log2(means[0] / means[1]), false_discovery_control(np.nan_to_num(p, nan=1.0))


def vcc2026(found: Any, method: str) -> dict[str, float]:
    """The six scored metrics of the profile, of log-normalised cells, without the package."""
    predicted = found.predicted(method)
    dense = {"seen": found.measured.X.toarray().astype(float), "made": predicted.X.toarray().astype(float)}
    group = {"seen": found.measured.obs.perturbation.to_numpy(), "made": predicted.obs.perturbation.to_numpy()}
    groups = {side: {name: dense[side][group[side] == name] for name in {*group[side]}} for side in dense}
    names, control = found.perturbations, groups["seen"][found.control]
    means = {side: np.stack([groups[side][name].mean(0) for name in names]) for side in groups}
    noise = {side: np.array([groups[side][name].var(0, ddof=1).sum() for name in names]) for side in groups}
    noise = {side: of / [len(groups[side][name]) for name in names] for side, of in noise.items()}
    counts = np.array(names)[:, None] != found.measured.var_names.to_numpy()  # (U, G): but for the perturbed gene
    weight = 1 / counts.sum(1)
    # squared error, less what sampling adds to it, in units of the same distance of the controls
    claimed = np.minimum(noise["made"], noise["seen"])
    entitled = 0.0
    for of_gene, kept in zip(means["made"].T, counts.T):
        centre = np.average(of_gene[kept], weights=weight[kept])
        entitled += float((weight[kept] * (of_gene[kept] - centre) ** 2).sum())
    total = (claimed * weight).sum()
    claimed = claimed * min(1.0, entitled / total if total > 0 else 1.0)
    error = ((means["made"] - means["seen"]) ** 2 * counts).sum(1) - claimed - noise["seen"]
    apart = ((means["seen"] - control.mean(0)) ** 2 * counts).sum(1) - noise["seen"]
    apart -= control.var(0, ddof=1).sum() / len(control)
    values: dict[str, list[float]] = {"error": [(error * weight).sum() / (apart * weight).sum()]}
    # rank of the own change among all, by cosine and without any perturbed gene
    shared = counts.all(0)
    change = {side: (means[side] - control.mean(0))[:, shared] for side in means}
    unit = {side: of / np.maximum(np.linalg.norm(of, axis=1, keepdims=True), 1e-300) for side, of in change.items()}
    distance = 1 - unit["made"] @ unit["seen"].T
    for unit_number, row in enumerate(distance):
        own = row[unit_number]
        tied = np.isclose(row, own, rtol=0, atol=1e-12)
        rank = (row < own)[~tied].sum() + (tied.sum() - 1) / 2
        values.setdefault("rank", []).append(1 - rank / (len(names) - 1))
    for name, kept in zip(names, counts):
        (made, made_p), (seen, seen_p) = (differential(groups[side][name], control) for side in ("made", "seen"))
        called, known = (made_p < 0.05) & kept, (seen_p < 0.05) & kept
        either = (called | known).sum()
        values.setdefault("jaccard", []).append((called & known).sum() / either if either else 1.0)
        agrees = (np.sign(made) == np.sign(seen)) & (made != 0) & (seen != 0)
        if known.sum() >= 10:
            values.setdefault("nmae", []).append(np.abs(made - seen)[known].mean() / np.abs(seen[known]).mean())
        if called.sum() or known.sum():
            most = max((called & (seen != 0)).sum(), known.sum())
            values.setdefault("yield", []).append((called & agrees).sum() / most)
        if known.sum():
            order = np.lexsort((-np.abs(made), made_p))
            pure = np.cumsum(agrees[order][known[order]]) / np.arange(1, known.sum() + 1)
            deepest = np.flatnonzero(pure >= 0.9)
            values.setdefault("reach", []).append((deepest[-1] + 1) / known.sum() if len(deepest) else 0.0)
    return {name: float(np.mean(of)) for name, of in values.items()}


def test_cell_eval2_gives_our_numbers_for_each_method(
    cells: tuple[Context, Any, Path], perturbed_cells: Any, tmp_path: Path
) -> None:
    changed = ad.read_h5ad(cells[2])
    expression, about = changed.X.toarray(), changed.uns["cellmill_changes"]
    for number, name in enumerate(about["perturbations"]):  # what cells of the simulation lack
        rows, up = np.flatnonzero(changed.obs.perturbation == name), np.arange(25 * number, 25 * number + 60)
        expression[np.ix_(rows, up)] += 1.5
        about["changes"][:, number, up] += np.linspace(0.5, 1.5, len(about["methods"]))[:, None]
    path = tmp_path / "changed.h5ad"
    changed.X = sp.csr_matrix(expression)
    changed.write_h5ad(path)
    found = perturbed_cells.read_changes(path)
    values = run_bridge("cell2_bridge.py", "cell_eval2", path, tmp_path / "out.json")
    assert list(values) == [*found.changes]
    theirs = {
        "error": "expr_mse_unbiased_capped_norm",
        "rank": "pds_cosine",
        "jaccard": "de_wilcoxon_sig_jaccard",
        "nmae": "de_wilcoxon_lfc_nmae",
        "yield": "de_wilcoxon_direction_fidelity_yield_raw",
        "reach": "de_wilcoxon_direction_reach_raw",
    }
    for method, of_method in values.items():
        own = vcc2026(found, method)
        for name, metric in theirs.items():
            assert (of_method[metric] is None) == (name not in own), (method, metric)
            if name in own:
                assert of_method[metric] == pytest.approx(own[name], abs=1e-6), (method, metric)
