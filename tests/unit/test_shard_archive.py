"""Archived shards are restored byte for byte, or not at all."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from small_corpus import genes_named, random_counts, vocabulary_of, write_dataset

from cellmill.cli import main
from cellmill.config.corpus import Shard
from cellmill.data.inputs.h5 import write_cells
from cellmill.data.shards.manifest import Manifest, verify
from cellmill.data.shards.writer import write_shards


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.*")}


def archived(manifest: Path, out: Path) -> int:
    return main(["archive", "--manifest", str(manifest), "--out", str(out)])


def restored(archive: Path, out: Path) -> int:
    return main(["unarchive", "--archive", str(archive), "--out", str(out)])


@pytest.mark.parametrize("largest", [30, 70_000])  # counts of 16 and of 32 bits
def test_every_file_comes_back_byte_for_byte(tmp_path: Path, largest: int) -> None:
    ids = genes_named(300)
    path = write_dataset(tmp_path / "cells" / "one.h5ad", random_counts(2600, 300, largest=largest), ids)
    options = Shard(cells_per_shard=1500, val_frac=0.1, test_frac=0)  # blocks of 1,024 and fewer
    manifest = write_shards([path], vocabulary_of(ids), options, tmp_path / "shards" / "manifest.json")
    assert archived(manifest.path, tmp_path / "archive") == 0
    nnz = sum(split.nnz for split in manifest.splits.values())
    blocks = [
        zipped.getinfo(name).compress_size
        for file in (tmp_path / "archive").glob("*.h5ad.zip")
        for zipped in [zipfile.ZipFile(file)]
        for name in zipped.namelist()
        if name.startswith(("genes-", "counts-"))
    ]
    assert sum(blocks) < (0.25 if largest == 30 else 0.45) * 8 * nnz  # of float32 with 32-bit indices
    (tmp_path / "back").mkdir()
    kept = tmp_path / "back" / "train-00000.h5ad"
    kept.write_bytes(b"of a killed process")
    assert restored(tmp_path / "archive", tmp_path / "back") == 0
    assert files_of(tmp_path / "back") == files_of(manifest.path.parent)
    verify(Manifest.read(tmp_path / "back" / "manifest.json"))


def test_sequences_whose_order_is_their_own_come_back_too(tmp_path: Path) -> None:
    ids, cells = genes_named(20), tmp_path / "cells" / "p.h5ad"
    residues = np.random.default_rng(0).integers(0, 20, 90 * 40)
    rows = sp.csr_matrix((np.ones(90 * 40, np.uint16), residues, np.arange(0, 90 * 40 + 1, 40)), shape=(90, 20))
    obs = pd.DataFrame(index=[f"p{i}" for i in range(90)])
    write_cells(cells, obs, pd.DataFrame(index=ids), [rows], rows.nnz, np.dtype("<u2"), ordered=True)
    manifest = write_shards([cells], vocabulary_of(ids), Shard(), tmp_path / "shards" / "manifest.json")
    assert manifest.ordered
    assert archived(manifest.path, tmp_path / "archive") == 0
    assert restored(tmp_path / "archive", tmp_path / "back") == 0
    assert files_of(tmp_path / "back") == files_of(manifest.path.parent)


def test_a_damaged_archive_is_one_line_and_leaves_no_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = genes_named(40)
    path = write_dataset(tmp_path / "cells" / "one.h5ad", random_counts(200, 40), ids)
    write_shards([path], vocabulary_of(ids), Shard(), tmp_path / "shards" / "manifest.json")
    assert archived(tmp_path / "shards" / "manifest.json", tmp_path / "archive") == 0
    file = tmp_path / "archive" / "train-00000.h5ad.zip"
    whole = bytearray(file.read_bytes())
    capsys.readouterr()
    for at in range(100, len(whole), len(whole) // 12):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        if restored(tmp_path / "archive", tmp_path / "back") == 0:  # a byte of a time in the zip, which nothing reads
            (tmp_path / "back" / "manifest.json").unlink()
            assert (tmp_path / "back" / "train-00000.h5ad").read_bytes() == (
                tmp_path / "shards" / "train-00000.h5ad"
            ).read_bytes()
            (tmp_path / "back" / "train-00000.h5ad").unlink()
            continue
        assert capsys.readouterr().err.startswith(f"cellmill unarchive: {file}: damaged: ")
        assert not (tmp_path / "back" / "manifest.json").exists()
        assert not list((tmp_path / "back").glob("train-00000*"))
