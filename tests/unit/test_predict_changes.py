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
from cellmill.evaluate.tasks.held_out import HeldOut
from cellmill.evaluate.tasks.perturbation import METRICS, Perturbation, change_scores, write_changes
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
    request: pytest.FixtureRequest,
    screen: Context,
    perturbed_cells: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Context, Any, Path]:
    """The context, what a bridge reads, and its file: of a model that saw two perturbations, or
    none.
    """
    scored = screen.scored if request.param != "folds" else np.ones_like(screen.scored)
    context = replace(screen, scored=scored)
    out = tmp_path_factory.mktemp("changes") / "simulated.h5ad"
    write_changes(out, context, CONFIG, "digest")
    return context, perturbed_cells.read_changes(out), out


def measured_and_given(found: Any) -> tuple[np.ndarray, np.ndarray]:
    """(U, G) twice: changes measured from the cells of a file, and the controls that predictions
    start from.
    """
    obs = found.measured.obs
    dense = found.measured.X.toarray().astype(float)
    start = found.start.X.toarray().astype(float)
    seen = []
    given = []
    for name in found.perturbations:
        mine = (obs.perturbation == name).to_numpy()
        controls = []
        starts = []
        for stratum in obs.stratum[mine]:
            cells = (obs.group == "measured control") & (obs.stratum == stratum)
            controls.append(dense[cells.to_numpy()].mean(0))
            starts.append(start[(found.start.obs.stratum == stratum).to_numpy()].mean(0))
        seen.append(dense[mine].mean(0) - np.mean(controls, axis=0))
        given.append(np.mean(starts, axis=0))
    return np.array(seen), np.array(given)


def mean_of(cells: ad.AnnData, name: str) -> np.ndarray:
    """(G,): mean over the cells of a perturbation, or of the control."""
    return np.asarray(cells.X[(cells.obs.perturbation == name).to_numpy()].mean(axis=0)).ravel()


def test_scores_of_the_profiles_equal_the_task(cells: tuple[Context, Any, Path]) -> None:
    context, found, path = cells
    about = ad.read_h5ad(path).uns["cellmill_changes"]
    folds = int(about["n_folds"])
    result = run_task(Perturbation(CONFIG), context)
    rows = {row.method.name: row for row in result.rows if row.method.kind != "ceiling"}
    assert sorted(found.changes) == sorted(rows)
    assert "embedding, supervised by guide + response head" in rows
    assert found.kinds == {name: row.method.kind for name, row in rows.items()}
    seen, given = measured_and_given(found)
    genes = perturbed_genes(found.perturbations, context.model.vocabulary)
    perturbed = np.zeros(seen.shape, bool)
    for unit, name in enumerate(found.perturbations):
        symbols = [context.model.vocabulary.symbols[row] for row in genes[name]]
        perturbed[unit] = found.start.var_names.isin(symbols)
    for name, row in rows.items():
        # no change is 0, of which no Pearson is defined
        change = np.round(found.profiles(name) - given, 5)
        scores = change_scores(change, seen, perturbed, CONFIG.top_genes)
        # discrimination is among perturbations that are tested together: in folds fewer than a file
        # has
        for metric in METRICS if folds == 1 else ("MAE", "Pearson", "direction"):
            score = row.scores.get(f"{metric}, new perturbation")
            first = np.nan if score is None else score.repetitions[0]
            mean = np.nanmean(scores[metric]) if np.isfinite(scores[metric]).any() else np.nan
            assert mean == pytest.approx(first, abs=1e-4, nan_ok=True), (name, metric)


def test_the_file_has_both_halves_of_the_controls(
    cells: tuple[Context, Any, Path],
) -> None:
    context, found, path = cells
    stored = ad.read_h5ad(path)
    names = context.reader.obs.index
    held = HeldOut.of(context, CONFIG, "perturbation")
    profiles = held.profiles
    place = names.get_indexer(stored.obs_names)
    assert (np.diff(place) > 0).all()
    np.testing.assert_array_equal(stored.X.toarray(), profiles.expression[place].toarray())
    control = context.roles["is_control"].to_numpy()
    halves = {"start control": 0, "measured control": 1}
    for group, half in halves.items():
        assert (
            place[stored.obs.group == group].tolist()
            == np.flatnonzero(profiles.half == half).tolist()
        )
    tested = context.roles["perturbation"].isin(found.perturbations).to_numpy()
    assert (
        place[stored.obs.group == "measured"].tolist()
        == np.flatnonzero(tested & context.scored & ~control).tolist()
    )
    given = context.roles["perturbation"].to_numpy()[place]
    assert stored.obs.perturbation.tolist() == given.tolist()
    assert stored.var_names.tolist() == [
        context.model.vocabulary.gene_ids[row] for row in profiles.genes
    ]
    assert found.start.var_names.tolist() == [
        context.model.vocabulary.symbols[row] for row in profiles.genes
    ]
    assert found.control == "control"
    assert found.perturbations == sorted({*given} - {"control"})


