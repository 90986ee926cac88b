"""A knock-out equals embedding the cells again without the gene, and its null the nearest genes in
expression.
"""

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

import cellmill
from cellmill import open_cells
from cellmill.config.options import KnockOutOptions
from cellmill.errors import ConfigError, DataError
from cellmill.stages.evaluate import knock_out


def _made(corpus: dict[str, Path], out: Path, **section: Any) -> ad.AnnData:
    options = KnockOutOptions.model_validate({"embed": {}, "knock_out": section})
    knock_out(options=options, model=corpus["model"], input=corpus["cells"], counts="X", out=out)
    return ad.read_h5ad(out)


def _shifts(corpus: dict[str, Path], cells: ad.AnnData, gene: str) -> np.ndarray:
    """Shifts of all cells, from embeddings of whole files; NaN where the gene has no counts."""
    model = cellmill.load(corpus["model"])
    without = cells.copy()
    counts = without.X.toarray()
    column = cells.var_names.get_loc(gene)
    expressed = counts[:, column] > 0
    counts[:, column] = 0
    without.X = sp.csr_matrix(counts)
    before, after = (
        vectors / np.linalg.norm(vectors, axis=1)[:, None]
        for vectors in map(model.embed, (cells, without))
    )
    return np.where(expressed, 1 - (before * after).sum(1), np.nan)


def test_a_shift_is_one_minus_the_cosine(
    tmp_path: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cells = open_cells(corpus["cells"])
    counts = cells.X.toarray()
    n_expressing = (counts > 0).sum(0)
    genes = cells.var_names[np.argsort(-n_expressing)[[3, 40]]].tolist()
    made = _made(corpus, tmp_path / "out.h5ad", genes=genes, null_genes=5)
    assert sorted(made.var_names) == sorted(genes)
    assert made.obs_names.tolist() == cells.obs_names.tolist()
    assert made.X.dtype == np.float32
    assert (np.diff(made.var["z"]) <= 0).all()
    logs = np.log1p(counts / counts.sum(1, keepdims=True) * 1e4)
    expression = logs.sum(0) / np.maximum(n_expressing, 1)
    for gene in genes:
        row = made.var.loc[gene]
        column = cells.var_names.get_loc(gene)
        expected = _shifts(corpus, cells, gene)
        stored = made[:, gene].X.tocoo()
        assert stored.row.tolist() == np.flatnonzero(np.isfinite(expected)).tolist()
        np.testing.assert_allclose(stored.data, expected[stored.row], atol=2e-6)
        assert row["n_cells"] == n_expressing[column]
        np.testing.assert_allclose(
            row[["expression", "shift"]].astype(float),
            [expression[column], np.nanmean(expected)],
            rtol=1e-3,
        )
        others = [j for j in np.flatnonzero(n_expressing >= 20) if j != column]
        nearest = sorted(others, key=lambda j: abs(expression[j] - expression[column]))[:5]
        null = np.array([np.nanmean(_shifts(corpus, cells, cells.var_names[j])) for j in nearest])
        np.testing.assert_allclose(
            row[["null_mean", "null_sd"]].astype(float), [null.mean(), null.std()], rtol=1e-3
        )
        assert row["p"] == pytest.approx((1 + (null >= row["shift"]).sum()) / 6)
        assert row["z"] == pytest.approx((row["shift"] - null.mean()) / null.std(), rel=1e-3)
    printed = capsys.readouterr().out
    assert f"2 genes removed one by one from {cells.n_obs} cells -> " in printed
    assert (
        f"{made.var['symbol'].iloc[0]} moves {made.var['n_cells'].iloc[0]:,} cells by " in printed
    )


def test_all_genes_of_enough_drawn_cells_are_removed_by_default(
    tmp_path: Path, corpus: dict[str, Path]
) -> None:
    made, again, other = (
        _made(corpus, tmp_path / f"{at}.h5ad", cells=50, min_cells=25, null_genes=3, seed=seed)
        for at, seed in enumerate((4, 4, 5))
    )
    assert made.n_obs == 50
    drawn = open_cells(corpus["cells"])[made.obs_names]
    n_expressing = np.asarray((drawn.X > 0).sum(0)).ravel()
    assert {*made.var_names} == {*drawn.var_names[n_expressing >= 25]}
    assert (made.X != again.X).nnz == 0
    assert made.obs_names.tolist() != other.obs_names.tolist()


def test_an_unknown_gene_is_refused_before_any_removal(
    tmp_path: Path, corpus: dict[str, Path]
) -> None:
    cells = open_cells(corpus["cells"])
    symbol = str(cells.var["symbol"].iloc[0])
    n = int((cells.X[:, 0] > 0).sum())
    known = rf" is not a gene of the model; did you mean '{symbol}'\?$"
    rare = f"^knock_out.genes: {symbol} has counts in {n} of the drawn cells, knock_out.min_cells is {cells.n_obs}; "
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ConfigError, f"^knock_out.genes: '{symbol}x'{known}", {"genes": [f"{symbol}x"]}),
        (ConfigError, f"'{symbol.lower()}'{known}", {"genes": [symbol.lower()]}),
        (ConfigError, rare, {"genes": [symbol], "min_cells": cells.n_obs}),
        (
            DataError,
            r"no gene has counts in more than \d+ of .*, knock_out.min_cells is 9,999; lower it$",
            {"min_cells": 9999},
        ),
    ]
    for error, message, section in cases:
        with pytest.raises(error, match=message):
            _made(corpus, tmp_path / "out.h5ad", **section)
    assert not [*tmp_path.iterdir()]


def test_a_cell_with_only_one_gene_has_no_shift(tmp_path: Path, corpus: dict[str, Path]) -> None:
    """Without it these cells have no embedding, so nothing was compared."""
    cells = open_cells(corpus["cells"])
    counts = cells.X.toarray()
    gene = int(np.argmax((counts > 0).sum(0)))
    counts[: len(counts) // 2] *= np.arange(counts.shape[1]) == gene
    counts[len(counts) // 2 :, gene] = 0
    cells.X = sp.csr_matrix(counts)
    cells.write_h5ad(tmp_path / "cells.h5ad")
    given = {**corpus, "cells": tmp_path / "cells.h5ad"}
    row = _made(given, tmp_path / "out.h5ad", genes=[cells.var_names[gene]], null_genes=5).var.iloc[
        0
    ]
    assert row["n_cells"] == 0
    assert row[["shift", "z"]].isna().all()
    assert row["p"] == 1


def test_the_cells_are_not_overwritten_by_their_shifts(
    tmp_path: Path, corpus: dict[str, Path]
) -> None:
    given = tmp_path / "cells.h5ad"
    given.write_bytes(before := corpus["cells"].read_bytes())
    (tmp_path / "link.h5ad").symlink_to(given)
    for out in (given, tmp_path / "link.h5ad"):
        with pytest.raises(
            ConfigError, match=rf"^--out {out} is --input, which would be lost; name another "
        ):
            _made(corpus | {"cells": given}, out, min_cells=1)
    assert given.read_bytes() == before
