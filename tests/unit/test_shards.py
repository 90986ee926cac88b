"""Shards open in anndata, hold every cell once, in rank order and in one split, and are refused when damaged."""

import json
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from small_corpus import genes_named, random_counts, vocabulary_of, write_corpus, write_dataset

from cellmill.config.corpus import Shard
from cellmill.data.arrays import inverse_medians
from cellmill.data.shards.index import hash_cells, hash_genes
from cellmill.data.shards.manifest import Manifest, verify
from cellmill.data.shards.plan import split_by_content, split_by_value
from cellmill.data.shards.reader import open_shards
from cellmill.data.shards.writer import write_shards
from cellmill.errors import DataError
from cellmill.files import sha256_file
from tests.unit.test_tokens import rank_order


def shard_files(manifest: Manifest) -> list[Path]:
    return [manifest.shard_path(shard) for split in manifest.splits.values() for shard in split.shards]


def two_datasets(folder: Path) -> tuple[list[Path], dict[str, sp.csr_matrix], list[str]]:
    """Two datasets whose genes and obs columns overlap; the second has a gene the vocabulary lacks."""
    ids = genes_named(30)
    panels = {"a": ids[:25], "b": [*ids[:4:-1], "ENSG_unknown"]}
    obs = {
        "a": {"donor": pd.Categorical(["x", "y"] * 75), "age": np.arange(150), "ok": [True] * 150},
        "b": {"donor": pd.Categorical(["y", None, "z"] * 30), "n": np.arange(90), "dataset": ["mine"] * 90},
    }
    counts = {name: random_counts(150 if name == "a" else 90, len(panel), ord(name)) for name, panel in panels.items()}
    paths = [write_dataset(folder / "cells" / f"{name}.h5ad", counts[name], panels[name], obs[name]) for name in panels]
    return paths, {name: _over(counts[name], panels[name], ids) for name in panels}, ids


def _over(counts: sp.csr_matrix, panel: list[str], ids: list[str]) -> sp.csr_matrix:
    """Counts over the vocabulary's genes."""
    frame = pd.DataFrame(counts.toarray(), columns=panel)
    return sp.csr_matrix(frame.reindex(columns=ids, fill_value=0).to_numpy())


def test_every_cell_is_written_once_with_its_counts_names_and_obs_in_rank_order(tmp_path: Path) -> None:
    paths, counts, ids = two_datasets(tmp_path)
    vocabulary = vocabulary_of(ids)
    options = Shard(cells_per_shard=64, val_frac=0.2, test_frac=0.2, seed=3)
    manifest = write_shards(paths, vocabulary, options, tmp_path / "shards" / "manifest.json")
    assert manifest == Manifest.read(manifest.path)
    verify(manifest)
    inverse, seen = inverse_medians(vocabulary.medians), set()
    for split, entry in manifest.splits.items():
        assert entry.n_obs == sum(shard.n_obs for shard in entry.shards) > 0
        for shard, rows in zip(entry.shards, open_shards(manifest, split)):
            cells = ad.read_h5ad(rows.path)
            assert list(cells.var_names) == ids
            assert cells.X.data.dtype == np.uint16
            for place, name in enumerate(cells.obs_names):
                dataset, cell = name.split(":")
                original = counts[dataset][int(cell.removeprefix("cell"))]
                span = rows.indptr[place : place + 2].tolist()
                genes, values = rows.read_genes(*span), rows.read_counts(*span)
                wanted_genes, wanted = rank_order(original.indices, original.data, inverse)
                np.testing.assert_array_equal(genes, wanted_genes)
                np.testing.assert_array_equal(values, wanted)
                np.testing.assert_array_equal(cells.X[place].toarray(), original.toarray())
                seen.add(name)
            assert (cells.obs["dataset"] == [name.split(":")[0] for name in cells.obs_names]).all()
            assert shard.sha256 == sha256_file(rows.path)
    assert len(seen) == 240 - sum(manifest.left_out.values())


