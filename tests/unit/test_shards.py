"""Shards open in anndata, hold every cell once, in rank order and in one split, and are refused
when damaged.

Levels of obs columns are equal in every rank, split and run, and absent from batches of runs that
do not name them.
"""

import json
from functools import reduce
from itertools import chain
from operator import getitem
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from small_corpus import (
    genes_named,
    random_counts,
    read_obs,
    shard_paths,
    stream_of,
    vocabulary_of,
    write_corpus,
    write_dataset,
)

from cellmill import open_cells
from cellmill.cli import main
from cellmill.config import check_config
from cellmill.config.corpus import MISSING, Shard
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.rank_order import inverse_medians, rank_order_rows
from cellmill.data.rows import SparseCounts
from cellmill.data.shards.manifest import Manifest, SplitEntry, verify
from cellmill.data.shards.obs import (
    MAX_LEVELS,
    JointObs,
    encode_columns,
    encode_levels,
    find_levels,
    join_columns,
)
from cellmill.data.shards.reader import open_shards
from cellmill.data.shards.writer import write_shards
from cellmill.data.split import hash_cells, hash_genes, split_by_content, split_by_value
from cellmill.data.stream.cell_stream import CellStream
from cellmill.errors import ConfigError, DataError
from cellmill.files import sha256_file


def two_datasets(folder: Path) -> tuple[list[Path], dict[str, sp.csr_matrix], list[str]]:
    """Two datasets whose genes and obs columns overlap; the second has a gene the vocabulary lacks."""
    ids = genes_named(30)
    panels = {"a": ids[:25], "b": [*ids[:4:-1], "ENSG_unknown"]}
    obs = {
        "a": {"donor": pd.Categorical(["x", "y"] * 75), "age": np.arange(150), "ok": [True] * 150},
        "b": {
            "donor": pd.Categorical(["y", None, "z"] * 30),
            "n": np.arange(90),
            "dataset": ["mine"] * 90,
        },
    }
    counts = {
        name: random_counts(150 if name == "a" else 90, len(panel), ord(name))
        for name, panel in panels.items()
    }
    paths = [
        write_dataset(folder / "cells" / f"{name}.h5ad", counts[name], panels[name], obs[name])
        for name in panels
    ]
    frames = {
        name: pd.DataFrame(counts[name].toarray(), columns=panel) for name, panel in panels.items()
    }
    return (
        paths,
        {
            name: sp.csr_matrix(frame.reindex(columns=ids, fill_value=0))
            for name, frame in frames.items()
        },
        ids,
    )


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Manifest, dict[str, sp.csr_matrix], Vocabulary]:
    """Shards of `two_datasets`, with their counts and genes."""
    folder = tmp_path_factory.mktemp("two")
    paths, counts, ids = two_datasets(folder)
    options = Shard(cells_per_shard=64, val_frac=0.2, test_frac=0.2, seed=3)
    vocabulary = vocabulary_of(ids)
    return (
        write_shards(paths, vocabulary, options, folder / "shards" / "manifest.json"),
        counts,
        vocabulary,
    )


def test_every_cell_is_written_once_with_its_counts(two: Any) -> None:
    manifest, counts, vocabulary = two
    assert manifest == Manifest.read(manifest.path)
    verify(manifest)
    inverse = inverse_medians(vocabulary.medians)
    seen = set()
    for split, entry in manifest.splits.items():
        assert entry.n_obs == sum(shard.n_obs for shard in entry.shards) > 0
        for shard, rows in zip(entry.shards, open_shards(manifest, split)):
            cells = open_cells(rows.path)
            assert list(cells.var_names) == vocabulary.gene_ids
            assert cells.X.data.dtype == np.uint16
            for place, name in enumerate(cells.obs_names):
                dataset, cell = name.split(":")
                original = counts[dataset][int(cell.removeprefix("cell"))]
                _, genes, values = rows.read(place, 1)
                row = SparseCounts(original.indptr, original.indices, original.data)
                np.testing.assert_array_equal([genes, values], rank_order_rows(row, inverse)[1:])
                np.testing.assert_array_equal(cells.X[place].toarray(), original.toarray())
                seen.add(name)
            assert (cells.obs["dataset"] == [name.split(":")[0] for name in cells.obs_names]).all()
            assert shard.sha256 == sha256_file(rows.path)
    assert len(seen) == 240 - sum(manifest.left_out.values())


