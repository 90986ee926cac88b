"""Shards are the same from any number of jobs, after kills, from compressed cells and from an
archive; their index says what they hold; copies are found.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anndata as ad
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
from cellmill.config.corpus import Shard
from cellmill.config.options import ShardOptions
from cellmill.data.inputs.formats import open_counts
from cellmill.data.inputs.packed_cells import open_packed
from cellmill.data.packing import cell_file
from cellmill.data.packing.cell_file import OpenFiles
from cellmill.data.shards import plan as shard_plan
from cellmill.data.shards import writer as shard_writer
from cellmill.data.shards.divide import make_plan
from cellmill.data.shards.index import CellColumns, open_index
from cellmill.data.shards.manifest import Manifest, verify
from cellmill.data.shards.obs import MAX_LEVELS
from cellmill.data.shards.plan import PLAN_FOLDER
from cellmill.data.shards.reader import open_shards
from cellmill.data.shards.writer import write_part, write_shards
from cellmill.data.split import hash_cells, hash_genes
from cellmill.errors import DataError
from cellmill.evaluate.seen.copies import find_equal_cells
from cellmill.evaluate.seen.held_out_check import HeldOutCheck
from cellmill.stages import data
from tests.unit.test_shards import two_datasets

OPTIONS = Shard(cells_per_shard=64, val_frac=0.2, test_frac=0.2, seed=3)


def files_of(manifest: Manifest) -> dict[str, str]:
    verify(manifest)
    return {file.name: file.sha256 for file in manifest.files()}


FIRST = "2317f8daca1dcf92387566de61ea1b6164167265c65066fb68c08e9ceadff449"  # of OPTIONS


@pytest.mark.parametrize(
    ("options", "gap", "fingerprint"),
    [
        (OPTIONS, 0, FIRST),
        (OPTIONS, 40, FIRST),
        (OPTIONS, 1 << 13, FIRST),
        (Shard(), 1 << 13, "25662687cbeb066779796e20b82547a50fcc4700eb6336ab49e850d5a51b0900"),
        (
            Shard(split_by="dataset", val_frac=0, test_frac=0.3),
            1 << 13,
            "91c8e99371e2ea644296eb9a882bc20b461371ded2fd59a31969f2e0de7d5373",
        ),
    ],
)
def test_shards_equal_those_of_version_0_1_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Shard, gap: int, fingerprint: str
) -> None:
    monkeypatch.setattr(cell_file, "_MAX_GAP", gap)
    paths, _, ids = two_datasets(tmp_path)
    made = write_shards(
        paths[:: 1 if gap else -1], vocabulary_of(ids), options, tmp_path / "manifest.json"
    )
    assert made.fingerprint == fingerprint


def test_counts_of_16_and_32_bits_are_joined(tmp_path: Path) -> None:
    counts = {"a": random_counts(150, 30), "b": random_counts(90, 30, largest=70_000)}
    paths = [
        write_dataset(tmp_path / f"{name}.h5ad", made, genes_named(30))
        for name, made in counts.items()
    ]
    made = write_shards(
        paths, vocabulary_of(genes_named(30)), OPTIONS, tmp_path / "shards" / "manifest.json"
    )
    shards = [open_cells(path) for path in shard_paths(made)]
    for name, wanted in counts.items():
        got = np.concatenate([shard[shard.obs["dataset"] == name].X.toarray() for shard in shards])
        assert sorted(map(bytes, got.astype(np.int64))) == sorted(
            map(bytes, wanted.toarray().astype(np.int64))
        )


def test_any_number_of_jobs_writes_the_same_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, _, ids = two_datasets(tmp_path)
    genes = tmp_path / "vocabulary.tsv"
    vocabulary_of(ids).write(genes)
    alone = tmp_path / "alone" / "manifest.json"
    given: dict[str, Any] = {"cells": paths, "vocabulary": genes}
    data.shard(options=ShardOptions(shard=OPTIONS), **given, out=alone)
    for jobs in (2, 7):  # there are six shards: one job has none
        options = ShardOptions(shard=OPTIONS.model_copy(update={"jobs": jobs}))
        out = tmp_path / str(jobs) / "manifest.json"
        data.divide(options=options, **given, out=out.parent / PLAN_FOLDER / "plan.json")
        for part in reversed(range(jobs)):
            done = out.parent / PLAN_FOLDER / f"{part + 1}-of-{jobs}.json"
            data.shard_part(options=options, **given, part=f"{part + 1}-of-{jobs}", out=done)
        data.shard(options=options, **given, out=out)
        assert files_of(Manifest.read(out)) == files_of(Manifest.read(alone))
        assert out.read_text() == alone.read_text()
        assert not (out.parent / PLAN_FOLDER).exists()
    with pytest.raises(
        DataError, match=r"no plan of these cells and options.*run the `divide` stage"
    ):
        data.shard_part(
            options=options, **given, part="1-of-7", out=out.parent / PLAN_FOLDER / "1-of-7.json"
        )


def test_the_next_process_keeps_what_a_killed_one_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, _, ids = two_datasets(tmp_path)
    vocabulary = vocabulary_of(ids)
    out = tmp_path / "shards" / "manifest.json"
    expected = files_of(
        write_shards(paths, vocabulary, OPTIONS, tmp_path / "other" / "manifest.json")
    )
    # other and more shards
    write_shards(paths, vocabulary, OPTIONS.model_copy(update={"cells_per_shard": 20}), out)
    (out.parent / "notes.h5ad").write_text("mine")

    write_packed = shard_writer.write_packed

    def killed(path: Path, *given: Any, **options: Any) -> None:
        write_packed(path, *given, **options)
        if path.name.startswith(".train-00001"):
            with subprocess.Popen(["true"]) as ended:
                of_killed = path.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-")
            shutil.copy(path, path.with_name(of_killed))  # nobody tidies up
            writer = of_killed.removeprefix(".train-00001").removesuffix(".h5ad")
            # that of the HDF5 file itself
            shutil.copy(path, path.with_name(f"..train-00001{writer}{writer}.h5ad"))
            raise KeyboardInterrupt

    monkeypatch.setattr(shard_writer, "write_packed", killed)
    with pytest.raises(KeyboardInterrupt):
        write_shards(paths, vocabulary, OPTIONS, out)
    monkeypatch.undo()
    assert list(out.parent.glob(".train-00001.*incomplete*"))
    assert not out.exists()
    # a shard whose content has changed since is not kept
    damaged = out.parent / "train-00000.h5ad"
    kept = out.parent / "train-00002.h5ad"
    plan = make_plan(paths, vocabulary, OPTIONS, out)
    write_part(plan, paths, vocabulary, out.parent, part=2, parts=len(plan.shards()))
    before = kept.stat()
    damaged.write_bytes(b"damaged")
    again = write_shards(paths, vocabulary, OPTIONS, out)
    assert files_of(again) == expected
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert {path.name for path in out.parent.iterdir()} == {
        *expected,
        "manifest.json",
        "notes.h5ad",
    }


def test_a_plan_of_different_cells_is_not_used(tmp_path: Path) -> None:
    paths, _, ids = two_datasets(tmp_path)
    vocabulary = vocabulary_of(ids)
    out = tmp_path / "shards" / "manifest.json"
    plan = make_plan(paths, vocabulary, OPTIONS, out)
    write_part(plan, paths, vocabulary, out.parent)
    assert make_plan(paths, vocabulary, OPTIONS.model_copy(update={"jobs": 9}), out) == plan
    other = make_plan(paths, vocabulary, OPTIONS.model_copy(update={"seed": 0}), out)
    assert other.key != plan.key
    assert write_shards(paths, vocabulary, OPTIONS, out).fingerprint == FIRST
    plan = make_plan(paths, vocabulary, OPTIONS, out)
    os.utime(paths[0])
    assert make_plan(paths, vocabulary, OPTIONS, out).key != plan.key


def test_the_index_describes_the_shards(tmp_path: Path) -> None:
    paths, _, ids = two_datasets(tmp_path)
    vocabulary = vocabulary_of(ids)
    manifest = write_shards(paths, vocabulary, OPTIONS, tmp_path / "shards" / "manifest.json")
    for split, entry in manifest.splits.items():
        for rows in open_shards(manifest, split):
            in_file = open_packed(rows.path, OpenFiles())
            np.testing.assert_array_equal(rows.indptr, in_file.indptr)
            np.testing.assert_array_equal(rows.part_offsets, in_file.part_offsets)
            for array, stored in zip(rows.read(0, rows.n_obs), in_file.read(0, rows.n_obs)):
                np.testing.assert_array_equal(array, stored)
        cells = [open_cells(manifest.shard_path(shard_entry)).X for shard_entry in entry.shards]
        x = sp.vstack(cells, format="csr")
        hashes = hash_cells(x.indptr, x.indices, x.data, hash_genes(ids))
        assert sorted(hashes.tolist()) == open_index(manifest, split, "hashes").T.tolist()
        obs = pd.concat(
            [ad.read_h5ad(manifest.shard_path(shard_entry)).obs for shard_entry in entry.shards]
        )
        numbers = CellColumns(manifest, split, "numbers", ["n", "age"])
        np.testing.assert_array_equal(numbers[:], obs[["n", "age"]])
    assert list(manifest.obs_numbers) == ["age", "n"]
    damaged = manifest.path.with_name("train-offsets.npy")
    damaged.write_bytes(damaged.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"train-offsets\.npy: damaged: .*make the shards again"):
        open_shards(manifest, "train")
    with pytest.raises(DataError, match=r"train-offsets\.npy: expected sha256"):
        verify(manifest)


def open_in(folder: Path) -> list[str]:
    """Files of a folder that this process has open."""
    # one of them listed them, and is gone
    paths = map("/proc/self/fd/{}".format, os.listdir("/proc/self/fd"))
    links = [os.readlink(path) for path in paths if os.path.lexists(path)]
    # which are mapped
    return [link for link in links if link.startswith(str(folder)) and not link.endswith(".npy")]


def test_a_stream_opens_only_what_it_reads(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, 400, cells_per_shard=64)
    stream = stream_of(manifest, world=2)
    assert not open_in(tmp_path)
    next(iter(stream))
    assert open_in(tmp_path)
    stream.close()


def test_a_missing_or_short_shard_is_named_when_it_is_read(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, 400)
    gone, short = open_shards(manifest, "train")[:2]
    gone.path.unlink()
    with pytest.raises(DataError, match=r"train-00000\.h5ad: no such file; make the shards again"):
        gone.read(0, 1)
    os.truncate(short.path, 5000)
    with pytest.raises(
        DataError, match=r"train-00001\.h5ad: damaged: truncated: 5,000 of at least [0-9,]+ bytes"
    ):
        short.read(0, 1)


def test_few_files_are_open_at_once_however_many_are_read(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / str(i)).write_bytes(bytes([i]) * 8)
    files = OpenFiles(max_open=5)

    def read(number: int) -> bool:
        file = files.open(tmp_path / str(number))
        return os.pread(file.descriptor, 8, 0) == bytes([number]) * 8

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, np.random.default_rng(0).integers(40, size=2000).tolist()))
    assert 5 <= len(open_in(tmp_path)) <= 5 + 4
    files.open.cache_clear()
    assert not open_in(tmp_path)


def with_copies(folder: Path) -> tuple[list[Path], list[str]]:
    """Two datasets: the second has 30 cells of the first in other columns, the first has 5 of its
    own twice.
    """
    ids = genes_named(40)
    counts = random_counts(200, 40)
    first = sp.vstack([counts, counts[:5]], format="csr")
    order = np.random.default_rng(0).permutation(40)
    second = sp.vstack([counts[50:80], random_counts(70, 40, seed=9)], format="csr")[
        :, order
    ].tocsr()
    second.sort_indices()
    one = write_dataset(folder / "one.h5ad", first, ids, {"batch": ["x"] * 205})
    return [
        one,
        write_dataset(folder / "two.h5ad", second, [ids[i] for i in order], {"batch": ["y"] * 100}),
    ], ids


def test_equal_cells_are_dropped_except_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, ids = with_copies(tmp_path)
    vocabulary_of(ids).write(genes := tmp_path / "vocabulary.tsv")
    twice = {f"one:cell{i}" for i in range(200, 205)}
    in_one = {f"one:cell{i}" for i in range(50, 80)}
    in_two = {f"two:cell{i}" for i in range(30)}
    every = {f"one:cell{i}" for i in range(205)} | {f"two:cell{i}" for i in range(100)}
    for duplicates, listed, gone, counted in (
        (
            "keep",
            paths,
            set[str](),
            "one: 5, two: 30): kept; shard.duplicates: drop leaves them out",
        ),
        (
            "keep",
            paths[::-1],
            set[str](),
            "one: 5, two: 30): kept; shard.duplicates: drop leaves them out",
        ),
        ("drop", paths, twice | in_two, "one: 5, two: 30): dropped"),
        ("drop", paths[::-1], twice | in_one, "one: 35): dropped"),
    ):
        options = ShardOptions(shard=OPTIONS.model_copy(update={"duplicates": duplicates}))
        out = tmp_path / f"{duplicates} {listed[0].stem}" / "manifest.json"
        data.shard(options=options, cells=listed, vocabulary=genes, out=out)
        assert f"35 cells are equal to an earlier one ({counted}" in capsys.readouterr().out
        written = {*read_obs(Manifest.read(out)).index}
        assert every - written == gone


def test_copies_of_training_cells_are_found_in_every_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, ids = with_copies(tmp_path)
    vocabulary_of(ids).write(genes := tmp_path / "vocabulary.tsv")
    options = ShardOptions(shard=Shard(split_by="batch", val_frac=0, test_frac=0.5))
    data.shard(
        options=options, cells=paths, vocabulary=genes, out=tmp_path / "shards" / "manifest.json"
    )
    manifest = Manifest.read(tmp_path / "shards" / "manifest.json")
    assert "60 cells have an equal one in another split" in capsys.readouterr().out
    trained = str(ad.read_h5ad(manifest.path.with_name("train-00000.h5ad")).obs["batch"].iloc[0])
    other = paths[1] if trained == "x" else paths[0]
    rows = np.arange(100) < 30 if trained == "x" else (np.arange(205) >= 50) & (np.arange(205) < 80)
    check = HeldOutCheck([manifest, manifest], [])
    for shard_file in manifest.path.parent.glob("train-*.h5ad"):
        shard_file.write_bytes(b"hashed before, and not again for each dataset")
    for among in (np.ones(len(rows), bool), np.arange(len(rows)) % 2 == 0):
        with open_counts(other) as reader:
            found = find_equal_cells(reader, check.corpora, among)
            np.testing.assert_array_equal(found, rows & among)


def test_shards_store_only_the_values_that_they_use(tmp_path: Path) -> None:
    n = MAX_LEVELS + 100
    counts = sp.csr_matrix(np.arange(1, 4 * n + 1, dtype=np.uint32).reshape(n, 4))
    obs = {
        "barcode": [f"é{i}" for i in range(n)],
        "plate": pd.Categorical([f"p{i % 3}" for i in range(n)]),
    }
    manifest = write_corpus(tmp_path, counts, obs=obs, cells_per_shard=2048)
    for entry in manifest.splits["train"].shards:
        cells = ad.read_h5ad(manifest.shard_path(entry)).obs
        number = np.array([int(name.removeprefix("one:cell")) for name in cells.index])
        assert cells["barcode"].tolist() == [f"é{i}" for i in number]
        assert len(cells["barcode"].cat.categories) == entry.n_obs
        assert cells["plate"].tolist() == [f"p{i % 3}" for i in number]
    assert set(manifest.obs_levels) == {"dataset", "plate"}


def test_a_plan_whose_removal_was_killed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path, **_: Any) -> None:
        next(folder.glob("*.npy")).unlink()
        raise KeyboardInterrupt

    expected = write_corpus(tmp_path / "whole", 200).fingerprint
    monkeypatch.setattr(shard_plan.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write_corpus(tmp_path / "killed", 200)
    monkeypatch.undo()
    # as Snakemake does for a job that was not finished
    (tmp_path / "killed" / "shards" / "manifest.json").unlink()
    assert write_corpus(tmp_path / "killed", 200).fingerprint == expected


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.*")}