def test_obs_is_the_union_with_missing_as_missing(tmp_path: Path) -> None:
    paths, _, ids = two_datasets(tmp_path)
    options = Shard(val_frac=0, test_frac=0)
    manifest = write_shards(paths, vocabulary_of(ids), options, tmp_path / "shards" / "manifest.json")
    assert manifest.obs_columns == ["dataset", "donor", "age", "ok", "n", "dataset_original"]
    obs = ad.read_h5ad(shard_files(manifest)[0]).obs
    assert list(obs.columns) == manifest.obs_columns
    a, b = (obs[obs["dataset"] == name] for name in "ab")
    number = np.array([int(name.split(":cell")[1]) for name in a.index])
    np.testing.assert_array_equal(a["age"], number)
    np.testing.assert_array_equal(a["donor"], np.array(["x", "y"])[number % 2])
    assert b["age"].isna().all()
    assert a["n"].isna().all()
    assert list(obs["donor"].cat.categories) == ["x", "y", "z"]
    assert b["donor"].isna().sum() == sum(int(name.split(":cell")[1]) % 3 == 1 for name in b.index)
    assert set(a["ok"].astype(str)) == {"True"}
    assert b["ok"].isna().all()
    assert (b["dataset_original"] == "mine").all()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 250)


def test_a_shard_opens_in_anndata_dense_by_columns_backed_joined_and_written_again(
    corpus: Manifest, tmp_path: Path
) -> None:
    first, second = shard_files(corpus)[:2]
    shard = ad.read_h5ad(first)
    dense = shard.X.toarray()
    canonical = shard.X.copy()
    canonical.sort_indices()
    np.testing.assert_array_equal(dense, canonical.toarray())
    columns = [7, 0, 31]
    np.testing.assert_array_equal(shard[:, columns].X.toarray(), dense[:, columns])
    np.testing.assert_array_equal(shard[5:9, shard.var_names[:6]].X.toarray(), dense[5:9, :6])
    backed = ad.read_h5ad(first, backed="r")
    np.testing.assert_array_equal(backed[3:50].to_memory().X.toarray(), dense[3:50])
    np.testing.assert_array_equal(backed[:, columns].to_memory().X.toarray(), dense[:, columns])
    backed.file.close()
    joined = ad.concat([shard, ad.read_h5ad(second)])
    np.testing.assert_array_equal(joined.X[: len(dense)].toarray(), dense)
    shard.write_h5ad(tmp_path / "again.h5ad", compression="gzip")
    again = ad.read_h5ad(tmp_path / "again.h5ad")
    np.testing.assert_array_equal(again.X.toarray(), dense)
    np.testing.assert_array_equal(again.X.indices, shard.X.indices)
    pd.testing.assert_frame_equal(again.obs, shard.obs)
    # scipy's csr_sort_indices refuses an int64 indptr beside int32 indices, and rank order is not sorted
    for operation in ("max", "sort_indices", "sum_duplicates"):
        changed = ad.read_h5ad(first)
        getattr(changed.X, operation)()
        np.testing.assert_array_equal(changed.X.toarray(), dense)


def test_a_shard_is_contiguous_aligned_and_little_endian(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, 600, cells_per_shard=600)
    with h5py.File(shard_files(manifest)[0]) as file:
        for name, dtype in (("data", "<u2"), ("indices", "<i4"), ("indptr", "<i4")):
            dataset = file["X"][name]
            assert dataset.dtype == np.dtype(dtype)
            assert dataset.chunks is None
            if name != "indptr":
                assert dataset.id.get_offset() % 4096 == 0


def test_datasets_in_any_order_give_the_same_shards(tmp_path: Path) -> None:
    paths, _, ids = two_datasets(tmp_path)
    made = [
        write_shards(some, vocabulary_of(ids), Shard(), tmp_path / name / "manifest.json")
        for name, some in (("x", paths), ("y", paths[::-1]))
    ]
    assert made[0].fingerprint == made[1].fingerprint


def test_cells_of_one_value_of_a_column_stay_in_one_split(tmp_path: Path) -> None:
    donors = [f"d{i % 8}" for i in range(200)]
    manifest = write_corpus(
        tmp_path, 200, obs={"donor": pd.Categorical(donors)}, split_by="donor", val_frac=0.2, test_frac=0.2
    )
    frames = [ad.read_h5ad(path).obs["donor"].astype(str).unique() for path in shard_files(manifest)]
    assert sorted(np.concatenate(frames)) == sorted(set(donors))
    with pytest.raises(DataError, match=r"no obs column 'donr' .* did you mean 'donor'\?"):
        write_corpus(tmp_path / "two", 9, obs={"donor": ["d"] * 9}, split_by="donr")
    with pytest.raises(DataError, match="'dataset' has only the value 'one'"):
        write_corpus(tmp_path / "two", 9, split_by="dataset", val_frac=0.5)
    assert not (tmp_path / "two" / "shards").exists()