def test_obs_is_the_union_with_missing_as_missing(two: Any) -> None:
    columns = ["dataset", "donor", "age", "ok", "n", "dataset_original"]
    obs = pd.concat([ad.read_h5ad(path).obs for path in shard_paths(two[0])])
    assert list(obs.columns) == two[0].obs_columns == columns
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
    # arrays of more than a page
    return write_corpus(tmp_path_factory.mktemp("corpus"), 600, cells_per_shard=300)


def test_anndata_opens_a_shard_without_counts(corpus: Manifest) -> None:
    path = shard_paths(corpus)[0]
    with h5py.File(path) as file:
        packed = file["uns/packed/bytes"]
        assert packed.chunks is None
        assert packed.id.get_offset() % 4096 == 0
    shard = ad.read_h5ad(path)
    assert shard.X is None
    assert shard.shape == (300, 40)
    pd.testing.assert_frame_equal(shard.obs, open_cells(path).obs)


def test_chosen_cells_of_a_shard_are_an_anndata(corpus: Manifest) -> None:
    path = shard_paths(corpus)[0]
    dense = open_cells(path).X.toarray()
    rows = [299, 0, 7, 7, 150]
    chosen = open_cells(path, rows)
    np.testing.assert_array_equal(chosen.X.toarray(), dense[rows])
    assert chosen.X.has_canonical_format
    assert list(chosen.obs_names) == [ad.read_h5ad(path).obs_names[row] for row in rows]
    with pytest.raises(DataError, match="expected rows from 0 to 299, got 7 to 300"):
        open_cells(path, [7, 300])


def test_an_unpacked_shard_opens_in_anndata(corpus: Manifest, tmp_path: Path) -> None:
    path = shard_paths(corpus)[0]
    out = tmp_path / "plain.h5ad"
    assert main(["unpack", str(path), "--out", str(out)]) == 0
    plain = ad.read_h5ad(out)
    expected = open_cells(path)
    np.testing.assert_array_equal(plain.X.toarray(), expected.X.toarray())
    pd.testing.assert_frame_equal(plain.obs, expected.obs)
    pd.testing.assert_frame_equal(plain.var, expected.var)


@pytest.mark.parametrize(
    ("options", "n_donors"),
    [
        ({"val_frac": 0.1, "test_frac": 0.3}, {"train": 6, "val": 1, "test": 3}),
        (
            {"train_values": ["d3"], "val_frac": 0.1, "test_frac": 0.9},
            {"train": 1, "val": 1, "test": 8},
        ),
    ],
    ids=["by fractions", "all but d3 held out"],
)
def test_cells_of_one_value_of_a_column_stay_in_one_split(
    tmp_path: Path, options: dict[str, Any], n_donors: dict[str, int]
) -> None:
    manifest = write_corpus(
        tmp_path,
        200,
        obs={"donor": [f"d{i % 10}" for i in range(200)]},
        split_by="donor",
        **options,
    )
    donors = {name: {*read_obs(manifest, name)["donor"]} for name in manifest.splits}
    assert {name: len(own) for name, own in donors.items()} == n_donors
    assert len(set.union(*donors.values())) == 10
    assert {*options.get("train_values", [])} <= donors["train"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_by": "donr"}, r"no obs column 'donr' .* did you mean 'donor'\?"),
        (
            {"split_by": "dataset"},
            "'dataset' has only the value 'one', too few to split into train and val;",
        ),
        (
            {"split_by": "donor", "test_frac": 0.1},
            "has only 2 values, too few to split into train and val and test",
        ),
        (
            {"split_by": "donor", "train_values": ["d00"]},
            r"shard\.train_values: no cell of the corpus has donor 'd00'; did you mean",
        ),
        (
            {"split_by": "donor", "train_values": ["d0", "d1"]},
            r"shard\.train_values has every value of donor, so none is left for val and",
        ),
        (
            {"val_frac": 1e-9},
            r"the val split of 9 cells \(9 distinct\) is empty .*raise shard\.val_frac",
        ),
        ({"test_frac": 0.499999}, "the train split of 9 cells .*; lower val_frac or test_frac"),
    ],
    ids=str,
)
def test_a_split_that_cannot_be_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        write_corpus(
            tmp_path, 9, obs={"donor": ["d0"] * 4 + ["d1"] * 5}, **{"val_frac": 0.5} | options
        )
    assert not (tmp_path / "shards").exists()


