"""Estimated counts: refused, rounded, or drawn with their expectation. Logarithms and others never
pass for them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from cellmill.config.options import PreprocessOptions
from cellmill.data.fractions import StochasticRounding, describe_fractions
from cellmill.data.inputs.formats import open_counts
from cellmill.errors import DataError
from cellmill.files import read_json
from cellmill.stages import data as stage

Make = Callable[..., Path]
GENES = [f"gene_{i}" for i in range(40)]


def counts_of(depth: float = 1.5, n_cells: int = 60, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    means = random.gamma(0.5, 2 * depth, len(GENES)) * random.gamma(4, 0.25, (n_cells, 1))
    return random.poisson(means).astype(np.float64)


def estimated(seed: int = 0) -> np.ndarray:
    """Counts of which SoupX took a part of the background."""
    counts = counts_of(seed=seed)
    return np.round(counts * (1 - np.random.default_rng(seed).uniform(0, 0.4, counts.shape)), 4)


def half_mapped(seed: int = 0) -> np.ndarray:
    """Counts of RSEM or an EM: some reads are shared between genes."""
    counts = counts_of(seed=seed)
    random = np.random.default_rng(seed)
    return counts + np.where(
        random.random(counts.shape) < 0.3, np.round(random.random(counts.shape), 2), 0
    )


def read(path: Path, rule: Any, block: int = 4096) -> np.ndarray:
    with open_counts(path) as reader:
        reader.counts_rule = rule
        return sp.vstack(list(reader.rows(block))).toarray().astype(np.int64)


def refusal(path: Path, rule: Any = "refuse") -> str:
    with pytest.raises(DataError) as error:
        read(path, rule)
    return str(error.value)


def mean_normalised(counts: np.ndarray) -> np.ndarray:
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1) * 1e4


def smoothed(counts: np.ndarray) -> np.ndarray:
    """Each cell a weighted mean of all cells, as MAGIC diffuses counts."""
    weights = np.random.default_rng(5).gamma(0.5, size=(len(counts), len(counts)))
    return weights @ counts / weights.sum(axis=1, keepdims=True)


OTHERS = {
    "log-transformed": lambda counts: np.log1p(mean_normalised(counts)),
    # of chosen genes
    "log-transformed ": lambda counts: np.log2(mean_normalised(counts)[:, :20] + 1),
    "log-transformed  ": lambda counts: np.log1p(mean_normalised(counts) / 1e4),
    "normalised: all cells have one sum": mean_normalised,
    "normalised": lambda counts: mean_normalised(counts)[:, :20],
    "normalised: all cells have one sum ": lambda counts: mean_normalised(counts) / 1e4,
    "normalised ": lambda counts: mean_normalised(counts)[:, :20] / 1e4,
    "like square roots of counts": np.sqrt,
    "like square roots of counts ": lambda counts: np.where(
        counts > 0, np.sqrt(counts) + np.sqrt(counts + 1), 0
    ),
    "imputed": smoothed,
    "imputed ": lambda counts: smoothed(counts_of(depth=0.2)),
}


@pytest.mark.parametrize("looks", OTHERS)
@pytest.mark.parametrize("rule", ["refuse", "round", "stochastic"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_that_cannot_be_rounded_are_refused(
    make_h5ad: Make, looks: str, rule: str, dtype: Any
) -> None:
    values = OTHERS[looks](counts_of()).astype(dtype)
    message = refusal(make_h5ad(sp.csr_matrix(values)), rule)
    assert f"it looks {looks.strip()}" in message
    assert "set counts_rule" not in message


@pytest.mark.parametrize(
    "values", [estimated(), half_mapped(), 20 * estimated(), counts_of() + np.eye(60, 40) / 2]
)
def test_estimated_counts_are_refused_with_the_remedy(make_h5ad: Make, values: np.ndarray) -> None:
    message = refusal(make_h5ad(sp.csr_matrix(values)))
    assert "is fractional: it looks like estimated counts, as of RSEM, SoupX" in message
    assert message.endswith("; set counts_rule to stochastic or round, if they are counts")
    assert "log" not in message


@pytest.mark.parametrize("values", [estimated(), half_mapped()])
def test_round_takes_the_nearest_whole_number(make_h5ad: Make, values: np.ndarray) -> None:
    assert (read(make_h5ad(sp.csr_matrix(values)), "round") == np.rint(values)).all()


INEXACT = {
    "float32": lambda counts: np.expm1(np.log1p(counts.astype(np.float32))),
    "large": lambda counts: np.expm1(np.log1p(counts.astype(np.float32))),
    "relative": lambda counts: counts * (1 + 1e-7 * np.random.default_rng(0).normal(size=(60, 40))),
    "dense": lambda counts: counts + 1e-9,
}


@pytest.mark.parametrize("name", INEXACT)
def test_counts_with_rounding_errors_are_named(make_h5ad: Make, name: str) -> None:
    counts = counts_of() * (1000 if name == "large" else 1)
    path = make_h5ad(sp.csr_matrix(INEXACT[name](counts)))
    assert "it looks like counts with rounding errors" in refusal(path)
    assert (read(path, "round") == counts).all()


@pytest.mark.parametrize("values", [estimated(), half_mapped()])
def test_a_draw_keeps_row_sums(make_h5ad: Make, values: np.ndarray) -> None:
    got = read(make_h5ad(sp.csr_matrix(values)), "stochastic")
    assert (np.abs(got - values) < 1).all()
    assert (got == values)[values == np.floor(values)].all()
    assert (np.abs(got.sum(axis=1) - values.sum(axis=1)) < 1 + 1e-6).all()


def test_the_mean_of_many_draws_is_the_value() -> None:
    values = estimated()[:6]
    matrix = sp.csr_matrix(values)
    total = np.zeros(values.shape)
    n_draws = 4000
    for seed in range(n_draws):
        drawn = StochasticRounding("file", GENES, seed).round(matrix, 0)
        total += sp.csr_matrix((drawn, matrix.indices, matrix.indptr), values.shape).toarray()
    fractions = values - np.floor(values)
    error = np.sqrt(fractions * (1 - fractions) / n_draws)
    assert (np.abs(total / n_draws - values) <= 4.5 * error + 1e-9).all()


def test_genes_of_a_cell_are_drawn_nearly_independently() -> None:
    # of two genes with one half each, among 40, every pair of outcomes occurs
    matrix = sp.csr_matrix(np.full((1, 40), 0.5))
    pairs = {
        tuple(StochasticRounding("f", GENES, seed).round(matrix, 0)[:2]) for seed in range(100)
    }
    assert pairs == {(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)}


def test_a_draw_depends_only_on_its_position(make_h5ad: Make, tmp_path: Path) -> None:
    values = estimated()
    path = make_h5ad(sp.csr_matrix(values), genes=GENES)
    wanted = read(path, "stochastic")
    assert (read(path, "stochastic", block=7) == wanted).all()
    assert (read(make_h5ad(values, genes=GENES), "stochastic") == wanted).all()  # dense
    order = np.random.default_rng(1).permutation(len(GENES))
    columns = [GENES[i] for i in order]
    assert (
        read(make_h5ad(sp.csr_matrix(values[:, order]), genes=columns), "stochastic")
        == wanted[:, order]
    ).all()
    other = make_h5ad(sp.csr_matrix(values), "other.h5ad", genes=GENES)
    assert (read(other, "stochastic") != wanted).any()


def test_whole_numbers_are_read_as_they_are_under_any_rule(make_h5ad: Make) -> None:
    counts = counts_of()
    path = make_h5ad(sp.csr_matrix(counts))
    for rule in ("refuse", "round", "stochastic"):
        assert (read(path, rule) == counts).all()


def test_the_rule_is_recorded_with_the_cells(
    make_h5ad: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = PreprocessOptions.model_validate(
        {"preprocess": {"organism": None, "min_genes": 0, "max_mito_frac": 1}}
    )
    values = half_mapped()
    out = tmp_path / "out.h5ad"
    n_rounded = int((values != np.floor(values)).sum())
    for rule, path in (
        ("stochastic", make_h5ad(sp.csr_matrix(values))),
        ("round", make_h5ad(counts_of(), "w.h5ad")),
    ):
        report = tmp_path / f"{rule}.json"
        stage.preprocess(
            options=options,
            input=path,
            counts="X",
            dataset="d",
            counts_rule=rule,
            out=out,
            report=report,
        )
        source = read_json(report)["source"]
        made = ad.read_h5ad(out)
        printed = capsys.readouterr().out
        if rule == "round":  # nothing was rounded
            assert "counts_rule" not in source
            assert "cellmill" not in made.uns
            assert "rounded" not in printed
            continue
        assert (source["counts_rule"], source["n_rounded"]) == ("stochastic", n_rounded)
        assert made.uns["cellmill"]["counts_rule"] == "stochastic"
        assert (
            f"d: {n_rounded:,} values had fractions and were rounded (counts_rule stochastic)\n"
            in printed
        )
        with open_counts(out) as reader:
            assert reader.recorded == {"counts_rule": "stochastic"}


def test_logarithms_are_told_apart_from_estimated_counts() -> None:
    for n_cells in (1, 2, 5):
        logs = np.log1p(mean_normalised(counts_of(6, n_cells)))
        assert describe_fractions(sp.csr_matrix(logs)).text == "log-transformed"
        assert describe_fractions(sp.csr_matrix(estimated()[:n_cells])).may_be_counts


def test_imputed_values_below_zero_are_not_called_scaled(make_h5ad: Make) -> None:
    # MAGIC on principal components leaves a few values a little below zero
    imputed = smoothed(counts_of()) - 0.02
    assert 0 < (imputed < 0).mean() < 0.1
    assert "is negative: it looks imputed" in refusal(make_h5ad(imputed))
    scaled = imputed - imputed.mean(axis=0)
    assert "is negative: it looks scaled" in refusal(make_h5ad(scaled))