def test_cells_without_a_gene_of_the_vocabulary_are_dropped_and_counted(tmp_path: Path) -> None:
    dense = random_counts(60, 20).toarray()
    dense[::10, :15] = 0
    dense[::10, 19] = 4
    path = write_dataset(tmp_path / "a.h5ad", sp.csr_matrix(dense), genes_named(20))
    options = Shard(val_frac=0, test_frac=0)
    few = int((dense[:, :15].sum(axis=1) == 0).sum())
    manifest = write_shards([path], vocabulary_of(genes_named(15)), options, tmp_path / "shards" / "manifest.json")
    assert manifest.left_out == {"a": few}
    assert few >= 6
    assert manifest.splits["train"].n_obs == 60 - few
    with pytest.raises(DataError, match="none of 60 cells of the corpus has a gene of the vocabulary"):
        write_shards([path], vocabulary_of(["ENSG_other"]), options, tmp_path / "none" / "manifest.json")


def test_a_rerun_replaces_a_larger_shard_set(tmp_path: Path) -> None:
    before = write_corpus(tmp_path, 350)
    other = before.path.parent / "notes.h5ad"
    other.write_text("mine")
    after = write_corpus(tmp_path, 120)
    assert {path.name for path in before.path.parent.iterdir()} == {
        "manifest.json",
        "notes.h5ad",
        *(file.name for file in after.files()),
    }
    assert len(shard_files(after)) < len(shard_files(before))
    verify(after)


def test_a_rerun_that_fails_leaves_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_corpus(tmp_path, 350)

    def disk_is_full(path: Path) -> str:
        if path.name == "train-00001.h5ad":
            raise OSError(28, "No space left on device", str(path))
        return sha256_file(path)

    monkeypatch.setattr("cellmill.data.shards.writer.sha256_file", disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        write_corpus(tmp_path, 350)
    assert not manifest.path.exists()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"format": 1}, r"expected manifest format 2, got 1; make the shards again \(the `shard` stage\)"),
        ({"seed": 9}, "expected fingerprint .* edited or damaged"),
        ({"splits": {"train": {}}}, "not a shard manifest"),
        ({"vocabulary": None, "fingerprint": "x"}, "not a shard manifest"),
    ],
)
def test_an_edited_manifest_is_refused(corpus: Manifest, tmp_path: Path, edit: dict, message: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(corpus.path.read_text()) | edit))
    with pytest.raises(DataError, match=rf"manifest\.json: .*{message}"):
        Manifest.read(path)


def test_an_edited_offset_is_refused_and_keys_in_another_order_are_not(corpus: Manifest, tmp_path: Path) -> None:
    tree, path = json.loads(corpus.path.read_text()), tmp_path / "manifest.json"
    path.write_text(json.dumps(tree, sort_keys=True))
    assert Manifest.read(path).splits == corpus.splits
    tree["splits"]["train"]["shards"][0]["genes_at"] += 4
    path.write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"manifest\.json: .*its checksum is not of its entries: edited or damaged"):
        Manifest.read(path)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    ids = genes_named(10)
    paths = [write_dataset(tmp_path / folder / "a.h5ad", random_counts(20, 10), ids) for folder in "xy"]
    with pytest.raises(DataError, match="two datasets have the same file name"):
        write_shards(paths, vocabulary_of(ids), Shard(), tmp_path / "manifest.json")


def test_cells_that_preprocess_did_not_write_are_refused(tmp_path: Path) -> None:
    ids = genes_named(10)
    cells = ad.AnnData(random_counts(80, 10), var=pd.DataFrame(index=ids))
    cells.write_h5ad(tmp_path / "a.h5ad")
    with pytest.raises(DataError, match=r"a\.h5ad: not cells of preprocess: /X/indices is chunked"):
        write_shards([tmp_path / "a.h5ad"], vocabulary_of(ids), Shard(), tmp_path / "shards" / "manifest.json")


def test_the_hash_of_a_cell_ignores_column_order_and_undetected_genes() -> None:
    counts, ids = random_counts(50, 30), genes_named(30)
    hashes = hash_cells(counts.indptr, counts.indices, counts.data, hash_genes(ids))
    order = np.random.default_rng(0).permutation(30)
    permuted = counts[:, order].tocsr()
    more = [*(ids[i] for i in order), "ENSG_absent"]
    again = hash_cells(permuted.indptr, permuted.indices, permuted.data.astype(np.uint16), hash_genes(more))
    np.testing.assert_array_equal(hashes, again)
    assert len(np.unique(hashes[:, 0])) == len(np.unique(hashes[:, 1])) == len(np.unique(hashes)) // 2 == 50


