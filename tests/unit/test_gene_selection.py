"""Genes of a vocabulary: highly variable ones as scanpy selects them, out of core, listed and protein-coding ones."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from cellmill.config.corpus import VocabularyConfig
from cellmill.data.genes import build as module
from cellmill.data.genes.build import build_vocabulary
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def parts(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The simulated cells as two files of other gene orders, and with genes that the other lacks."""
    folder, data = tmp_path_factory.mktemp("parts"), ad.read_h5ad(simulated)
    halves = data[:250], data[250:, ::-1]
    paths = [folder / "a.h5ad", folder / "b.h5ad"]
    for path, half in zip(paths, halves):
        detected = np.asarray((half.X > 0).sum(axis=0)).ravel() > 0
        half[:, detected].copy().write_h5ad(path)
    return paths


def scanpy_genes(path: Path, flavor: str, n: int) -> set[str]:
    """Genes that scanpy selects on a file that fits."""
    scanpy = pytest.importorskip("scanpy")
    if flavor == "seurat_v3":
        pytest.importorskip("skmisc")
    data = ad.read_h5ad(path)
    data.X = sp.csr_matrix(data.X, dtype=np.float64)
    data = data[:, np.asarray(data.X.sum(axis=0)).ravel() > 0].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if flavor == "seurat":
            scanpy.pp.normalize_total(data, target_sum=1e4)
            scanpy.pp.log1p(data)
        scanpy.pp.highly_variable_genes(data, flavor=flavor, n_top_genes=n)
    return set(data.var_names[data.var["highly_variable"]])


@pytest.mark.parametrize("flavor", ["seurat", "seurat_v3"])
@pytest.mark.parametrize("n", [60, *(pytest.param(n, marks=pytest.mark.full) for n in (15, 200))])
def test_variable_genes_are_those_of_scanpy_over_files_and_blocks(
    parts: list[Path], simulated: Path, flavor: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = scanpy_genes(simulated, flavor, n)
    monkeypatch.setattr(module, "_BLOCK", 37)
    options = VocabularyConfig.model_validate({"select": flavor, "max_genes": n})
    assert set(build_vocabulary(parts, options).gene_ids) == wanted
    assert wanted != set(build_vocabulary(parts, VocabularyConfig(max_genes=n)).gene_ids)


@pytest.mark.parametrize("select", ["detected", "seurat", "seurat_v3"])
def test_the_order_by_variability_is_that_in_which_variable_genes_are_selected(
    parts: list[Path], select: str, tmp_path: Path
) -> None:
    options = {"select": select, "max_genes": 200, "variability": True}
    if select == "seurat_v3":
        pytest.importorskip("skmisc")
    path = tmp_path / "vocabulary.tsv"
    build_vocabulary(parts, VocabularyConfig.model_validate({**options, "quantiles": True})).write(path)
    got = Vocabulary.read(path)
    assert got.variability is not None
    assert got.quantiles is not None
    flavor = "seurat" if select == "detected" else select
    order = [got.gene_ids[row] for row in np.argsort(got.variability)]
    some = build_vocabulary(parts, VocabularyConfig.model_validate({"select": flavor, "max_genes": 60})).gene_ids
    kept = some if select != "detected" else {*some} & {*got.gene_ids}
    assert {*order[: len(kept)]} == {*kept}
    assert len(kept) > 5
    text = path.read_text()
    path.write_text(text.replace("#variability\t", "#variability\t0\t"))
    with pytest.raises(DataError, match=r"line 204: expected #variability and a place for each gene"):
        Vocabulary.read(path)


@pytest.mark.parametrize("flavor", ["seurat", "seurat_v3"])
@pytest.mark.parametrize("name", ["pbmc68k.h5ad", "merfish_mouse.h5ad"])
def test_variable_genes_of_real_cells_are_those_of_scanpy(
    shared: Callable[[str], Path], flavor: str, name: str
) -> None:
    path = shared(name)
    wanted = scanpy_genes(path, flavor, 100)
    got = build_vocabulary([path], VocabularyConfig.model_validate({"select": flavor, "max_genes": 100}))
    assert set(got.gene_ids) == wanted


def test_seurat_v3_without_scikit_misc_names_the_way_out(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skmisc.loess", None)
    with pytest.raises(ConfigError, match=r"select seurat_v3 requires skmisc.loess, .*: pip install 'cellmill\[hvg\]'"):
        build_vocabulary([simulated], VocabularyConfig(select="seurat_v3", max_genes=9))


def test_variable_genes_need_a_number() -> None:
    with pytest.raises(ValueError, match="select seurat requires max_genes, the number of genes"):
        VocabularyConfig(select="seurat")


def test_a_list_of_ids_and_symbols_selects_genes(
    make_h5ad: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ["ENSG00000141510", "ENSG00000139618", "ENSG00000000003", "ENSG00000000419"]
    cells = make_h5ad(sp.csr_matrix(np.ones((3, 4))), genes=ids)
    listed = tmp_path / "genes.txt"
    listed.write_text("\ufeffTP53\r\nFANCD1\r\nENSG00000000003.15\r\n\r\nMYC\r\nTP53\r\n", encoding="utf-8")
    got = build_vocabulary([cells], VocabularyConfig(genes=str(listed)))
    assert got.gene_ids == sorted(ids[:3])  # FANCD1 is an alias of BRCA2
    assert capsys.readouterr().out == f"{listed}: 1 of 4 genes are not in the corpus, such as MYC\n"
    for text, message in (("rubbish\n", "none of its 1 genes is in the corpus"), ("\n", "empty; list one gene a line")):
        listed.write_text(text)
        with pytest.raises((ConfigError, DataError), match=message):
            build_vocabulary([cells], VocabularyConfig(genes=str(listed)))


def test_protein_coding_genes_are_those_of_gencode(make_h5ad: Make) -> None:
    ids = ["ENSG00000141510", "ENSG00000229807", "ENSMUSG00000059552", "ENSMUSG00000086503"]  # TP53, XIST of both
    cells = make_h5ad(sp.csr_matrix(np.ones((3, 4))), genes=ids)
    assert build_vocabulary([cells], VocabularyConfig(protein_coding=True)).gene_ids == [ids[0], ids[2]]
    other = make_h5ad(sp.csr_matrix(np.ones((3, 1))), "b.h5ad", genes=["TP53"])
    with pytest.raises(DataError, match="protein_coding requires Ensembl ids, got gene 'TP53'"):
        build_vocabulary([other], VocabularyConfig(protein_coding=True))
