"""Several organisms in one corpus: one-to-one orthologs, packaged or a user's, to a vocabulary and shards of both."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from cellmill.config.corpus import Preprocess, Shard, VocabularyConfig
from cellmill.config.datasets import Dataset
from cellmill.config.options import PreprocessOptions
from cellmill.config.parts.tokens import ContinuousTokens
from cellmill.config.run import Stream
from cellmill.data.genes.build import build_vocabulary
from cellmill.data.genes.names import match_columns
from cellmill.data.genes.tables import gene_table, organism_of, orthologs
from cellmill.data.inputs.formats import open_counts
from cellmill.data.shards.writer import write_shards
from cellmill.data.stream.cell_stream import CellStream
from cellmill.errors import ConfigError, DataError
from cellmill.files import read_json
from cellmill.stages import data as stage

Make = Callable[..., Path]
TRP53, TP53 = "ENSMUSG00000059552", "ENSG00000141510"
H2_OA, HLA_DOA = "ENSMUSG00000024334", "ENSG00000204252"
CD8B1, CD8B = "ENSMUSG00000053044", "ENSG00000172116"  # and CD8B2, so not one to one
MT_CO1_MOUSE, MT_CO1 = "ENSMUSG00000064351", "ENSG00000198804"


def run(path: Path, out: Path, **options: Any) -> dict[str, Any]:
    given = {"min_genes": 0, "max_mito_frac": 1.0, "min_coverage_frac": 0.0} | options
    checked = PreprocessOptions.model_validate({"preprocess": given})
    report = out.with_suffix(".json")
    stage.preprocess(options=checked, input=path, counts="X", dataset=out.stem, out=out, report=report)
    return read_json(report)


def test_the_packaged_table_is_one_to_one_of_known_genes_and_its_own_inverse() -> None:
    to_human, to_mouse = orthologs("mouse", "human"), orthologs("human", "mouse")
    assert len(to_human) == 17_120
    assert {human: mouse for mouse, human in to_human.items()} == to_mouse
    assert set(to_human) <= set(gene_table("mouse").symbols)
    assert set(to_mouse) <= set(gene_table("human").symbols)
    # names that differ by more than their case
    assert (to_human[TRP53], to_human[H2_OA], to_human[MT_CO1_MOUSE]) == (TP53, HLA_DOA, MT_CO1)
    assert CD8B1 not in to_human


def test_genes_are_mapped_and_those_without_an_ortholog_counted(make_h5ad: Make, tmp_path: Path) -> None:
    genes = ["Trp53", "mt-Co1", "H2-Oa", "Cd8b1", "nothing"]
    path = make_h5ad(sp.csr_matrix(np.arange(1.0, 16).reshape(3, 5)), genes=genes)
    report = run(path, tmp_path / "m.h5ad", organism="mouse", reference_organism="human")
    got = ad.read_h5ad(tmp_path / "m.h5ad")
    assert list(got.var_names) == [TP53, MT_CO1, HLA_DOA]
    assert got.var["symbol"].tolist() == ["TP53", "MT-CO1", "HLA-DOA"]
    assert got.X.toarray().tolist() == [[1, 2, 3], [6, 7, 8], [11, 12, 13]]
    coverage, dropped = report["coverage"], report["genes"]["dropped"]
    assert (coverage["frac"], coverage["reference"], coverage["orthologs"]) == (4 / 5, "human", 3)
    assert coverage["ortholog_frac"] == 3 / 4
    assert (dropped["no Ensembl id"], dropped["no ortholog"]) == (1, 1)
    assert report["genes"]["in"] - sum(dropped.values()) == report["genes"]["out"]
    # mitochondrial genes are those of the mouse
    assert report["quantiles"]["mito_frac"]["after"][0] == pytest.approx(1 / 3)


def test_genes_of_the_reference_organism_stay_as_they_are(make_h5ad: Make, tmp_path: Path) -> None:
    path = make_h5ad(sp.csr_matrix(np.ones((2, 2))), genes=["TP53", "FANCD1"])
    run(path, tmp_path / "a.h5ad", reference_organism="human")
    run(path, tmp_path / "b.h5ad")
    assert (tmp_path / "a.h5ad").read_bytes() == (tmp_path / "b.h5ad").read_bytes()


def test_of_a_users_table_pairs_that_occur_once_are_used(make_h5ad: Make, tmp_path: Path) -> None:
    table = tmp_path / "pairs.tsv"
    rows = [
        f"{TP53}.18\tx\t{TRP53}",
        f"{TP53}\tx\t{TRP53}.2",  # the same pair
        f"{CD8B}\tx\t{CD8B1}",
        f"{CD8B}\tx\tENSMUSG00000053977",  # and so two mouse genes
        f"{MT_CO1}\tx\t",
    ]
    table.write_text("\ufeffHuman\tname\tmouse\r\n" + "\r\n".join(rows) + "\r\n", encoding="utf-8")
    assert orthologs("mouse", "human", table) == {TRP53: TP53}
    path = make_h5ad(sp.csr_matrix(np.ones((2, 3))), genes=["Trp53", "Cd8b1", "mt-Co1"])
    options = {"organism": "mouse", "reference_organism": "human", "orthologs": str(table)}
    assert run(path, tmp_path / "m.h5ad", **options)["coverage"]["orthologs"] == 1
    assert list(ad.read_h5ad(tmp_path / "m.h5ad").var_names) == [TP53]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("human\trat\n", "expected a header with the columns mouse and human, of Ensembl ids; mouse is not there"),
        ("human\tmouse\nTP53\tTrp53\n", r"line 2: expected an Ensembl id of mouse \(ENSMUSG...\), got 'Trp53'"),
        (f"human\tmouse\n{TRP53}\t{TRP53}\n", r"line 2: expected an Ensembl id of human \(ENSG...\), got 'ENSMUSG"),
        ("human\tmouse\n", "has no pair of genes that occur in no other pair"),
        (None, "no such file"),
    ],
)
def test_a_wrong_table_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / f"{len(text or '')}.tsv"
    if text is not None:
        path.write_text(text)
    with pytest.raises((ConfigError, DataError), match=message):
        orthologs("mouse", "human", path)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(DataError, match=r"expected a file, got a FIFO"):
        orthologs("mouse", "human", path)


def test_a_reference_requires_an_organism(make_h5ad: Make, tmp_path: Path) -> None:
    path = make_h5ad(sp.csr_matrix(np.ones((2, 2))), genes=["TP53", "MYC"])
    with pytest.raises(ConfigError, match="reference_organism human requires the organism of each dataset"):
        run(path, tmp_path / "a.h5ad", organism=None, reference_organism="human")


def test_human_and_mouse_stand_side_by_side_and_a_token_tells_the_organism(make_h5ad: Make, tmp_path: Path) -> None:
    named = {"human": ["TP53", "MYC", "CD3E"], "mouse": ["Trp53", "Myc"], "mice": ["Cd3e", "Cd4"]}
    files = {
        name: make_h5ad(sp.csr_matrix(np.random.default_rng(0).integers(1, 99, (90, len(genes)))), name, genes=genes)
        for name, genes in named.items()
    }
    cells = {name: tmp_path / f"{name}.cells.h5ad" for name in files}
    for name, path in files.items():
        organism = "human" if name == "human" else "mouse"
        run(path, cells[name], organism=organism, organism_column=True)
        assert set(ad.read_h5ad(cells[name]).obs["organism"]) == {organism}
    both = [cells["human"], cells["mouse"]]
    vocabulary = build_vocabulary(both)
    assert [organism_of(gene) for gene in vocabulary.gene_ids].count("mouse") == 2
    assert vocabulary.n_genes == 5
    options = Shard(cells_per_shard=64, val_frac=0, test_frac=0)
    manifest = write_shards(both, vocabulary, options, tmp_path / "shards" / "manifest.json")
    assert manifest.obs_levels["organism"]["levels"] == ["human", "mouse"]
    tokens = ContinuousTokens(max_tokens=8, covariates=["organism"])
    given = {"global_batch": 16, "token_budget": 200, "rank": 0, "world": 1, "seed": 0, "shuffle": False}
    stream = CellStream(
        manifest.path, "train", tokens, Stream(lanes=2), columns={"organism": "tokens.covariates"}, **given
    )
    pairs = set()
    for batch in (batch for step in stream for batch in step):
        assert batch.levels is not None
        levels = np.repeat(batch.levels[:, 0], np.diff(batch.cu_seqlens))
        pairs |= {(level, organism_of(vocabulary.gene_ids[gene - 2])) for level, gene in zip(levels, batch.genes)}
    assert pairs == {(1, "human"), (2, "mouse")}
    with pytest.raises(DataError, match="no genes in common with the other datasets"):
        build_vocabulary([*both, cells["mice"]])  # mice share an organism, and no gene
    with pytest.raises(ConfigError, match="organism_column requires the organism of each dataset"):
        run(files["human"], tmp_path / "none.h5ad", organism=None, organism_column=True)


def test_human_and_mouse_are_one_corpus_and_raw_mouse_cells_match_its_genes(
    shared: Callable[[str], Path], tmp_path: Path
) -> None:
    corpus = Preprocess(reference_organism="human", min_genes=20, max_mito_frac=1)
    cells, reports = [], {}
    for name, organism in (("merfish_mouse", "mouse"), ("pbmc68k", "human")):
        own = Dataset.model_validate({"dataset": name, "path": "x", "organism": organism}).preprocess(corpus)
        cells.append(tmp_path / f"{name}.h5ad")
        reports[name] = run(shared(f"{name}.h5ad"), cells[-1], **own.model_dump())
    assert reports["merfish_mouse"]["coverage"]["ortholog_frac"] == pytest.approx(1054 / 1122)
    vocabulary = build_vocabulary(cells, VocabularyConfig())
    assert all(gene.startswith("ENSG") for gene in vocabulary.gene_ids)
    manifest = write_shards(cells, vocabulary, Shard(), tmp_path / "shards" / "manifest.json")
    assert sum(split.n_obs for split in manifest.splits.values()) == 979 + 700
    assert set(manifest.obs_levels["dataset"]["levels"]) == {"merfish_mouse", "pbmc68k"}
    with open_counts(shared("merfish_mouse.h5ad")) as raw, open_counts(cells[0]) as made:
        columns = match_columns(raw, vocabulary).target
        assert sorted(columns[columns >= 0]) == sorted(vocabulary.rows_of(made.var_names))
