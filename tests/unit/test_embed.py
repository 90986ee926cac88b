"""An embedding depends on a cell's counts of the model's genes, and on nothing else."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch

import cellmill
from cellmill import open_cells
from cellmill.config.parts.tokens import ContinuousTokens, RankTokens, Tokens
from cellmill.data.genes.build import build_vocabulary
from cellmill.data.genes.tables import gene_table
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.formats import open_counts
from cellmill.data.inputs.packed_cells import open_packed
from cellmill.data.packing.cell_file import OpenFiles
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import read_names
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.inference import embed as module
from cellmill.evaluate.inference.files import read_embedding, write_embedding
from cellmill.files import sha256_file
from cellmill.models.export import load_model
from cellmill.stages import cells as stage
from tests.checks import quick
from tests.unit.evaluated import embed, preprocessed
from tests.unit.exported import export_model

TOKENIZERS = ["continuous", "binned", "rank"]


@pytest.fixture
def model(corpus: dict[str, Path]) -> Path:
    return corpus["model"]


def _embed(model: Path, path: Path, **section: float) -> ad.AnnData:
    return ad.read_h5ad(embed(model, path, path.parent / "embedded" / path.name, **section))


def _vectors(model: Path, path: Path, **options: float) -> np.ndarray:
    return np.asarray(_embed(model, path, **options).obsm["X_cellmill"])  # type: ignore[arg-type]


def _written(adata: ad.AnnData, path: Path) -> Path:
    adata.write_h5ad(path)
    return path


@pytest.mark.parametrize("tokenizer", quick(TOKENIZERS, TOKENIZERS[:1]))
def test_the_order_of_columns_changes_nothing(
    tmp_path: Path, corpus: dict[str, Path], tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = "masked_gene" if tokenizer == "rank" else "masked_value"
    model = export_model(
        tmp_path / "model", corpus["vocabulary"], {"tokenizer": tokenizer}, objective=objective
    )
    adata = open_cells(corpus["cells"])
    reference = _vectors(model, corpus["cells"])
    assert reference.dtype == np.float32
    assert reference.shape == (adata.n_obs, 16)
    assert np.ptp(reference, axis=0).min() > 0  # cells differ
    shuffled = adata[:, np.random.default_rng(0).permutation(adata.n_vars)].copy()
    assert np.abs(_vectors(model, _written(shuffled, tmp_path / "a.h5ad")) - reference).max() < 1e-5
    extra = ad.AnnData(sp.csr_matrix(np.full((adata.n_obs, 2), 7, np.uint16)), obs=adata.obs[[]])
    extra.var_names = ["ENSG99999999991", "no such gene"]
    wide = ad.concat([extra, adata], axis="var", merge="first")
    assert (_vectors(model, _written(wide, tmp_path / "b.h5ad")) == reference).all()
    monkeypatch.setattr(module, "ROW_BLOCK", 37)
    for budget in (1, 100, 5000):
        assert (
            np.abs(_vectors(model, corpus["cells"], token_budget=budget) - reference).max() < 1e-5
        )


def test_tokens_made_on_the_fly_equal_those_of_shards(corpus: dict[str, Path]) -> None:
    manifest = Manifest.read(corpus["manifest"])
    from_file = _tokens(
        corpus["cells"], Vocabulary.read(corpus["vocabulary"]), ContinuousTokens(max_tokens=64)
    )
    checked = 0
    for split in manifest.splits.values():
        for shard in split.shards:
            rows = open_packed(manifest.shard_path(shard), OpenFiles())
            for row, name in enumerate(read_names(rows.path, "obs")):
                _, genes, _ = rows.read(row, 1)
                assert (genes[:64] + 2 == from_file[name.partition(":")[2]][0]).all()
                checked += 1
    assert checked == len(from_file)


def test_tokens_of_raw_cells_equal_those_of_preprocessed_cells(
    tmp_path: Path, simulated: Path
) -> None:
    """A gene that few cells of one file have is a token there too, as in a file where many have it."""
    data = ad.read_h5ad(simulated)
    genes = gene_table("human").symbols
    data.var_names = [genes[gene] for gene in data.var_names]
    parts = {"few": data[:9].copy(), "many": data[9:].copy()}
    for name, part in parts.items():
        preprocessed(_written(part, tmp_path / f"{name}.raw.h5ad"), tmp_path / f"{name}.h5ad")
    known = build_vocabulary([tmp_path / f"{name}.h5ad" for name in parts])
    rare = np.asarray((parts["few"].X > 0).sum(axis=0)).ravel()
    assert ((rare == 1) | (rare == 2)).sum() > 5
    checked = 0
    for tokens in (ContinuousTokens(max_tokens=64), RankTokens(max_tokens=64)):
        for name, part in parts.items():
            raw, made = (
                _tokens(tmp_path / f"{name}{kind}.h5ad", known, tokens) for kind in (".raw", "")
            )
            assert len(raw) == len(made) == part.n_obs
            assert all(np.array_equal(raw[cell], made[cell]) for cell in raw)
            checked += len(raw)
    assert checked == 2 * data.n_obs


def _tokens(path: Path, known: Vocabulary, tokens: Tokens) -> dict[str, np.ndarray]:
    """Genes and values of every cell, (2, tokens)."""
    with open_counts(path) as reader:
        made = {}
        for block in module.tokenize_blocks(
            reader.rows(100), module.match_columns(reader, known), known, tokens
        ):
            for at, cell in enumerate(block.cell_ids):
                span = slice(block.cu_seqlens[at], block.cu_seqlens[at + 1])
                made[reader.obs_names[cell]] = np.array([block.token_ids[span], block.values[span]])
    return made


def test_a_cell_without_known_genes_has_no_vector(
    tmp_path: Path, corpus: dict[str, Path], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = open_cells(corpus["cells"])[:20].copy()
    dense = cells.X.toarray()  # type: ignore[union-attr]
    dense[7] = 0
    cells.X = sp.csr_matrix(dense)
    embedded = _embed(model, _written(cells, tmp_path / "a.h5ad"))
    assert embedded.obs.equals(cells.obs)
    assert embedded.X is None
    expected = {
        "model_digest": sha256_file(model / "model.safetensors"),
        "vocabulary_digest": load_model(model)[1].digest,
        "coverage_frac": 1.0,
        "n_without_genes": 1,
        "supervised_by": "",
    }
    assert {name: embedded.uns["cellmill"][name] for name in expected} == expected
    missing = np.isnan(np.asarray(embedded.obsm["X_cellmill"]))
    assert (missing == (np.arange(20) == 7)[:, None]).all()
    assert (
        "a: 1 cells have no gene that the model knows: their rows are NaN\n"
        in capsys.readouterr().out
    )


def test_low_gene_coverage_is_refused(tmp_path: Path, corpus: dict[str, Path], model: Path) -> None:
    adata = open_cells(corpus["cells"])
    rest = adata[:, 5:].copy()
    rest.var_names = [f"foreign {i}" for i in range(rest.n_vars)]
    del rest.var["symbol"]
    mixed = ad.concat([adata[:, :5], rest], axis="var", merge="first")
    message = (
        r"a\.h5ad: \d\.\d% of its counts fall on genes that the model knows, embed\.min_coverage_frac is 0\.3; use a "
        r"model of these genes, or lower it \(--min-coverage-frac, in Python min_coverage_frac\)$"
    )
    with pytest.raises(DataError, match=message):
        _embed(model, _written(mixed, tmp_path / "a.h5ad"))
    assert not (tmp_path / "embedded" / "a.h5ad").exists()
    about = _embed(model, tmp_path / "a.h5ad", min_coverage_frac=0, min_expressed_frac=0).uns[
        "cellmill"
    ]
    assert about["coverage_frac"] < 0.1
    message = r"b\.h5ad: no genes in common with the model: its first is 'foreign 0', the model's 'ENSG\d+' \(.+\); "
    with pytest.raises(DataError, match=message):
        _embed(model, _written(rest, tmp_path / "b.h5ad"))


def test_genes_that_a_file_lacks_are_reported_by_weight(
    tmp_path: Path, corpus: dict[str, Path], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adata = open_cells(corpus["cells"])
    vocabulary = load_model(model)[1]
    whole = _embed(model, corpus["cells"]).uns["cellmill"]["genes"]
    assert (whole["n_present"], whole["expressed_frac"], list(whole["absent"])) == (
        vocabulary.n_genes,
        1.0,
        [],
    )
    assert "warning" not in capsys.readouterr().out
    rarest = np.argsort(vocabulary.n_cells, kind="stable")[: vocabulary.n_genes // 3]
    path = _written(
        adata[:, [vocabulary.gene_ids[row] for row in rarest]].copy(), tmp_path / "rare.h5ad"
    )
    share = vocabulary.n_cells[rarest].sum() / vocabulary.n_cells.sum()
    found = _embed(model, path, min_expressed_frac=0).uns["cellmill"]["genes"]
    assert (found["n_present"], found["expressed_frac"]) == (len(rarest), pytest.approx(share))
    text = (
        f"it measures {len(rarest)} of the model's {vocabulary.n_genes} genes, {share:.1%} of the "
        "genes that a training cell expresses "
        f"(without {vocabulary.symbols[int(vocabulary.n_cells.argmax())]}, "
    )
    assert f"rare: warning: {text}" in capsys.readouterr().out
    with pytest.raises(
        DataError, match=re.escape(f"{path}: {text}") + r".*embed\.min_expressed_frac is 0\.9; "
    ):
        _embed(model, path, min_expressed_frac=0.9)


def test_a_coverage_says_if_more_genes_are_absent_than_named() -> None:
    assert str(module.GeneCoverage(8, 10, 0.5, ("A", "B"))).endswith(" (without A, B)")
    assert str(module.GeneCoverage(7, 10, 0.5, ("A", "B"))).endswith(" (without A, B, ...)")
    assert str(module.GeneCoverage(10, 10, 1.0, ())).endswith("expresses")


def test_a_covariate_that_a_file_lacks_is_warned_of(
    tmp_path: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    levels = {"organism": ("human", "mouse")}
    model = export_model(
        tmp_path / "model", corpus["vocabulary"], {"covariates": ["organism"]}, levels=levels
    )
    unknown = _vectors(model, corpus["cells"])
    assert "simulated: warning: it has no obs column organism, " in capsys.readouterr().out
    adata = open_cells(corpus["cells"])
    for organism, as_unknown in (("human", False), ("Homo sapiens", True)):
        adata.obs["organism"] = organism
        vectors = _vectors(model, _written(adata, tmp_path / "named.h5ad"))
        assert (vectors == unknown).all() == as_unknown
        assert "warning" not in capsys.readouterr().out


def test_only_the_embedding_changes_in_the_file_of_the_user(
    tmp_path: Path, corpus: dict[str, Path], model: Path
) -> None:
    adata = open_cells(corpus["cells"])
    adata.layers["scaled"], adata.uns["note"] = adata.X.astype(np.float32), "mine"
    adata.obsm["X_pca"] = np.eye(adata.n_obs)[:, :2]
    path = _written(adata, tmp_path / "mine.h5ad")
    before = path.read_bytes()
    with pytest.raises(
        ConfigError, match=r"--out .*mine\.h5ad is --input, which would be lost; add --append"
    ):
        embed(model, path, path)
    assert path.read_bytes() == before
    for out in (tmp_path / "copy.h5ad", path, path):  # twice: the second replaces the first
        embed(model, path, out, append=True)
        added = ad.read_h5ad(out)
        assert np.array_equal(added.obsm.pop("X_cellmill"), _vectors(model, corpus["cells"]))
        assert added.uns.pop("cellmill")["model_digest"] == sha256_file(model / "model.safetensors")
        assert added.obs.equals(adata.obs)
        assert added.var.equals(adata.var)
        assert list(added.obsm) == ["X_pca"]
        assert np.array_equal(added.obsm["X_pca"], adata.obsm["X_pca"])
        assert added.uns == {"note": "mine"}
        for kept, own in ((added.X, adata.X), (added.layers["scaled"], adata.layers["scaled"])):
            assert kept.dtype == own.dtype
            assert (kept != own).nnz == 0
    (tmp_path / "a.fasta").write_text(">a\nMKV\n")
    with pytest.raises(ConfigError, match=r"--append adds to an \.h5ad, .*a\.fasta is none"):
        embed(model, tmp_path / "a.fasta", path, append=True)


def test_vectors_are_not_added_to_cells_in_another_order(
    tmp_path: Path, corpus: dict[str, Path], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adata = open_cells(corpus["cells"])[:60].copy()
    path = _written(adata, tmp_path / "mine.h5ad")

    def embed_and_sort(*args: Any, **options: Any) -> module.Embedding:
        """The user sorts the file after it was read."""
        embedding = module.embed_cells(*args, **options)
        path.unlink()
        _written(adata[::-1].copy(), path)
        return embedding

    monkeypatch.setattr(stage, "embed_cells", embed_and_sort)
    with pytest.raises(DataError, match=r"mine\.h5ad: it changed while it was read"):
        embed(model, path, path, append=True)
    assert ad.read_h5ad(path).obs_names.tolist() == adata.obs_names.tolist()[::-1]
    assert [*tmp_path.iterdir()] == [path]


def test_appending_to_a_link_changes_its_target(
    tmp_path: Path, corpus: dict[str, Path], model: Path
) -> None:
    (tmp_path / "data").mkdir()
    path = _written(open_cells(corpus["cells"]), tmp_path / "data" / "cells.h5ad")
    link = tmp_path / "link.h5ad"
    link.symlink_to(path)
    embed(model, link, link, append=True)
    assert link.is_symlink()
    assert [*path.parent.iterdir()] == [path]
    assert "X_cellmill" in ad.read_h5ad(path).obsm
    # a link to another file is replaced, and that file is left alone
    content = path.read_bytes()
    embed(model, Path(shutil.copy(path, tmp_path / "other.h5ad")), link, append=True)
    assert not link.is_symlink()
    assert path.read_bytes() == content


def test_waiting_threads_do_not_spin() -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", "import cellmill.stages.cells"],
        env=environment | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)) == {"0"}


def test_embeddings_of_other_cells_are_refused(tmp_path: Path) -> None:
    obs = ad.AnnData(np.zeros((3, 1))).obs
    path = tmp_path / "e.h5ad"
    write_embedding(path, obs, np.ones((3, 4), np.float32), {"model_digest": "a" * 64})
    assert read_embedding(path, obs.index, "a" * 64, 4).shape == (3, 4)
    # a file of an earlier version has no digest of the model's options
    assert read_embedding(path, obs.index, "a" * 64, 4, "digest").shape == (3, 4)
    for name, names, digest, width, message in (
        ("e", obs.index, "b", 4, r"e\.h5ad: made by model a{12}, expected b{12}; run embed again$"),
        (
            "e",
            obs.index[::-1],
            "a",
            4,
            "expected the 3 cells .*; the first that differs is cell 1, '0' instead of '2'; give the cells that were "
            "embedded, or run embed again$",
        ),
        (
            "e",
            obs.index,
            "a",
            5,
            r"obsm\['X_cellmill'\]: expected 5 columns, got 4; run embed again$",
        ),
        ("gone", obs.index, "a", 4, r"gone\.h5ad: no such file; run embed first$"),
    ):
        with pytest.raises(DataError, match=message):
            read_embedding(tmp_path / f"{name}.h5ad", names, digest * 64, width)


@pytest.mark.parametrize(
    "other", quick(["{id}.4", "{id}_PAR_Y", "{symbol}", "{symbol}_{id}.7"], ["{id}.4", "{symbol}"])
)
def test_duplicate_columns_embed_like_their_sum(
    tmp_path: Path,
    corpus: dict[str, Path],
    model: Path,
    other: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = open_cells(corpus["cells"])
    reference = _vectors(model, corpus["cells"])
    symbols = gene_table("human").symbols  # type: ignore[union-attr]
    counts = whole.X.toarray()  # type: ignore[union-attr]
    moved = np.arange(0, whole.n_vars, 3)
    half = np.random.default_rng(0).binomial(counts[:, moved].astype(np.int64), 0.5)
    counts[:, moved] -= half.astype(counts.dtype)
    split = ad.AnnData(sp.csr_matrix(np.hstack([counts, half]).astype(np.float32)), whole.obs)
    twins = [other.format(id=gene, symbol=symbols[gene]) for gene in whole.var_names[moved]]
    split.var_names = [*whole.var_names, *twins]
    raw = _written(split, tmp_path / "raw.h5ad")
    capsys.readouterr()
    assert (_vectors(model, raw) == reference).all()
    assert "100.0% of counts on known genes" in capsys.readouterr().out
    made = preprocessed(raw, tmp_path / "made.h5ad", min_cells=0)
    assert (_vectors(model, made) == reference).all()
    assert (cellmill.load(model).embed(split) == reference).all()


def test_counts_on_names_that_are_not_known_are_warned_of(
    tmp_path: Path, corpus: dict[str, Path], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = open_cells(corpus["cells"])
    most = np.argsort(-np.asarray(data.X.sum(axis=0)).ravel())[:20]  # type: ignore[union-attr]
    data.var = data.var[[]]  # in which the symbols would name these genes
    data.var_names = [f"odd-{at}" if at in most else gene for at, gene in enumerate(data.var_names)]
    _vectors(model, _written(data, tmp_path / "a.h5ad"))
    warning = re.search(r"a: warning: (\d+\.\d)% of its counts are on genes whose names are not known, most of them on "
                        r"'odd-(\d+)', ", capsys.readouterr().out)  # fmt: skip
    assert warning
    assert int(warning[2]) == most[0]
    lost = data.X[:, most].sum() / data.X.sum()  # type: ignore[index, union-attr]
    assert float(warning[1]) == pytest.approx(100 * lost, abs=0.05)


def test_gpus_of_a_job_that_torch_does_not_see_are_a_warning(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module.load_for_inference(model)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    module.load_for_inference(model)
    assert capsys.readouterr().out == (
        f"warning: torch {torch.__version__} sees none of this job's GPUs: computing on CPU cores\n"
    )