def test_cells_without_a_known_gene_are_dropped(tmp_path: Path) -> None:
    dense = random_counts(60, 20).toarray()
    dense[::10, :15] = 0
    dense[::10, 19] = 4
    path = write_dataset(tmp_path / "a.h5ad", sp.csr_matrix(dense), genes_named(20))
    options = Shard(val_frac=0, test_frac=0)
    few = int((dense[:, :15].sum(axis=1) == 0).sum())
    manifest = write_shards(
        [path], vocabulary_of(genes_named(15)), options, tmp_path / "shards" / "manifest.json"
    )
    assert manifest.left_out == {"a": few}
    assert few >= 6
    assert manifest.splits["train"].n_obs == 60 - few
    with pytest.raises(
        DataError, match="none of 60 cells of the corpus has a gene of the vocabulary"
    ):
        write_shards(
            [path], vocabulary_of(["ENSG_other"]), options, tmp_path / "none" / "manifest.json"
        )


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (
            ["format"],
            1,
            r"expected manifest format 3, got 1; make the shards again \(the `shard` stage\)",
        ),
        (["seed"], 9, "expected fingerprint .* edited or damaged"),
        (["splits", "train"], {}, "not a shard manifest"),
        (["vocabulary"], None, "not a shard manifest"),
        (
            ["splits", "train", "shards", 0, "genes_at"],
            4100,
            "its checksum is not of its entries: edited or damaged",
        ),
    ],
    ids=str,
)
def test_an_edited_manifest_is_refused(
    corpus: Manifest, tmp_path: Path, keys: list[Any], value: Any, message: str
) -> None:
    tree = json.loads(corpus.path.read_text())
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(tree, sort_keys=True))
    assert Manifest.read(path).splits == corpus.splits
    reduce(getitem, keys[:-1], tree)[keys[-1]] = value
    path.write_text(json.dumps(tree))
    with pytest.raises(DataError, match=rf"manifest\.json: .*{message}"):
        Manifest.read(path)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    ids = genes_named(10)
    paths = [
        write_dataset(tmp_path / folder / "a.h5ad", random_counts(20, 10), ids) for folder in "xy"
    ]
    with pytest.raises(DataError, match="two datasets have the same file name"):
        write_shards(paths, vocabulary_of(ids), Shard(), tmp_path / "manifest.json")


def test_cells_that_preprocess_did_not_write_are_refused(tmp_path: Path) -> None:
    ids = genes_named(10)
    cells = ad.AnnData(random_counts(80, 10), var=pd.DataFrame(index=ids))
    cells.write_h5ad(tmp_path / "a.h5ad")
    with pytest.raises(
        DataError,
        match=r"a\.h5ad: not cells that preprocess wrote: no uns/packed; give a file that preprocess or shard wrote$",
    ):
        write_shards(
            [tmp_path / "a.h5ad"],
            vocabulary_of(ids),
            Shard(),
            tmp_path / "shards" / "manifest.json",
        )