def test_a_changed_count_a_changed_gene_and_swapped_counts_change_the_hash() -> None:
    genes = hash_genes(genes_named(5))
    rows = [([0, 1], [2, 3]), ([0, 1], [3, 2]), ([0, 2], [2, 3]), ([0, 1], [2, 4]), ([0], [2])]
    hashes = [hash_cells(np.array([0, len(g)]), np.array(g), np.array(c), genes)[0].tolist() for g, c in rows]
    assert len({number for pair in hashes for number in pair}) == 2 * len(rows)
    both = hash_cells(np.array([0, 2, 4]), np.array([0, 1] * 2), np.array([2, 3, 70_000, 3]), genes)
    large = hash_cells(np.array([0, 2]), np.array([0, 1]), np.array([70_000, 3]), genes)  # beyond the table
    assert both.tolist() == [hashes[0], large[0].tolist()]


def test_identical_cells_stay_together_and_fractions_are_kept() -> None:
    rng = np.random.default_rng(0)
    hashes = np.repeat(rng.integers(0, 2**64, 20_000, dtype=np.uint64), 2)
    split = split_by_content(hashes, 0, 0.1, 0.2)
    np.testing.assert_array_equal(split[::2], split[1::2])
    np.testing.assert_allclose(np.bincount(split) / len(split), [0.7, 0.1, 0.2], atol=0.01)
    assert (split_by_content(hashes, 1, 0.1, 0.2) != split).mean() > 0.3


def test_an_empty_split_is_refused_by_name(corpus: Manifest) -> None:
    with pytest.raises(DataError, match=r"no cells in the val split, only in: train; raise shard\.val_frac"):
        corpus.entry("val")
    with pytest.raises(DataError, match=r"the val split of 3 cells \(1 distinct\) is empty .*shard\.val_frac"):
        split_by_content(np.zeros(3, np.uint64), 0, 1e-9, 0)
    with pytest.raises(DataError, match="the train split"):
        split_by_content(np.zeros(3, np.uint64), 0, 0.5, 0.499999)


def test_cells_of_one_value_stay_together_and_every_split_gets_a_value() -> None:
    values = np.repeat(np.array([f"donor{i}" for i in range(10)], object), 7)
    split = split_by_value(values, "donor", 0, 0.1, 0.3)
    of_donor = split.reshape(10, 7)
    assert (of_donor == of_donor[:, :1]).all()
    assert np.bincount(of_donor[:, 0]).tolist() == [6, 1, 3]
    shuffled = np.random.default_rng(0).permutation(70)
    np.testing.assert_array_equal(split_by_value(values[shuffled], "donor", 0, 0.1, 0.3), split[shuffled])
    assert any((split_by_value(values, "donor", seed, 0.1, 0.3) != split).any() for seed in (1, 2, 3))


def test_one_value_cannot_be_split() -> None:
    with pytest.raises(DataError, match="'donor' has only the value 'a', too few to split into train and val"):
        split_by_value(np.array(["a", "a"], object), "donor", 0, 0.1, 0)
    with pytest.raises(DataError, match="has only 2 values, too few to split into train and val and test"):
        split_by_value(np.array(["a", "b"], object), "donor", 0, 0.1, 0.1)


def test_values_for_training_leave_the_split_of_the_others_as_it_is() -> None:
    values = np.repeat(np.array(["control", *(f"gene{i}" for i in range(10))], object), 7)
    split = split_by_value(values, "perturbation", 3, 0.1, 0.3, ["control"])
    assert not split[:7].any()
    np.testing.assert_array_equal(split[7:], split_by_value(values[7:], "perturbation", 3, 0.1, 0.3))
    with pytest.raises(DataError, match=r"train_values: no cell of the corpus has perturbation 'contrl'; did you mean"):
        split_by_value(values, "perturbation", 3, 0.1, 0.3, ["contrl"])
    with pytest.raises(DataError, match="train_values has every value of perturbation, so none is left for val and"):
        split_by_value(values, "perturbation", 3, 0.1, 0.3, sorted(set(values)))
