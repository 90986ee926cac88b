"""Cells of full-length protocols: found by their labels, warned of, normalised by gene length, or
refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellmill.data.genes.tables import gene_lengths, gene_table
from cellmill.data.prepare.protocols import find_full_length
from cellmill.errors import DataError
from tests.unit.test_preprocess import run

Make = Callable[..., Path]
TABLE = gene_table("human")
IDS = [gene for gene in sorted(TABLE.protein_coding) if gene in gene_lengths("human")][:200]
LENGTHS = np.array([gene_lengths("human")[gene] for gene in IDS], float)
N_CELLS = 90
IS_SMART = np.arange(N_CELLS) % 3 == 0
MEANS = np.random.default_rng(0).gamma(1.0, 10.0, len(IDS))


@pytest.fixture
def mixed(make_h5ad: Make) -> Path:
    """Molecules of 60 cells, and reads of 30 others whose number is that of molecules times the
    length in kb.
    """
    random = np.random.default_rng(1)
    means = np.where(IS_SMART[:, None], MEANS * LENGTHS / 1000, MEANS)
    names = ["Smart-seq2" if is_smart else "10x 3' v3" for is_smart in IS_SMART]
    obs = pd.DataFrame(
        {"assay": pd.Categorical(names), "n": 1.0}, index=[f"cell_{row}" for row in range(N_CELLS)]
    )
    return make_h5ad(sp.csr_matrix(random.poisson(means).astype(np.float32)), genes=IDS, obs=obs)


def dense(data: ad.AnnData) -> np.ndarray:
    return data.to_df().reindex(columns=IDS, fill_value=0).to_numpy()


SAYS = "30 of 90 cells (33.3%) are of full-length protocols (obs['assay']: 'Smart-seq2' 30)"


def test_cells_are_kept_with_a_warning_by_default(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, report = run(mixed, tmp_path / "out.h5ad")
    assert f"d: warning: {SAYS}: their counts grow with gene length; " in capsys.readouterr().out
    assert (dense(made) == ad.read_h5ad(mixed).X.toarray()).all()
    assert report["full_length"] == {
        "column": "assay",
        "cells": {"Smart-seq2": 30},
        "frac": pytest.approx(1 / 3),
        "gene_length": "keep",
    }
    assert "gene_length" not in report["options"], "options of earlier results stay as they were"


def test_normalised_counts_have_no_trace_of_length(mixed: Path, tmp_path: Path) -> None:
    made, report = run(mixed, tmp_path / "out.h5ad", gene_length="normalise")
    before = ad.read_h5ad(mixed).X.toarray()
    after = dense(made)
    assert (after[~IS_SMART] == before[~IS_SMART]).all()
    sums = before[IS_SMART].sum(axis=1)
    scaled = before[IS_SMART] / LENGTHS
    wanted = scaled * (sums / scaled.sum(axis=1))[:, None]
    assert (np.abs(after[IS_SMART] - wanted) < 1).all()
    assert (np.abs(after[IS_SMART].sum(axis=1) - sums) <= 1).all()
    logs = np.log(LENGTHS)
    shares = [matrix[IS_SMART].sum(axis=0) / MEANS for matrix in (before, after)]
    slopes = [np.polyfit(logs, np.log(share + 1e-3), 1, w=np.sqrt(MEANS))[0] for share in shares]
    assert slopes[0] == pytest.approx(1, abs=0.1)
    assert slopes[1] == pytest.approx(0, abs=0.1)
    assert made.uns["cellmill"]["gene_length"] == f"normalised: {SAYS}"
    again, _ = run(mixed, tmp_path / "again.h5ad", gene_length="normalise", row_block=7)
    assert (dense(again) == after).all()
    assert f"{SAYS}: their counts are normalised by gene length" in report["coverage"]["notes"]


def test_cells_are_refused_on_request(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        run(mixed, tmp_path / "out.h5ad", gene_length="refuse")
    advice = "which preprocess.gene_length refuses; filter them out, or set it to normalise"
    assert str(error.value) == f"{mixed}: {SAYS}, {advice}"


def test_without_genes_of_known_length_nothing_is_normalised(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gene_length normalise requires organism"):
        run(mixed, tmp_path / "out.h5ad", gene_length="normalise", organism=None)


FULL_LENGTH = [
    "Smart-seq2",
    "SMART-Seq v4",
    "smartseq",
    "Smart_seq2 p4",
    "EFO:0008931",
    "EFO:0700016",
    "EFO:0008930",
]
OTHERS = [
    "10x 3' v3",
    "Smart-seq3",
    "EFO:0009922",
    "Drop-seq",
    "CEL-seq2",
    "smart",
    "Seq-Well",
    "EFO:00089310",
    "nan",
]


@pytest.mark.parametrize("name", FULL_LENGTH)
@pytest.mark.parametrize("column", ["assay", "assay_ontology_term_id", "tech", "batch"])
def test_a_protocol_is_found_in_any_column(name: str, column: str) -> None:
    values: list[Any] = [name, "10x 3' v2", None, name]
    for kind in ("object", "category"):
        obs = pd.DataFrame({"x": "y", column: pd.Series(values, dtype=kind), "n": 3})
        found = find_full_length(obs, np.ones(4, bool))
        assert found is not None
        assert (found.column, found.is_full_length.tolist()) == (column, [True, False, False, True])
    found = find_full_length(obs, np.array([False, True, True, True]))
    assert found is not None
    assert found.by_name == {name: 1}


@pytest.mark.parametrize("name", OTHERS)
def test_unrelated_protocols_do_not_count_as_full_length(name: str) -> None:
    assert find_full_length(pd.DataFrame({"assay": [name, name]}), np.ones(2, bool)) is None


def test_lengths_ship_for_both_organisms() -> None:
    human = gene_lengths("human")
    assert (human["ENSG00000141510"], human["ENSG00000075624"]) == (2426, 1300)  # TP53 and ACTB
    for organism, least in (("human", 78_000), ("mouse", 70_000)):
        lengths = gene_lengths(organism)
        assert len(lengths) > least
        assert min(lengths.values()) > 0
