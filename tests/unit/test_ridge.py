"""The ridge regression of an export: references by the slow way, its file, and its part in task imputation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.linear_model import Ridge

from cellmill import open_cells
from cellmill.config.load import stored_options
from cellmill.config.parts.tasks import ImputationConfig
from cellmill.config.run import Consolidate
from cellmill.errors import DataError
from cellmill.evaluate.hidden_genes import fit_ridge as fitting
from cellmill.evaluate.hidden_genes.decoder import decode_expression
from cellmill.evaluate.hidden_genes.fit_ridge import NOISES, WEIGHTS, fit_ridge
from cellmill.evaluate.hidden_genes.partly_hidden_cells import PartlyHiddenCells
from cellmill.evaluate.hidden_genes.ridge import RIDGE, GeneRidge
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.imputation.task import Imputation
from cellmill.files import write_json
from cellmill.stages.export import _write_ridge
from tests.unit.evaluated import make_context

PROFILE = {"family": "profile", "heads": None, "objective": "cell_decoding"}


def _counts(n_cells: int, n_genes: int) -> sp.csr_matrix:
    random = np.random.default_rng(0)
    rates = random.gamma(1, 2, (3, n_genes))[random.integers(3, size=n_cells)]
    return sp.csr_matrix(random.poisson(rates).astype(np.uint32))


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory, corpus: dict[str, Path]) -> Context:
    return make_context(
        tmp_path_factory.mktemp("ridge"), corpus, tokens={"tokenizer": "continuous"}, **PROFILE
    )


def test_loadings_are_those_of_probabilistic_pca() -> None:
    counts = _counts(60, 30)
    dense = counts.toarray().astype(np.float64)
    profiles = np.log1p(1e4 * dense / dense.sum(1, keepdims=True))
    ridge = GeneRidge.fit(counts)
    reference = PCA().fit(profiles)
    eigenvalues = reference.explained_variance_
    n_factors = len(ridge.loadings)
    assert n_factors == 15
    covariance = np.zeros((30, 30))
    for eigenvalue, vector in zip(eigenvalues[:n_factors], reference.components_):
        # normalised profiles vary in all 30 directions
        covariance += (eigenvalue - _residual(profiles, eigenvalues) / 15) * np.outer(
            vector, vector
        )
    np.testing.assert_allclose(ridge.loadings.T @ ridge.loadings, covariance, atol=1e-3)
    np.testing.assert_allclose(ridge.means, profiles.mean(0), rtol=1e-5)
    shares = (dense / dense.sum(1, keepdims=True)).mean(0)
    np.testing.assert_allclose(ridge.shares, shares, rtol=1e-5)


def _residual(profiles: np.ndarray, eigenvalues: np.ndarray) -> float:
    return float(profiles.var(0).sum() - eigenvalues[:15].sum())


def test_factors_are_a_ridge_regression_of_the_visible_genes() -> None:
    counts = _counts(60, 30)
    ridge = replace(GeneRidge.fit(counts), noise=np.array([0.7], np.float32))
    genes = np.arange(0, 30, 4)
    shown = np.setdiff1d(np.arange(1, 29), genes)  # some genes are not measured
    visible = counts.toarray()
    visible[:, np.setdiff1d(np.arange(30), shown)] = 0
    expected = []
    known = ridge.shares[shown].sum()
    per_cell = 1e4 * known / (known + ridge.shares[genes].sum())
    for cell in visible[:, shown].astype(np.float64):
        profile = np.log1p(per_cell * cell / cell.sum())
        regression = Ridge(alpha=0.7, fit_intercept=False)
        regression.fit(ridge.loadings[:, shown].T, profile - ridge.means[shown])
        expected.append(ridge.means[genes] + regression.coef_ @ ridge.loadings[:, genes])
    (predicted,) = ridge.predict(sp.csr_matrix(visible), shown, genes)
    np.testing.assert_allclose(predicted, np.array(expected), atol=1e-4)
    assert predicted.std(0).min() > 0.01


def test_a_ridge_comes_back_bit_for_bit_and_whole(tmp_path: Path) -> None:
    ridge = GeneRidge.fit(_counts(60, 30))
    config: dict[str, Any] = {"n_genes": 30, "ridge": ridge.write(tmp_path)}
    again = GeneRidge.read(tmp_path, config)
    assert again is not None
    for name, value in vars(ridge).items():
        np.testing.assert_array_equal(getattr(again, name), value)
    assert GeneRidge.read(tmp_path, {}) is None  # an export without one
    with pytest.raises(
        DataError, match=r"expected tensors of shapes \[\(31,\), \(31,\), \(15, 31\)"
    ):
        GeneRidge.read(tmp_path, config | {"n_genes": 31})
    # exports of before have no correlation
    entry = config["ridge"]
    earlier = {key: value for key, value in entry.items() if key != "validation_correlation"}
    read = GeneRidge.read(tmp_path, config | {"ridge": earlier})
    assert read is not None
    assert read.validation_correlation is None
    with pytest.raises(DataError, match=r"config\.json: ridge\.validation_correlation: expected a"):
        GeneRidge.read(tmp_path, config | {"ridge": entry | {"validation_correlation": "high"}})
    with pytest.raises(DataError, match=r"config\.json: ridge\.validation_correlation: expected a"):
        GeneRidge.read(tmp_path, config | {"ridge": entry | {"validation_correlation": np.nan}})
    damaged = bytearray((tmp_path / RIDGE).read_bytes())
    damaged[-3] ^= 1
    (tmp_path / RIDGE).write_bytes(damaged)
    with pytest.raises(DataError, match=r"ridge\.safetensors: its SHA-256 is not the one in"):
        GeneRidge.read(tmp_path, config)


def test_validation_cells_choose_penalty_and_weight(context: Context) -> None:
    model = context.model
    chosen = fit_ridge(model)
    assert chosen is not None
    shards = [model.manifest.shard_path(shard) for shard in model.manifest.splits["train"].shards]
    fitted = GeneRidge.fit(sp.vstack([open_cells(path).X for path in shards], format="csr"))
    np.testing.assert_allclose(chosen.means, fitted.means)
    noises = (fitted.noise * NOISES.astype(np.float32)).tolist()
    assert chosen.decoder_weight[0] in WEIGHTS.astype(np.float32)
    with fitting._open_validation(model) as validation:
        assert validation.reader.n_obs == model.manifest.splits["val"].n_obs
        genes = validation.measured_genes
        part_of_gene = fitting.seeded(model.seed, 10).permutation(len(genes)) % 5
        counts = next(validation.reader.rows(10_000))
        totals = np.zeros((len(NOISES), len(WEIGHTS)))
        for part in range(5):
            hidden = PartlyHiddenCells.from_context(
                validation, np.arange(counts.shape[0]), counts, genes[part_of_gene == part]
            )
            decoded = decode_expression(hidden, hidden.embed(hidden.network))
            measured = hidden.hidden_expression
            for row, noise in enumerate(noises):
                noisy = replace(fitted, noise=np.array([noise], np.float32))
                (by_ridge,) = hidden.predict_by_ridge(noisy)
                for column, weight in enumerate(WEIGHTS):
                    mixed = weight * decoded + (1 - weight) * by_ridge
                    for predicted, true in zip(mixed.T, measured.T):
                        if true.std() > 0 and predicted.std() > 0:
                            totals[row, column] += np.corrcoef(predicted, true)[0, 1]
    noise, weight = np.unravel_index(totals.argmax(), totals.shape)
    assert chosen.noise[0] == pytest.approx(noises[noise])
    assert chosen.decoder_weight[0] == pytest.approx(WEIGHTS[weight])


def test_the_stored_correlation_is_a_plain_mean_over_genes(context: Context) -> None:
    model = context.model
    chosen = fit_ridge(model)
    assert chosen is not None
    with fitting._open_validation(model) as validation:
        genes = validation.measured_genes
        part_of_gene = fitting.seeded(model.seed, 10).permutation(len(genes)) % 5
        counts = next(validation.reader.rows(10_000))
        group = fitting._group_cells(model.manifest, counts.shape[0])
        correlations = []
        for part in range(5):
            hidden = PartlyHiddenCells.from_context(
                validation, np.arange(counts.shape[0]), counts, genes[part_of_gene == part]
            )
            decoded = decode_expression(hidden, hidden.embed(hidden.network))
            assert decoded is not None
            (by_ridge,) = hidden.predict_by_ridge(chosen)
            frames = [
                pd.DataFrame(x) for x in (chosen.mix(decoded, by_ridge), hidden.hidden_expression)
            ]
            left = [frame - frame.groupby(group).transform("mean") for frame in frames]
            for gene in left[0]:
                if left[1][gene].std() <= 1e-6:
                    continue  # a constant gene has no correlation
                varies = left[0][gene].std() > 1e-6
                correlations.append(left[0][gene].corr(left[1][gene]) if varies else 0)
    assert chosen.validation_correlation == pytest.approx(np.mean(correlations), abs=1e-3)


def test_the_weight_is_scored_within_donor_or_batch(context: Context) -> None:
    manifest = context.model.manifest
    shards = [manifest.shard_path(shard) for shard in manifest.splits["val"].shards]
    obs = pd.concat([open_cells(path).obs for path in shards])
    columns = [name for name in fitting.GROUPS if name in manifest.obs_levels]
    assert len(columns) > 1
    group = fitting._group_cells(manifest, len(obs))
    together = obs[columns].astype(str).agg("|".join, axis=1)
    assert len(set(zip(group, together))) == len(set(group)) == together.nunique() > 1
    random = np.random.default_rng(0)
    decoded, by_ridge, measured = random.normal(size=(3, len(obs), 7)) + group[:, None]
    measured[:, 3] = 0.1
    centred = [fitting._centre(values, group) for values in (decoded, by_ridge, measured)]
    for weight, score in zip(WEIGHTS, fitting._score_weights(*centred)):
        mixed = weight * decoded + (1 - weight) * by_ridge
        frames = [pd.DataFrame(values) for values in (mixed, measured)]
        left = [frame - frame.groupby(group).transform("mean") for frame in frames]
        expected = [left[0][gene].corr(left[1][gene]) for gene in range(7) if gene != 3]
        assert score == pytest.approx(sum(expected))


def test_cells_alone_in_their_groups_choose_no_weight(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = context.model.manifest.splits["val"].model_copy(update={"n_obs": 0})
    splits = context.model.manifest.splits | {"val": without}
    manifest = context.model.manifest.model_copy(update={"splits": splits})
    expected = fit_ridge(replace(context.model, manifest=manifest))
    monkeypatch.setattr(fitting, "_group_cells", lambda _manifest, n_cells: np.arange(n_cells))
    chosen = fit_ridge(context.model)
    assert chosen is not None
    assert expected is not None
    assert chosen.validation_correlation is None
    assert chosen.decoder_weight == expected.decoder_weight == np.float32(0.5)
    np.testing.assert_array_equal(chosen.noise, expected.noise)


def test_imputation_scores_the_mean_of_decoder_and_ridge(context: Context) -> None:
    ridge = fit_ridge(context.model)
    assert ridge is not None
    ridge = replace(ridge, decoder_weight=np.array([0.25], np.float32))
    config = ImputationConfig(name="imputation", seeds=1)
    without = Imputation(config).run(context)
    result = Imputation(config).run(replace(context, model=replace(context.model, ridge=ridge)))
    rows = {row.method.name: row for row in result.rows}
    assert rows["embedding + decoder + ridge"].method.kind == "model"
    assert rows["PCA50 of all genes + ridge"].method.kind == "baseline"
    others = [
        row for row in result.rows if row.method.name in {x.method.name for x in without.rows}
    ]
    assert others == without.rows  # the rest is as without a ridge
    assert len(rows) == len(others) + 2
    errors = [
        rows[name].value("MSE") for name in ("embedding + decoder + ridge", "embedding + decoder")
    ]
    assert errors[0] < errors[1]  # an untrained decoder


def test_consolidate_writes_the_ridge_of_a_found_corpus(
    context: Context, corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = context.model
    sections = {name: model.config[name] for name in ("model", "objective", "tokens")}
    sections |= {"stream": {}, "parallel": {}, "train": {"steps": 1}}
    options = stored_options(sections, "test")
    fingerprint = model.manifest.fingerprint_with(options.read_columns(), options.number_columns())
    state = {"options": sections, "fingerprint": fingerprint}
    write_json(tmp_path / "run.json", {"manifest": str(corpus["manifest"])})
    known = (model.network, model.vocabulary, model.tokens)
    config = {"n_genes": 400} | _write_ridge(*known, state, tmp_path, tmp_path)
    written = GeneRidge.read(tmp_path, config)
    expected = fit_ridge(replace(model, seed=0))
    assert written is not None
    assert expected is not None
    for name, value in vars(expected).items():
        np.testing.assert_array_equal(getattr(written, name), value)
    state["fingerprint"] = "of other shards"
    assert _write_ridge(*known, state, tmp_path, tmp_path) == {}
    assert "no ridge regression for hidden genes" in capsys.readouterr().out


def test_a_run_of_earlier_options_keeps_its_identity() -> None:
    assert Consolidate().model_dump() == {"checkpoint": "best"}
    without = Consolidate.model_validate({"hidden_genes": "decoder"})
    assert without.model_dump() == {"checkpoint": "best", "hidden_genes": "decoder"}