def test_predictions_read_no_expression_of_the_tested_cells(
    cells: tuple[Context, Any, Path],
) -> None:
    context, found, _ = cells
    held = HeldOut.of(context, CONFIG, "perturbation")
    profiles = held.profiles
    for fold in held.folds():
        if fold[0]:
            continue
        changed = profiles.expression.tolil()
        tested = np.isin(held.unit_of_cell, fold[2])
        # nor of the controls of the measured changes
        changed[np.flatnonzero(tested | (profiles.half == 1))] = 7.0
        other = replace(profiles, expression=changed.tocsr())
        blind = np.full_like(context.vectors, np.nan)
        blind[~tested] = context.vectors[~tested]
        elsewhere = replace(held, context=replace(context, vectors=blind), profiles=other)
        _, test, predicted = next(elsewhere.predictions([fold]))
        rows = [found.perturbations.index(name) for name in held.perturbation[test]]
        for values, name in zip(predicted.values(), found.changes, strict=True):
            np.testing.assert_allclose(values, found.changes[name][rows], atol=1e-6, err_msg=name)


def test_predicted_cells_have_the_predicted_means(
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
        np.testing.assert_array_equal(
            made.X[-found.start.n_obs :].toarray(), found.start.X.toarray()
        )
        assert made.var_names.equals(found.measured.var_names)
        means = [mean_of(made, name) for name in found.perturbations]
        np.testing.assert_allclose(means, found.profiles(method).clip(0), atol=1e-5)
        assert made.X.min() >= 0
        assert made.X.max() <= np.log1p(1e4) + 1e-5
    again = perturbed_cells.read_changes(path)
    assert (again.predicted("mean").X != found.predicted("mean").X).nnz == 0


def test_cells_gain_or_lose_a_gene_to_reach_its_mean(perturbed_cells: Any) -> None:
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
    np.testing.assert_allclose(
        perturbed_cells.with_means(cells, means - 9, np.ones(6), generator), 0
    )
    most = perturbed_cells.with_means(cells, np.full(6, 99.0), np.ones(6), generator)
    np.testing.assert_allclose(most, np.log1p(1e4))


def screen_of_cells(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Controls (300, 5), their weights, and the means wanted of five genes: as before, lower,
    higher, all, new.
    """
    detected = generator.random((300, 5)) < [0.5, 0.5, 0.3, 0.9, 0.0]
    controls = np.where(detected, generator.gamma(4, 0.5, (300, 5)), 0)
    weights = np.repeat([2.0, 1.0], 150)
    before = weights @ controls / weights.sum()
    return controls, weights / weights.sum(), before * [1, 0.4, 1.8, 2, 0] + [0, 0, 0, 0, 0.3]


def test_sampled_cells_have_the_predicted_means_on_average(perturbed_cells: Any) -> None:
    generator = np.random.default_rng(0)
    controls, weights, means = screen_of_cells(generator)
    made = perturbed_cells.sample_with_means(
        sp.csr_matrix(controls), weights, means, 40_000, generator
    )
    error = made.std(0) / 200
    assert (np.abs(made.mean(0) - means) < 4 * error + 1e-9).all()
    np.testing.assert_allclose(
        (made > 0).mean(0)[:4], weights @ (controls > 0)[:, :4] * [1, 0.4, 1.8, 1.1], atol=0.05
    )
    assert made.min() >= 0


def test_the_mean_of_sampled_cells_scatters_like_a_sample_s(perturbed_cells: Any) -> None:
    """A metric that takes var / n off the squared error of a mean is then right, and off exact
    means is not.
    """
    generator = np.random.default_rng(0)
    controls, weights, means = screen_of_cells(generator)
    claimed = []
    seen = []
    pinned = []
    for _ in range(400):
        made = perturbed_cells.sample_with_means(
            sp.csr_matrix(controls), weights, means, 50, generator
        )
        claimed.append(made.var(0, ddof=1).sum() / 50)
        seen.append(((made.mean(0) - means) ** 2).sum())
        exact = perturbed_cells.with_means(made, means, np.ones(5), generator)
        pinned.append(((exact.mean(0) - means) ** 2).sum())
    assert np.mean(seen) == pytest.approx(np.mean(claimed), rel=0.1)
    assert np.max(pinned) < 1e-12


def test_each_perturbation_has_as_many_sampled_cells(
    cells: tuple[Context, Any, Path], perturbed_cells: Any
) -> None:
    _, found, path = cells
    made = found.sampled("mean")
    wanted = found.measured.obs.perturbation.value_counts().drop(found.control).to_dict()
    assert made.obs.perturbation.value_counts().drop(found.control).to_dict() == wanted
    np.testing.assert_array_equal(made.X[-found.start.n_obs :].toarray(), found.start.X.toarray())
    assert (perturbed_cells.read_changes(path).sampled("mean").X != made.X).nnz == 0
    assert made.X.max() <= np.log1p(1e4) + 1e-5


def test_a_gene_is_called_as_perturbations_are(perturbed_cells: Any) -> None:
    var = pd.DataFrame({"symbol": ["A", "B", "A", "C"]}, index=["E1", "E2", "E3", "E4"])
    assert perturbed_cells._gene_names(var, ["A", "E2"]) == ["A", "E2", "E3", "C"]


def test_what_the_model_did_not_see_is_held_out(tmp_path: Path, corpus: dict[str, Path]) -> None:
    perturbation = np.array(["a", "b", "c", "control"])[np.arange(600) % 4]
    changed = {"perturbation": perturbation, "is_control": perturbation == "control"}
    files = with_obs(corpus, tmp_path, "simulated", **changed)
    given = {key: files[key] for key in ("model", "manifest", "cells", "embedding")}
    given["out"] = tmp_path / "changes" / "simulated.h5ad"

    def run(**evaluate: Any) -> None:
        predict_changes.predict_changes(
            options=EvaluateOptions.model_validate({"evaluate": evaluate}), **given
        )

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


def test_cell_eval_judges_each_method(cells: tuple[Context, Any, Path], tmp_path: Path) -> None:
    _, found, path = cells
    values = run_bridge("cell-eval", "cell_bridge", tmp_path / "out.json", changes=path, threads=2)
    made = json.loads((tmp_path / "out.json").read_text())
    assert list(values) == [*found.changes, "split halves"]
    control = mean_of(found.measured, "control")
    seen = [mean_of(found.measured, name) - control for name in found.perturbations]
    for method in found.changes:
        change = found.profiles(method).clip(0) - mean_of(found.start, "control")
        pearson = [np.corrcoef(own, other)[0, 1] for own, other in zip(change, seen)]
        assert values[method]["pearson_delta"] == pytest.approx(np.mean(pearson), abs=1e-4)
        assert values[method]["mae_delta"] == pytest.approx(
            np.abs(change - np.array(seen)).mean(), abs=1e-5
        )
    assert made["version"]
    assert made["n_perturbations"] == len(found.perturbations)


def differential(cells: np.ndarray, controls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(G,) twice: log2 fold changes of means, and p of Wilcoxon's test corrected by Benjamini and
    Hochberg.
    """
    means = [np.expm1(values).mean(0) + 1e-9 for values in (cells, controls)]
    p = mannwhitneyu(cells, controls, axis=0, use_continuity=False, method="asymptotic").pvalue
    return np.log2(means[0] / means[1]), false_discovery_control(np.nan_to_num(p, nan=1.0))


def genes_that_differ(found: Any, method: str) -> dict[str, float]:
    """The metrics of profile vcc2026 on differential expression alone, without the package."""
    predicted = found.sampled(method)
    groups: dict[str, dict[str, np.ndarray]] = {}
    for side, cells in (("seen", found.measured), ("made", predicted)):
        dense = cells.X.toarray().astype(float)
        group = cells.obs.perturbation.to_numpy()
        groups[side] = {name: dense[group == name] for name in {*group}}
    values: dict[str, list[float]] = {}
    for name in found.perturbations:
        # but for the perturbed gene
        control = groups["seen"][found.control]
        kept = found.measured.var_names != name
        (made, made_p), (seen, seen_p) = (
            differential(groups[side][name], control) for side in ("made", "seen")
        )
        called = (made_p < 0.05) & kept
        known = (seen_p < 0.05) & kept
        either = (called | known).sum()
        values.setdefault("jaccard", []).append((called & known).sum() / either if either else 1.0)
        if known.sum() >= 10:
            values.setdefault("nmae", []).append(
                np.abs(made - seen)[known].mean() / np.abs(seen[known]).mean()
            )
    return {name: float(np.mean(of)) for name, of in values.items()}


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
    for key in ("methods", "kinds"):
        about[key] = about[key][:methods]
    expression = changed.X.toarray()
    for number, name in enumerate(names):
        rows = np.flatnonzero(changed.obs.perturbation == name)
        up = np.arange(25 * number, 25 * number + 60)
        expression[np.ix_(rows, up)] += 1.5
        about["changes"][:, number, up] += np.linspace(0.5, 1.5, len(about["methods"]))[:, None]
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
    for method, of_method in values.items():
        own = genes_that_differ(found, method)
        for name, metric in theirs.items():
            assert (of_method[metric] is None) == (name not in own), (method, metric)
            if name in own:
                assert of_method[metric] == pytest.approx(own[name], abs=1e-6), (method, metric)
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
    assert [of_method["pds_cosine"] for of_method in values.values()] == [None, None]
    assert all(of_method["expr_mse_unbiased"] is not None for of_method in values.values())


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
