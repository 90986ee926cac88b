"""Shards as an archive of about a seventh of float32, from which they are restored byte for byte.

Genes in rank order hardly compress, so the genes of a cell are sorted and stored as differences;
the rank order follows from counts and medians. A file becomes a zip with the same name and `.zip`:

    layout.json         `sha256` and `size` of the file, `by_gene` of each block of 1,024 cells
    rest                bytes of the file without X/indices and X/data
    medians             of the vocabulary's genes, float32
    starts              indptr of X, int64
    genes-N, counts-N   of block N, compressed by zstd; in rank order if that does not follow (`by_gene` false)
"""

import json
import os
import shutil
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
from numcodecs import Delta, Shuffle, Zstd

from cellmill.data.arrays import inverse_medians, rank_order_rows
from cellmill.data.inputs.h5 import one_line, open_h5
from cellmill.data.rows import row_numbers
from cellmill.data.shards.manifest import REMEDY, IndexEntry, Manifest, ShardEntry, verify
from cellmill.data.shards.reader import RowFile, open_shards
from cellmill.errors import ConfigError, DataError
from cellmill.files import atomic_path, sha256_file

_ROWS = 1024
_THREADS = 4
_CHUNK = 8 << 20
_HEADER_BYTES = 16 << 20  # most bytes of layout.json or medians
_DAMAGES = (
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


def archive_shards(manifest: Manifest, out: Path) -> int:
    """Write an archive of all files of a manifest to the folder `out`; return its bytes.

    Undamaged files that are there already are kept; manifest.json is written last. Raises
    ConfigError if `out` holds other shards, DataError naming a damaged shard.
    """
    _refuse_others(manifest, out)
    rows: dict[str, RowFile] = {}
    for split, entry in manifest.splits.items():
        if entry.shards:
            rows |= {shard.path.name: shard for shard in open_shards(manifest, split)}
    files = manifest.files()
    verify(manifest)
    archives = [out / f"{file.name}.zip" for file in files]
    rows_of_files = [rows.get(file.name) for file in files]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(partial(_archive, manifest), files, rows_of_files, archives))
    _copy_manifest(manifest, out)
    return sum(archive.stat().st_size for archive in archives)


def restore_shards(manifest: Manifest, out: Path) -> int:
    """Write the files of the archive of `manifest` to the folder `out`; return their number.

    Files that are there already are kept; manifest.json is written last. Raises ConfigError if
    `out` holds other shards, DataError for a file whose SHA-256 is not the manifest's.
    """
    _refuse_others(manifest, out)
    files = manifest.files()
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(partial(_restore, manifest, out), files))
    _copy_manifest(manifest, out)
    return len(files)


def _copy_manifest(manifest: Manifest, out: Path) -> None:
    with atomic_path(out / manifest.path.name) as temporary:
        shutil.copyfile(manifest.path, temporary)


def _refuse_others(manifest: Manifest, out: Path) -> None:
    """Raise ConfigError if the manifest in `out` lists other files: they would be overwritten or
    orphaned.
    """
    path = out / manifest.path.name
    if path.exists():
        with suppress(DataError):
            if Manifest.read(path).files() == manifest.files():
                return
        raise ConfigError(
            f"{path}: expected the files of {manifest.path}, got others or a damaged manifest; set --out to another "
            "folder, or remove this manifest to overwrite the files beside it"
        )