def test_a_changed_count_changes_the_hash() -> None:
    genes = hash_genes(genes_named(5))
    rows = [([0, 1], [2, 3]), ([0, 1], [3, 2]), ([0, 2], [2, 3]), ([0, 1], [2, 4]), ([0], [2])]
    hashes = [
        hash_cells(np.array([0, len(g)]), np.array(g), np.array(c), genes)[0].tolist()
        for g, c in rows
    ]
    assert len({*chain.from_iterable(hashes)}) == 2 * len(rows)
    both = hash_cells(np.array([0, 2, 4]), np.array([0, 1] * 2), np.array([2, 3, 70_000, 3]), genes)
    # beyond the table
    large = hash_cells(np.array([0, 2]), np.array([0, 1]), np.array([70_000, 3]), genes)
    assert both.tolist() == [hashes[0], large[0].tolist()]


def test_identical_cells_stay_in_one_split() -> None:
    rng = np.random.default_rng(0)
    hashes = np.repeat(rng.integers(0, 2**64, 20_000, dtype=np.uint64), 2)
    split = split_by_content(hashes, 0, 0.1, 0.2)
    np.testing.assert_array_equal(split[::2], split[1::2])
    np.testing.assert_allclose(np.bincount(split) / len(split), [0.7, 0.1, 0.2], atol=0.01)
    assert (split_by_content(hashes, 1, 0.1, 0.2) != split).mean() > 0.3


def test_a_split_without_cells_is_refused_by_name(corpus: Manifest) -> None:
    with pytest.raises(
        DataError, match=r"no cells in the val split, only in: train; raise shard\.val_frac"
    ):
        corpus.entry("val")
    empty = SplitEntry(n_obs=0, nnz=0, shards=[], index={})
    swapped = corpus.model_copy(
        update={"splits": corpus.splits | {"train": empty, "val": corpus.splits["train"]}}
    )
    with pytest.raises(DataError) as error:
        swapped.entry("train")
    assert str(error.value) == (
        f"{corpus.path}: no cells in the train split, only in: val; lower shard.val_frac or shard.test_frac"
    )


def test_fixed_training_values_leave_the_rest_of_the_split() -> None:
    values = np.repeat(np.array(["control", *(f"gene{i}" for i in range(10))], object), 7)
    split = split_by_value(values, "perturbation", 3, 0.1, 0.3, ["control"])
    assert not split[:7].any()
    np.testing.assert_array_equal(
        split[7:], split_by_value(values[7:], "perturbation", 3, 0.1, 0.3)
    )


COLUMNS = {"assay": "objective.batch_column", "dataset": "a", "donor": "b", "sorted": "c"}
LEVELS = {
    "assay": ("10x", "smart-seq", "<missing>"),
    "dataset": ("one", "two"),
    # whole numbers of one file, absent from the other: stored as floats
    "donor": ("10", "9", "<missing>"),
    "sorted": ("False", "True"),
}


def _obs(n: int, first: bool) -> dict[str, Any]:
    at = np.arange(n)
    assay = np.where(at % 3 == 0, "10x", "smart-seq").astype(object)
    assay[at % 7 == 0] = None
    own = {"donor": np.where(at % 2, 9, 10)} if first else {}
    return {
        "assay": pd.Categorical(assay) if first else "10x",
        "sorted": at % 2 == 0,
        "score": at / 8,
        **own,
    }


def _corpus(folder: Path, **changed: Any) -> Manifest:
    ids = genes_named(40)
    paths = []
    for seed, (name, n) in enumerate({"one": 150, "two": 90}.items()):
        obs = _obs(n, name == "one") | (changed if name == "one" else {})
        paths.append(
            write_dataset(folder / "cells" / f"{name}.h5ad", random_counts(n, 40, seed), ids, obs)
        )
    options = Shard(val_frac=0.2, test_frac=0.2, cells_per_shard=64)
    return write_shards(paths, vocabulary_of(ids), options, folder / "shards" / "manifest.json")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return _corpus(tmp_path_factory.mktemp("levels"))


