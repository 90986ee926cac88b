"""A model that was copied elsewhere knows its training cells by their digests, in any copy of them."""

import json
import shutil
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from safetensors.numpy import load_file, save_file

import cellmill
from cellmill.cli import main
from cellmill.config.evaluate import ExternalModel
from cellmill.data.genes.tables import gene_table
from cellmill.data.inputs.formats import open_counts
from cellmill.data.keys import hash_text
from cellmill.data.shards.cell_digests import FILE, KIT_BARCODES, CorpusDigests, read_digests
from cellmill.data.shards.manifest import Manifest
from cellmill.data.split import hash_cells, hash_genes
from cellmill.errors import DataError
from cellmill.evaluate.seen.held_out_check import HeldOutCheck
from cellmill.evaluate.seen.training_cells import find_training_cells
from cellmill.files import sha256_file
from cellmill.stages import data
from cellmill.stages.evaluate import describe_seen
from cellmill.stages.export import list_cells
from tests.checks import quick
from tests.unit.evaluated import make_context, with_config
from tests.unit.exported import make_corpus
from tests.unit.small_corpus import read_obs
from tests.unit.test_seen_cells import make_run, run_predict


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """700 real PBMC of 8 samples, with barcodes in their names."""
    path = tmp_path_factory.mktemp("demo") / "demo.h5ad"
    data.demo(out=path)
    adata = ad.read_h5ad(path)
    for column in ("kind", "cell_type"):
        adata.obs[column] = np.where(np.arange(adata.n_obs) % 2, "a", "b")
    adata.write_h5ad(path)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, demo: Path) -> dict[str, Path]:
    return make_corpus(tmp_path_factory.mktemp("corpus"), demo)


def with_digests(model: Path) -> Path:
    """The model of a run, with digests as consolidate writes them."""
    fingerprint = json.loads((model / "config.json").read_text())["fingerprint"]
    return with_config(model, **list_cells(model, model.parent / "train", fingerprint))


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory, corpus: dict[str, Path]) -> Path:
    """A model that was copied out of the folder of its run."""
    model = with_digests(make_run(tmp_path_factory.mktemp("run"), corpus))
    return Path(shutil.copytree(model, tmp_path_factory.mktemp("elsewhere") / "copied"))


@pytest.fixture(scope="module")
def trained(corpus: dict[str, Path]) -> set[str]:
    """Names of the training and validation cells, read from the shards."""
    names = read_obs(Manifest.read(corpus["manifest"]), "train", "val").index
    return {name.partition(":")[2] for name in names}


def kinds(model: Path, adata: ad.AnnData, tmp_path: Path) -> np.ndarray:
    """Column `seen` of the command's table, which is that of Python."""
    source = tmp_path / "source.h5ad"
    adata.write_h5ad(source)
    out = tmp_path / "seen.tsv"
    assert main(f"seen --model {model} --input {source} --out {out}".split()) == 0
    table = pd.read_csv(out, sep="\t")
    assert list(table["cell"]) == list(adata.obs_names)
    assert list(table["row"]) == list(range(adata.n_obs))
    return table["seen"].to_numpy(str)


def renamed(adata: ad.AnnData) -> ad.AnnData:
    adata.obs_names = [f"c{i}" for i in range(adata.n_obs)]
    return adata


def test_the_digests_are_those_of_a_slow_sum(
    copied: Path, corpus: dict[str, Path], trained: set[str]
) -> None:
    [listed] = read_digests(
        copied, json.loads((copied / "config.json").read_text())
    ).corpora.values()  # type: ignore[union-attr]
    cells = cellmill.open_cells(corpus["cells"])[:, listed.gene_ids]
    cells = cells[cells.obs_names.isin(trained)]
    rows = sp.csr_matrix(cells.X)
    counts = rows.data.astype(np.uint32)
    hashes = hash_cells(rows.indptr, rows.indices, counts, hash_genes(listed.gene_ids))
    assert listed.cells.tolist() == sorted(set(hashes[:, 0].tolist()))
    barcodes = {hash_text(name.partition("-")[0]) for name in trained}
    assert set(listed.barcodes.tolist()) == barcodes