def _archive(
    manifest: Manifest, file: ShardEntry | IndexEntry, rows: RowFile | None, target: Path
) -> None:
    path = manifest.shard_path(file)
    try:
        with zipfile.ZipFile(target) as archive:
            layout = json.loads(_member(archive, "layout.json", _HEADER_BYTES))
            if layout["sha256"] == file.sha256 and archive.testzip() is None:
                return
    except (OSError, *_DAMAGES):
        pass
    with (
        atomic_path(target) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        with open(path, "rb") as source, archive.open("rest", "w", force_zip64=True) as rest:
            _copy_rest(file, path.stat().st_size, source, rest, whole=source)
        by_gene = [] if rows is None else _write_rows(archive, rows)
        layout = {"sha256": file.sha256, "size": path.stat().st_size, "by_gene": by_gene}
        archive.writestr("layout.json", json.dumps(layout))


def _copy_rest(
    file: ShardEntry | IndexEntry, size: int, source: IO[bytes], out: IO[bytes], whole: IO[bytes]
) -> None:
    """Copy the bytes of a file without X/indices and X/data, between the `whole` file and the
    member `rest`.
    """
    arrays = []
    if isinstance(file, ShardEntry) and file.nnz:
        width = np.dtype(file.dtype).itemsize
        arrays = sorted([(file.genes_at, 4 * file.nnz), (file.counts_at, width * file.nnz)])
    position = 0
    for start, n_bytes in [*arrays, (size, 0)]:
        whole.seek(position)
        while position < start:
            piece = source.read(min(start - position, _CHUNK))
            if not piece:
                raise ValueError(f"{start - position:,} bytes are missing")
            position += out.write(piece)
        position += n_bytes


def _write_rows(archive: zipfile.ZipFile, rows: RowFile) -> list[bool]:
    """Write X of a shard; return for each block whether it is sorted by gene."""
    if not rows.nnz:
        return []
    with open_h5(rows.path, REMEDY) as file:
        medians = np.asarray(file["var/median"][:], "<f4")
    indptr = rows.indptr.astype("<i8")
    archive.writestr("medians", medians.tobytes())
    archive.writestr("starts", indptr.tobytes())
    by_gene = []
    inverse = inverse_medians(medians)
    for number, first in enumerate(range(0, rows.n_obs, _ROWS)):
        starts = indptr[first : first + _ROWS + 1]
        start, stop = starts[[0, -1]].tolist()
        genes = rows.read_genes(start, stop)
        counts = rows.read_counts(start, stop)
        starts = starts - start
        order = np.lexsort((genes, row_numbers(starts)))
        ranked, ranked_counts = rank_order_rows(starts, genes[order], counts[order], inverse)
        is_ranked = np.array_equal(ranked, genes) and np.array_equal(ranked_counts, counts)
        if is_ranked:
            genes = genes[order]
            counts = counts[order]
        by_gene.append(is_ranked)
        # bytes of equal significance stand together
        for name, values in (("genes", Delta("<i4").encode(genes)), ("counts", counts)):
            stored = Zstd(level=12).encode(Shuffle(values.itemsize).encode(values))
            archive.writestr(f"{name}-{number}", bytes(stored), zipfile.ZIP_STORED)
    return by_gene


def _restore(manifest: Manifest, out: Path, file: ShardEntry | IndexEntry) -> None:
    target = out / file.name
    source = manifest.path.with_name(f"{file.name}.zip")
    if target.is_file() and sha256_file(target) == file.sha256:
        return
    try:
        with atomic_path(target) as temporary:
            with zipfile.ZipFile(source) as archive, open(temporary, "r+b") as restored:
                _fill(archive, file, restored)
            if sha256_file(temporary) != file.sha256:
                raise ValueError("the restored file has another sha256 than in the manifest")
    except FileNotFoundError:
        raise DataError(
            f"{source}: no such file, but the manifest of the archive lists it"
        ) from None
    except _DAMAGES as error:
        raise DataError(
            f"{source}: damaged: {one_line(error)}; take it from another copy of the archive"
        ) from None


def _fill(archive: zipfile.ZipFile, file: ShardEntry | IndexEntry, restored: IO[bytes]) -> None:
    layout = json.loads(_member(archive, "layout.json", _HEADER_BYTES))
    with archive.open("rest") as rest:
        _copy_rest(file, int(layout["size"]), rest, restored, whole=restored)
    if isinstance(file, IndexEntry) or not file.nnz:
        return
    starts = np.frombuffer(_member(archive, "starts", 8 * (file.n_obs + 1)), "<i8")
    inverse = inverse_medians(np.frombuffer(_member(archive, "medians", _HEADER_BYTES), "<f4"))
    if starts[0] or starts[-1] != file.nnz or (np.diff(starts) < 0).any():
        raise ValueError(f"its offsets of rows are not of {file.nnz:,} nonzeros")
    descriptor = restored.fileno()
    restored.flush()
    for number, first in enumerate(range(0, file.n_obs, _ROWS)):
        in_block = starts[first : first + _ROWS + 1] - starts[first]
        blocks = []
        for name, dtype in (("genes", np.dtype("<i4")), ("counts", np.dtype(file.dtype))):
            n_bytes = dtype.itemsize * int(in_block[-1])
            stored = _member(archive, f"{name}-{number}", 2 * n_bytes + 1024)
            # the header may claim any size
            shuffled = Zstd().decode(stored, np.empty(n_bytes, np.uint8))
            blocks.append(np.frombuffer(Shuffle(dtype.itemsize).decode(shuffled), dtype))
        genes = Delta("<i4").decode(blocks[0])
        counts = blocks[1]
        if layout["by_gene"][number]:
            if len(genes) and not 0 <= genes.min() <= genes.max() < len(inverse):
                raise ValueError("it has genes outside the vocabulary")
            genes, counts = rank_order_rows(in_block, genes, counts, inverse)
        start = int(starts[first])
        os.pwrite(descriptor, genes.astype("<i4").tobytes(), file.genes_at + 4 * start)
        os.pwrite(descriptor, counts.tobytes(), file.counts_at + counts.itemsize * start)


def _member(archive: zipfile.ZipFile, name: str, most_bytes: int) -> bytes:
    """Content of a member. Raises ValueError, before memory is taken for it, if it is larger than
    `most_bytes`.
    """
    size = archive.getinfo(name).file_size
    if size > most_bytes:
        raise ValueError(f"{name} has {size:,} bytes, not up to {most_bytes:,}")
    return archive.read(name)