def _stream(manifest: Manifest, columns: dict[str, str], **given: Any) -> CellStream:
    return stream_of(
        manifest, options={"lanes": 4}, token_budget=90, level_columns=columns, **given
    )


def _numbers_by_cell(manifest: Manifest, split: str) -> np.ndarray:
    """Of each cell in the order of the shards, from the shards' obs as anndata reads it."""
    obs = [ad.read_h5ad(manifest.shard_path(shard)).obs for shard in manifest.splits[split].shards]
    rows = []
    for _, row in pd.concat([frame.astype(object) for frame in obs]).iterrows():
        texts = {"assay": row["assay"], "dataset": row["dataset"], "sorted": str(row["sorted"])}
        texts["donor"] = row["donor"] if pd.isna(row["donor"]) else str(int(row["donor"]))
        levels = {name: "<missing>" if pd.isna(text) else text for name, text in texts.items()}
        rows.append([LEVELS[name].index(levels[name]) + 1 for name in COLUMNS])
    return np.array(rows)


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_rank_reads_the_levels_of_its_cells(manifest: Manifest, split: str) -> None:
    expected = _numbers_by_cell(manifest, split)
    assert {len(set(column)) for column in expected.T.tolist()} == {2, 3}
    seen: set[int] = set()
    for rank in range(2):
        stream = _stream(manifest, COLUMNS, split=split, rank=rank, world=2, is_training=False)
        assert stream.levels == LEVELS
        for batch in chain.from_iterable(stream):
            assert batch.levels is not None
            assert batch.levels.dtype == np.int32
            assert batch.levels.shape == (len(batch.cell_ids), len(COLUMNS))
            np.testing.assert_array_equal(batch.levels, expected[batch.cell_ids])
            seen.update(batch.cell_ids.tolist())
        stream.close()
    assert seen == set(range(len(expected)))


def test_without_columns_the_fingerprint_is_unchanged(manifest: Manifest, tmp_path: Path) -> None:
    plain = _stream(manifest, {})
    asking = _stream(manifest, {"assay": "x"})
    assert plain.fingerprint == manifest.fingerprint == manifest.fingerprint_with([])
    assert asking.fingerprint != manifest.fingerprint
    ours, theirs = (next(iter(stream))[0] for stream in (plain, asking))
    assert ours.levels is None
    assert (ours.token_ids == theirs.token_ids).all()
    # another value of one cell is other data for a run that reads the column, and for no other
    changed = _obs(150, True)["assay"].astype(object)
    changed[1] = "10x"
    other = _corpus(tmp_path, assay=pd.Categorical(changed))
    assert other.fingerprint == manifest.fingerprint
    assert other.fingerprint_with(["sorted"]) == manifest.fingerprint_with(["sorted"])
    assert other.fingerprint_with(["assay"]) != manifest.fingerprint_with(["assay"])


def test_a_column_that_cannot_be_read_is_named_in_one_line(manifest: Manifest) -> None:
    path = manifest.path
    message = f"{path}: no obs column 'assey' (objective.batch_column); did you mean 'assay'?"
    with pytest.raises(DataError) as refused:
        manifest.levels({"assey": "objective.batch_column"})
    assert str(refused.value) == message
    with pytest.raises(
        DataError,
        match=r"'score' \(x\) has no levels: .*; choose one of: dataset, assay, sorted, donor",
    ):
        manifest.levels({"score": "x"})
    barcodes = np.array([f"b{i}" for i in range(MAX_LEVELS + 1)], object)
    assert find_levels([barcodes[:9], barcodes[9:]]) is None
    assert find_levels([barcodes[:2], barcodes[1:3]]) == ["b0", "b1", "b2"]


def test_the_text_missing_is_a_level_of_its_column() -> None:
    values = np.array(["b", MISSING, "a"], object)
    levels = find_levels([values])
    assert levels == ["a", "b", MISSING]
    assert encode_levels(values, levels).tolist() == [2, 3, 1]


