"""Levels of obs columns: equal in every rank, split and run, and absent from batches that nobody asked for them."""

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellmill.config import check_config
from cellmill.config.corpus import Shard
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.obs import MAX_LEVELS, levels_of, numbers_of
from cellmill.data.shards.writer import write_shards
from cellmill.data.stream.cell_stream import CellStream
from cellmill.errors import ConfigError, DataError
from tests.unit.small_corpus import genes_named, random_counts, stream_of, vocabulary_of, write_dataset

COLUMNS = {"assay": "objective.batch_column", "dataset": "a", "donor": "b", "sorted": "c"}
LEVELS = {
    "assay": ("10x", "smart-seq", "<missing>"),
    "dataset": ("one", "two"),
    "donor": ("10", "9", "<missing>"),  # whole numbers of one file, absent from the other: stored as floats
    "sorted": ("False", "True"),
}


def _obs(n: int, first: bool) -> dict[str, Any]:
    at = np.arange(n)
    assay = np.where(at % 3 == 0, "10x", "smart-seq").astype(object)
    assay[at % 7 == 0] = None
    own = {"donor": np.where(at % 2, 9, 10)} if first else {}
    return {"assay": pd.Categorical(assay) if first else "10x", "sorted": at % 2 == 0, "score": at / 8, **own}


def _corpus(folder: Path, **changed: Any) -> Manifest:
    ids = genes_named(40)
    paths = []
    for seed, (name, n) in enumerate({"one": 150, "two": 90}.items()):
        obs = _obs(n, name == "one") | (changed if name == "one" else {})
        paths.append(write_dataset(folder / "cells" / f"{name}.h5ad", random_counts(n, 40, seed), ids, obs))
    options = Shard(val_frac=0.2, test_frac=0.2, cells_per_shard=64)
    return write_shards(paths, vocabulary_of(ids), options, folder / "shards" / "manifest.json")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return _corpus(tmp_path_factory.mktemp("levels"))


def _stream(manifest: Manifest, columns: dict[str, str], **given: Any) -> CellStream:
    return stream_of(manifest, options={"lanes": 4}, token_budget=90, columns=columns, **given)


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
        stream = _stream(manifest, COLUMNS, split=split, rank=rank, world=2, shuffle=False)
        assert stream.levels == LEVELS
        for batch in (batch for step in stream for batch in step):
            assert batch.levels is not None
            assert batch.levels.dtype == np.int32
            assert batch.levels.shape == (len(batch.cells), len(COLUMNS))
            np.testing.assert_array_equal(batch.levels, expected[batch.cells])
            seen.update(batch.cells.tolist())
        stream.close()
    assert seen == set(range(len(expected)))


def test_without_columns_batches_and_fingerprint_are_those_of_before(manifest: Manifest, tmp_path: Path) -> None:
    plain, asking = _stream(manifest, {}), _stream(manifest, {"assay": "x"})
    assert plain.fingerprint == manifest.fingerprint == manifest.fingerprint_with([])
    assert asking.fingerprint != manifest.fingerprint
    ours, theirs = (next(iter(stream))[0] for stream in (plain, asking))
    assert ours.levels is None
    assert (ours.genes == theirs.genes).all()
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
        DataError, match=r"'score' \(x\) has no levels: .*; choose one of: dataset, assay, sorted, donor"
    ):
        manifest.levels({"score": "x"})
    barcodes = np.array([f"b{i}" for i in range(MAX_LEVELS + 1)], object)
    assert levels_of([barcodes[:9], barcodes[9:]]) is None
    assert levels_of([barcodes[:2], barcodes[1:3]]) == ["b0", "b1", "b2"]


def test_a_column_that_is_not_kept_is_refused_before_anything_runs(tmp_path: Path) -> None:
    table = tmp_path / "datasets.tsv"
    table.write_text("dataset\tpath\none\tone.h5ad\n")
    tree: dict[str, Any] = {
        "corpora": {"a": {"table": str(table)}},
        "preprocess": {"keep_obs": ["donor"]},
        "train": {"steps": 1},
        "runs": {"r": {"corpus": "a", "objective": {"batch_column": "assay"}}},
    }
    with pytest.raises(
        ConfigError, match=r"runs\.r\.objective\.batch_column: no obs column 'assay'; .*: dataset, donor"
    ):
        check_config(tree)
    for column in ("donor", "dataset"):
        tree["runs"]["r"]["objective"]["batch_column"] = column
        check_config(tree)


def test_other_files_have_the_same_numbers_and_0_where_the_corpus_lacks_a_value() -> None:
    obs = pd.DataFrame({"assay": ["smart-seq", "drop-seq", None], "donor": [9.0, np.nan, 11]}, index=list("abc"))
    numbers = numbers_of(obs, "two", LEVELS)
    np.testing.assert_array_equal(numbers, [[2, 2, 2, 0], [0, 2, 3, 0], [3, 2, 0, 0]])
    assert numbers_of(obs, "three", {"dataset": LEVELS["dataset"]}).tolist() == [[0], [0], [0]]
    own = obs.assign(dataset=["two", "x", "one"])
    assert numbers_of(own, "one", {"dataset_original": ("one", "two")}).tolist() == [[2], [0], [1]]
