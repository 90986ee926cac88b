"""Archived shards are restored byte for byte, or not at all; compressed cells are sharded to the same bytes."""

import zipfile
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from small_corpus import genes_named, random_counts, vocabulary_of, write_corpus

from cellmill.cli import main
from cellmill.config.corpus import Preprocess, Shard
from cellmill.data.inputs.formats import open_counts
from cellmill.data.inputs.h5 import count_dtype, write_cells
from cellmill.data.prepare.preprocess import preprocess_cells
from cellmill.data.shards.manifest import Manifest, verify
from cellmill.data.shards.writer import write_shards
from cellmill.errors import DataError


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.*")}


def archived(manifest: Path, out: Path) -> int:
    return main(["archive", "--manifest", str(manifest), "--out", str(out)])


def restored(archive: Path, out: Path) -> int:
    return main(["unarchive", "--archive", str(archive), "--out", str(out)])


@pytest.mark.parametrize("largest", [30, 70_000])  # counts of 16 and of 32 bits
def test_every_file_comes_back_byte_for_byte(tmp_path: Path, largest: int) -> None:
    counts = random_counts(2600, 300, largest=largest)
    manifest = write_corpus(tmp_path, counts, cells_per_shard=1500, val_frac=0.1)  # blocks of 1,024 and fewer
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
    write_corpus(tmp_path, 200, cells_per_shard=16_384, val_frac=0.1, test_frac=0.1)
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


IDS = genes_named(60)


def preprocessed(folder: Path, counts: sp.csr_matrix, compression: str | None) -> Path:
    """Cells of `counts`, preprocessed."""
    raw, out = folder / "raw.h5ad", folder / str(compression) / "cells" / "one.h5ad"
    obs = pd.DataFrame(index=[f"cell{i}" for i in range(counts.shape[0])])
    write_cells(raw, obs, pd.DataFrame(index=IDS), [counts], counts.nnz, count_dtype(int(counts.data.max())))
    options = Preprocess(organism=None, min_genes=0, max_mito_frac=1, row_block=37, compression=compression)
    with open_counts(raw) as reader:
        preprocess_cells(reader, options, out)
    return out


@pytest.mark.parametrize("largest", [30, 70_000])  # counts of 16 and of 32 bits
def test_compressed_cells_are_smaller_and_give_the_same_shards(tmp_path: Path, largest: int) -> None:
    counts = random_counts(1100, 60, largest=largest)
    shards, sizes = {}, {}
    for compression in ("gzip", None):
        cells = preprocessed(tmp_path, counts, compression)
        read = ad.read_h5ad(cells)
        assert (counts != read.X).nnz == 0
        assert read[:, IDS[3]].X.nnz == (counts[:, 3] > 0).sum()  # crashes with narrower indices
        with h5py.File(cells) as file:
            sizes[compression] = sum(file[f"X/{name}"].id.get_storage_size() for name in ("data", "indices"))
            assert file["X/data"].chunks == ((4096,) if compression else None)
        out = tmp_path / str(compression) / "shards" / "manifest.json"
        write_shards([cells], vocabulary_of(IDS), Shard(cells_per_shard=100, val_frac=0.2), out)
        shards[compression] = {path.name: path.read_bytes() for path in out.parent.glob("*.h5ad")}
    assert shards["gzip"] == shards[None]
    assert len(shards[None]) > 5
    if largest == 30:
        assert sizes["gzip"] < 0.4 * sizes[None]


@pytest.mark.parametrize("damage", ["bytes", "length"])
def test_a_damaged_chunk_is_one_line(tmp_path: Path, damage: str) -> None:
    cells = preprocessed(tmp_path, random_counts(400, 60), "gzip")
    with h5py.File(cells) as file:
        chunk = file["X/indices"].id.get_chunk_info(1)
    content = bytearray(cells.read_bytes())
    end = chunk.byte_offset + chunk.size
    if damage == "bytes":
        content[chunk.byte_offset : end] = np.random.default_rng(0).bytes(chunk.size)
    else:
        del content[end - 4 :]
    cells.write_bytes(content)
    with pytest.raises(DataError) as error:
        write_shards([cells], vocabulary_of(IDS), Shard(), tmp_path / "shards" / "manifest.json")
    assert str(error.value).startswith(f"{cells}: ")
    assert "\n" not in str(error.value)