def test_cells_are_found_in_any_order_of_cells_and_genes(
    copied: Path, demo: Path, trained: set[str], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    adata = ad.read_h5ad(demo)
    adata = adata[rng.permutation(700)[:300], rng.permutation(adata.n_vars)].copy()
    expected = np.where(adata.obs_names.isin(trained), "exact", "new")
    assert (kinds(copied, renamed(adata), tmp_path) == expected).all()


def test_cells_are_found_under_ensembl_ids_and_symbols(
    copied: Path, demo: Path, corpus: dict[str, Path], trained: set[str], tmp_path: Path
) -> None:
    cells = cellmill.open_cells(corpus["cells"])
    expected = np.where(cells.obs_names.isin(trained), "exact", "new")
    assert cells.var_names.str.startswith("ENSG").all()
    by_id = ad.AnnData(cells.X, cells.obs[[]].copy(), pd.DataFrame(index=cells.var_names))
    assert (kinds(copied, renamed(by_id.copy()), tmp_path) == expected).all()
    symbols = gene_table("human").symbols
    by_id.var_names = [symbols.get(gene) or gene for gene in by_id.var_names]
    assert not by_id.var_names.str.startswith("ENSG").all()
    assert (kinds(copied, renamed(by_id), tmp_path) == expected).all()


def test_a_file_without_one_gene_has_the_same_cells(
    copied: Path, demo: Path, trained: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adata = ad.read_h5ad(demo)
    lost = np.asarray((adata.X > 0).mean(0)).ravel().argsort()[-200]
    adata = renamed(adata[:, np.arange(adata.n_vars) != lost].copy())
    assert 50 < (ad.read_h5ad(demo).X[:, [lost]] > 0).sum() < 650
    expected = np.where(ad.read_h5ad(demo).obs_names.isin(trained), "exact", "new")
    assert (kinds(copied, adata, tmp_path) == expected).all()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "source: the file lacks 1 of the 755 genes of a training corpus: a training cell with more than one of them, "
        "or above 16 counts of one, may be missed",
        "source: near copies may be missed: fewer than 8 names of the file's cells have barcodes",
    ]


def test_an_accuracy_says_if_lacked_genes_may_hide_seen_cells(
    copied: Path, demo: Path, trained: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = ad.read_h5ad(demo)[:, 5:].copy()
    hidden = (
        "the file lacks 5 of the 755 genes of a training corpus: a training cell with more than one of them, or above "
        "16 counts of one, may be missed"
    )
    too_few = fewer[:7].copy()  # barcodes of 7 cells may be shared by chance
    for adata, note in ((fewer, ""), (renamed(fewer.copy()), hidden), (too_few, hidden)):
        adata.write_h5ad(tmp_path / "fewer.h5ad")
        about = run_predict(copied, tmp_path / "fewer.h5ad", tmp_path / "out.h5ad").uns
        about = about["cellmill_prediction"]
        printed = capsys.readouterr().out.splitlines()
        [line] = [line for line in printed if "was not trained on: " in line]
        assert line.partition("; ")[2] == note
        assert about.get("training_cells_unknown", "") == note
        assert (about["n_seen_in_training"] == len(trained)) == (note == "")


def test_a_file_with_barcodes_has_no_warning_of_missed_cells(
    copied: Path, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds(copied, ad.read_h5ad(demo)[:, 5:].copy(), tmp_path)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "source: the file lacks 5 of the 755 genes of a training corpus: a training cell with more than one of them, "
        "or above 16 counts of one, is found by its barcode only"
    ]


@pytest.mark.parametrize(
    "change", quick(["half of the counts", "half of the genes"], ["half of the counts"])
)
def test_changed_cells_are_found_by_their_barcodes(
    copied: Path, demo: Path, trained: set[str], tmp_path: Path, change: str
) -> None:
    adata = ad.read_h5ad(demo)
    rng = np.random.default_rng(0)
    if change == "half of the counts":
        counts = sp.csr_matrix(adata.X).astype(int)
        counts.data = rng.binomial(counts.data, 0.5)
        adata.X = counts.astype(np.float32)
    else:
        adata = adata[:, rng.permutation(adata.n_vars)[:400]].copy()
    adata.obs_names = "copy_" + adata.obs_names
    names = adata.obs_names.str.removeprefix("copy_")
    expected = np.where(names.isin(trained), "near", "new")
    assert (kinds(copied, adata, tmp_path) == expected).all()


def test_equal_barcodes_of_other_samples_are_other_cells() -> None:
    """Draws from the smallest kit: nothing is found between samples, all within one."""
    rng = np.random.default_rng(0)
    words = islice(product("ACGT", repeat=10), KIT_BARCODES)
    kit = np.array([f"ACGTAC{''.join(letters)}" for letters in words], object)
    drawn = [rng.choice(kit, 5000, replace=False) for _ in range(44)]
    starts = np.arange(41) * 5000
    samples = [np.sort(np.array([*map(hash_text, sample)], np.uint64)) for sample in drawn[:40]]
    listed = CorpusDigests([], np.zeros(0, np.uint64), np.concatenate(samples), starts)
    others = [f"{barcode}-{number}" for number in range(4) for barcode in drawn[40 + number]]
    hashes = {hash_text(name.partition("-")[0]) for name in others}
    assert len(hashes & set(listed.barcodes.tolist())) > 2000, "samples share barcodes by chance"
    assert not listed.find_known_barcodes(others).any()
    own = [f"x_{barcode}" for barcode in drawn[3][::50]]
    assert listed.find_known_barcodes(own).all()
    assert listed.find_known_barcodes([*own, *others]).sum() == len(own)


def test_python_has_the_table_of_the_command(copied: Path, demo: Path, tmp_path: Path) -> None:
    adata = ad.read_h5ad(demo)
    table = cellmill.load(copied).seen(adata)
    assert (table["seen"].to_numpy(str) == kinds(copied, adata, tmp_path)).all()
    assert list(table.index) == list(adata.obs_names)


def test_the_rows_of_seen_cells_are_printed(
    copied: Path, demo: Path, trained: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"seen --model {copied} --input {demo} --rows".split()) == 0
    summary, heading, *rows = capsys.readouterr().out.splitlines()
    n = len(trained)
    assert summary == (
        f"demo: {n} of 700 cells ({n / 700:.1%}) were in training or validation: {n} with equal counts, "
        "0 near copies (barcode of a training sample)"
    )
    assert heading == "row\tcell\tseen"
    names = ad.read_h5ad(demo).obs_names
    expected = [f"{i}\t{name}\texact" for i, name in enumerate(names) if name in trained]
    assert rows == expected


@pytest.mark.full
def test_a_copied_model_knows_the_cells_of_the_models_before_it(demo: Path, tmp_path: Path) -> None:
    adata = ad.read_h5ad(demo)
    runs = {}
    names = set[str]()
    for name, rows, genes in (("first", slice(0, 350), 500), ("second", slice(350, 700), 765)):
        adata[rows, :genes].copy().write_h5ad(tmp_path / f"{name}.h5ad")
        corpus = make_corpus(tmp_path / f"corpus of {name}", tmp_path / f"{name}.h5ad")
        record = {"init_from": str(tmp_path / "parent")} if runs else {}
        runs[name] = with_digests(make_run(tmp_path / "runs" / name, corpus, **record))
        trained = read_obs(Manifest.read(corpus["manifest"]), "train", "val").index
        names |= {cell.partition(":")[2] for cell in trained}
        if name == "first":  # the second run knows the first by its list alone
            shutil.copytree(runs[name], tmp_path / "parent")
            shutil.rmtree(corpus["manifest"].parent)
    copied = Path(shutil.copytree(runs["second"], tmp_path / "copied"))
    shutil.rmtree(tmp_path / "parent")
    expected = np.where(adata.obs_names.isin(names), "exact", "new")
    assert (kinds(copied, renamed(adata), tmp_path) == expected).all()


def test_a_model_before_it_without_digests_is_named(
    corpus: dict[str, Path], demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_digests(make_run(tmp_path / "run", corpus, init_from="results/hub/me/pbmc"))
    copied = shutil.copytree(model, tmp_path / "copied")
    assert main(f"seen --model {copied} --input {demo}".split()) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last == "demo: the training cells of results/hub/me/pbmc, before this model, are not known"
    )


def test_the_file_is_the_same_each_time(corpus: dict[str, Path], tmp_path: Path) -> None:
    files = [with_digests(make_run(tmp_path / name, corpus)) / FILE for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_file_is_one_line(
    copied: Path, demo: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(copied, tmp_path / "model"))
    path = model / FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content if damage == "changed" else content[:1000])
    assert main(f"seen --model {model} --input {demo}".split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    said = (
        "no such file, though config.json has its SHA-256"
        if damage == "missing"
        else "its SHA-256 is "
    )
    assert line.startswith(f"cellmill seen: {path}: {said}")


def test_a_list_of_wrong_arrays_is_refused(copied: Path, tmp_path: Path) -> None:
    about = {"cellmill": '{"format": 1, "corpora": ["f"], "unknown": []}'}
    tensors = load_file(copied / FILE)
    for name, value, fault in (
        ("0.cells", tensors["0.cells"][::-1].copy(), "0.cells: expected ascending digests"),
        ("0.cells", tensors["0.cells"].astype(np.int64), "0.cells: expected one row of uint64"),
        ("0.samples", np.array([0, 5], np.int64), "0.samples: expected offsets of its barcodes"),
    ):
        save_file(tensors | {name: value}, tmp_path / FILE, metadata=about)
        entry = {"cell_digests": {"sha256": sha256_file(tmp_path / FILE)}}
        with pytest.raises(DataError, match=f"{FILE}: not a list of cells: .*{fault}"):
            read_digests(tmp_path, entry)


def test_a_model_without_digests_may_have_seen_any_cell(
    corpus: dict[str, Path], demo: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(make_run(tmp_path / "run", corpus), tmp_path / "copied")
    with pytest.raises(DataError, match=r"copied: it may have seen these cells, because its"):
        cellmill.load(model).seen(ad.read_h5ad(demo))


def test_an_evaluation_leaves_out_cells_of_a_list(
    copied: Path, demo: Path, trained: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = HeldOutCheck([], ["demo"], find_training_cells(copied).listed)
    adata = ad.read_h5ad(demo)
    names = adata.obs_names
    counts = sp.csr_matrix(adata.X).toarray()
    counts[::2] //= 2
    adata.X = counts
    adata.write_h5ad(tmp_path / "demo.h5ad")
    with open_counts(tmp_path / "demo.h5ad") as reader:
        unseen, n_copies = check.find_held_out("demo", reader)
    assert (unseen == ~names.isin(trained)).all()
    assert n_copies == len(trained)
    n_equal = int(names[1::2].isin(trained).sum())
    assert capsys.readouterr().out.splitlines() == [
        f"demo: {n_equal} cells are equal to training or validation cells of other names: not held out",
        f"demo: {len(trained) - n_equal} cells have barcodes of a training sample of a model before this one: not "
        "held out",
    ]
    renamed(ad.read_h5ad(demo)[:, 5:].copy()).write_h5ad(tmp_path / "fewer.h5ad")
    with open_counts(tmp_path / "fewer.h5ad") as reader:
        check.find_held_out("demo", reader)
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith(
            "demo: warning: the file lacks 5 of the 755 genes of a training corpus: a training cell with more than one"
        )
    )


def test_rows_of_another_model_say_whether_it_saw_the_cells(
    copied: Path, corpus: dict[str, Path], trained: set[str], tmp_path: Path
) -> None:
    context = make_context(tmp_path, corpus)
    names = context.reader.obs_names
    for scored, model, note in (
        (names.isin(trained), copied, " (has seen some of these cells)"),
        (~names.isin(trained), copied, " (has seen none of these cells)"),
        (~names.isin(trained), tmp_path / "model", " (unknown: may have seen these cells)"),
    ):
        external = ExternalModel(model=str(model))
        assert describe_seen(external, replace(context, scored=scored)) == note
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"supervised_by": ["kind"]}))
    assert describe_seen(external, context) == f"{note[:-1]}; supervised by kind)"
    context.reader.close()