def test_a_dropped_column_is_refused_before_anything_runs(tmp_path: Path) -> None:
    table = tmp_path / "datasets.tsv"
    table.write_text("dataset\tpath\none\tone.h5ad\n")
    tree: dict[str, Any] = {
        "corpora": {"a": {"table": str(table)}},
        "preprocess": {"keep_obs": ["donor"]},
        "train": {"steps": 1},
        "runs": {"r": {"corpus": "a", "objective": {"batch_column": "assay"}}},
    }
    with pytest.raises(
        ConfigError,
        match=r"runs\.r\.objective\.batch_column: no obs column 'assay'; .*: dataset, donor",
    ):
        check_config(tree)
    for column in ("donor", "dataset"):
        tree["runs"]["r"]["objective"]["batch_column"] = column
        check_config(tree)


def test_levels_have_the_same_numbers_in_every_file() -> None:
    obs = pd.DataFrame(
        {"assay": ["smart-seq", "drop-seq", None], "donor": [9.0, np.nan, 11]}, index=list("abc")
    )
    numbers = encode_columns(obs, "two", LEVELS)
    np.testing.assert_array_equal(numbers, [[2, 2, 2, 0], [0, 2, 3, 0], [3, 2, 0, 0]])
    assert encode_columns(obs, "three", {"dataset": LEVELS["dataset"]}).tolist() == [[0], [0], [0]]
    own = obs.assign(dataset=["two", "x", "one"])
    assert encode_columns(own, "one", {"dataset_original": ("one", "two")}).tolist() == [
        [2],
        [0],
        [1],
    ]


@pytest.mark.parametrize("batches", [[1.0, 2.0], [True, False]], ids=["whole numbers", "booleans"])
def test_categories_of_a_file_are_levels_of_its_shards(tmp_path: Path, batches: list[Any]) -> None:
    batch = pd.Categorical(np.array(batches)[np.arange(150) % 2])
    corpus = _corpus(tmp_path, batch=batch)
    obs = pd.DataFrame({"batch": batch})
    codes = encode_columns(obs, "one", corpus.levels({"batch": "a test"}))
    assert sorted({*codes[:, 0].tolist()}) == [1, 2]


def test_counts_of_moved_cells_are_refused(corpus: Manifest, tmp_path: Path) -> None:
    path = shard_paths(corpus)[0]
    changed = ad.read_h5ad(path)[::-1].copy()
    changed.write_h5ad(tmp_path / "changed.h5ad")
    with pytest.raises(DataError, match="its cells or genes were changed, but not its packed"):
        open_cells(tmp_path / "changed.h5ad")


@pytest.mark.parametrize("n_cells", [50, MAX_LEVELS])
def test_text_of_a_corpus_is_that_of_its_datasets(tmp_path: Path, n_cells: int) -> None:
    texts = {
        "a": np.array([f"é{i % 3000}" for i in range(n_cells)], object),
        "b": np.array([*(f"z{i}" for i in range(n_cells)), None], object),
    }
    frames = [pd.DataFrame({"well": values}) for values in texts.values()]
    for frame in frames:
        frame.index = frame.index.astype(str)
    frames.append(pd.DataFrame({"other": ["x"]}, index=["0"]))  # has no such column
    dtypes = [dict.fromkeys(frame.columns) for frame in frames]
    obs = JointObs(tmp_path, ["a", "b", "c"], join_columns(dtypes))
    for number, frame in enumerate(frames):
        obs.write(number, frame.index, frame.__getitem__, np.ones(len(frame), bool))
    dataset = np.repeat([0, 1, 2], [len(frame) for frame in frames])
    row = np.concatenate([np.arange(len(frame)) for frame in frames])
    expected = np.concatenate([*texts.values(), [None]])
    order = np.random.default_rng(0).permutation(len(row))
    column = obs.column("well", dataset[order], row[order])
    pd.testing.assert_extension_array_equal(column, pd.Categorical(expected[order]))
    assert obs.unbounded == ({"well"} if n_cells == MAX_LEVELS else set())
