"""Cells in formats of other tools, which `cellmill convert` writes as .h5ad.

Token datasets of Geneformer are folders that Hugging Face `datasets` saved, memory-mapped:

    state.json                  names of the data files
    data-00000-of-00001.arrow   Arrow streams of columns: `input_ids`, the tokens of a cell in rank order, and metadata

The order of a cell's genes is all that such a dataset has of their counts, up to the longest cell
that it was made for. So a converted cell has genes in rank order and no counts: tokenizer `rank`
reads it, others are refused.

Shards of scModelForge have counts of a cell's detected genes, padded to the longest cell of a
shard:

    manifest.json                       `n_shards`, `shard_sizes`, `vocab_hash`
    shard_000/X.npy, gene_indices.npy   (cells, genes of the longest): values float32, indices of the gene vocabulary
    shard_000/n_genes.npy               (cells,): detected genes
    shard_000/obs.parquet               metadata, without names of cells

The shards have no names of genes; those are in a JSON file of their own, whose hash the manifest
has.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.arrays import named_frame
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.h5 import count_dtype, reading, write_cells
from cellmill.data.inputs.matrices import REAL, WHOLE, StoredMatrix, native, require_kind
from cellmill.data.inputs.source import CountSource, as_obs, optional_package
from cellmill.data.rows import row_offsets
from cellmill.errors import DataError
from cellmill.files import read_json, require_file

TOKENS = "input_ids"
_ENDS = ("<pad>", "<mask>", "<cls>", "<eos>")  # tokens that are not genes
_LENGTH = "length"  # column with the number of tokens, which Geneformer adds
# what stands for a gene's column in tokens that are no gene, or are not known
_NO_GENE = -1
_UNKNOWN = -2
_ROWS = 8192  # cells in memory at once
_SPECIAL = 4  # tokens before the genes, in a vocabulary that is a list


def convert_tokens(folder: Path, tokens: Mapping[str, int], genes: Vocabulary, out: Path) -> str:
    """Write the cells of a token dataset to `out`, an .h5ad of genes in rank order.

    Returns the line to print. `tokens` are the numbers of genes and special tokens by name, `genes`
    those with a median. Raises DataError when the dataset is damaged, has a token that is not a gene
    with a median, or a cell has a gene twice.
    """
    cells = _read_dataset(folder)
    names = [name for name in cells.column_names if name not in (TOKENS, _LENGTH)]
    kept = [name for name in names if _fits_h5ad(name, cells.field(name).type)]
    with reading(folder):
        frame = cells.select(kept).to_pandas()
        obs = as_obs(frame, [f"cell_{row}" for row in range(cells.num_rows)])
    # gene of each token
    column = np.full(max(tokens.values()) + 1, _UNKNOWN, np.int32)
    column[[int(tokens[name]) for name in _ENDS if name in tokens]] = _NO_GENE
    column[[int(tokens[gene]) for gene in genes.gene_ids]] = np.arange(genes.n_genes)
    var = pd.DataFrame(
        {"symbol": genes.symbols, "median": genes.medians}, pd.Index(genes.gene_ids, name="gene_id")
    )
    n_values = sum(block.nnz for block in _rank_blocks(folder, cells, column, genes.n_genes))
    blocks = _rank_blocks(folder, cells, column, genes.n_genes)
    write_cells(out, obs, var, blocks, n_values, count_dtype(1), ordered=True, ranked=True)
    left_out = [name for name in names if name not in kept]
    ignored = f"; columns left out: {', '.join(left_out)}" if left_out else ""
    return (
        f"{out}: {len(obs):,} cells, {n_values / len(obs):,.0f} genes each in rank order, without counts: for "
        f"tokens.tokenizer rank and the objectives masked_gene and next_gene{ignored}"
    )


def _fits_h5ad(name: str, kind: Any) -> bool:
    """True for a column of text, booleans or numbers with a name that .h5ad can have."""
    types = optional_package("pyarrow.types", "arrow")
    is_plain = (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
    )
    return is_plain and name != "_index" and "/" not in name


def _read_dataset(folder: Path) -> Any:
    """The Arrow table of the data files, memory-mapped."""
    arrow = optional_package("pyarrow", "arrow")
    if not (folder / "state.json").is_file():
        raise DataError(
            f"{folder}: not a saved dataset: no state.json; give the folder that save_to_disk wrote"
        )
    state = read_json(folder / "state.json")
    try:
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise DataError(
                f"{folder}: a selection of another dataset; call flatten_indices() and save it again"
            )
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError, AttributeError):
        raise DataError(
            f"{folder}/state.json: names no data files; save the dataset again"
        ) from None
    tables = []
    for name in names:
        if Path(name).name != name:
            raise DataError(f"{folder}/state.json: {name[:80]!r} is outside the folder")
        require_file(folder / name)
        with reading(folder / name):
            table = arrow.ipc.open_stream(arrow.memory_map(str(folder / name))).read_all()
            table.validate(full=True)
            tokens: Any = table.schema.field(TOKENS).type if TOKENS in table.column_names else None
            is_list = tokens is not None and (
                arrow.types.is_list(tokens) or arrow.types.is_large_list(tokens)
            )
            if not (is_list and arrow.types.is_integer(tokens.value_type)):
                raise DataError(
                    f"{folder}: no column {TOKENS} of lists of numbers; expected a token dataset of Geneformer"
                )
            tables.append(table)
    if not sum(table.num_rows for table in tables):
        raise DataError(f"{folder}: empty: no cells")
    with reading(folder):
        return arrow.concat_tables(tables)


def _rank_blocks(
    folder: Path, cells: Any, column: np.ndarray, n_genes: int
) -> Iterator[sp.csr_matrix]:
    """Yield all cells in order: CSR of ones, whose indices are genes in rank order.

    `column` has the gene of each token.
    """
    first = 0
    for batch in cells.select([TOKENS]).to_batches(max_chunksize=_ROWS):
        with reading(folder):
            lists = batch.column(0)
            lengths = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
            tokens = lists.flatten().to_numpy(zero_copy_only=False)
            if lists.null_count or tokens.dtype.kind not in "iu":
                raise DataError(
                    f"{folder}: damaged: a cell has no tokens, or one that is not a number"
                )
        columns = _rows_of(column, tokens, _UNKNOWN)
        cell = np.repeat(np.arange(len(lengths)), lengths)
        unknown = columns == _UNKNOWN
        if unknown.any():
            wrong = int(unknown.argmax())
            raise DataError(
                f"{folder}: token {tokens[wrong]} of cell {first + cell[wrong]:,} is no gene with a median; give the "
                "dictionaries with which the cells were tokenized (--dictionaries)"
            )
        is_gene = columns >= 0
        columns = columns[is_gene]
        cell = cell[is_gene]
        keys = np.sort(cell * np.int64(n_genes) + columns)
        repeated = keys[1:][keys[1:] == keys[:-1]]
        if repeated.size:
            number = first + int(repeated[0]) // n_genes
            raise DataError(f"{folder}: cell {number:,} has a gene twice; expected ranks")
        offsets = row_offsets(np.bincount(cell, minlength=len(lengths)))
        ones = np.ones(len(columns), np.uint16)
        yield sp.csr_matrix((ones, columns, offsets), shape=(len(lengths), n_genes))
        first += len(lengths)


def _rows_of(row_of_index: np.ndarray, indices: np.ndarray, unknown: int) -> np.ndarray:
    """`row_of_index` at each of `indices`; `unknown` for those outside."""
    inside = (indices >= 0) & (indices < len(row_of_index))
    return np.where(inside, row_of_index[np.where(inside, indices, 0)], unknown)


def open_shard_folder(folder: Path, genes: Path) -> CountSource:
    """Open shards with the gene vocabulary `genes`.

    Raises DataError if they are damaged or made with another vocabulary.
    """
    manifest = read_json(folder / "manifest.json")
    try:
        sizes = [int(n) for n in manifest["shard_sizes"]]
        made_with = str(manifest["vocab_hash"])
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"{folder}/manifest.json: no shard_sizes and vocab_hash: not shards of scModelForge"
        ) from None
    names, row_of_index = _genes(genes, made_with)
    matrix = _PaddedShards(folder, sizes, row_of_index, len(names))
    obs = _shard_obs(folder, sizes)
    return CountSource(folder, "X", matrix, obs, named_frame(names))


class _PaddedShards(StoredMatrix):
    """Matrix of several shards, one after another, read through memory maps."""

    def __init__(
        self, folder: Path, sizes: list[int], row_of_index: np.ndarray, n_genes: int
    ) -> None:
        self._row = row_of_index
        self.shape = (sum(sizes), n_genes)
        folders = (folder / f"shard_{number:03d}" for number in range(len(sizes)))
        self._shards = [(shard, self._open(shard, n)) for shard, n in zip(folders, sizes)]

    def _open(self, shard: Path, n: int) -> list[np.ndarray]:
        arrays = []
        for name, kinds, n_dims in (
            ("X", REAL, 2),
            ("gene_indices", WHOLE, 2),
            ("n_genes", WHOLE, 1),
        ):
            path = shard / f"{name}.npy"
            require_file(path)
            with reading(path):
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            arrays.append(require_kind(path, name, array, kinds, n_dims))
            if len(array) != n:
                raise DataError(
                    f"{path}: expected {n:,} cells, as manifest.json, got {len(array):,}"
                )
        if arrays[0].shape != arrays[1].shape:
            raise DataError(
                f"{shard}: X and gene_indices differ in shape: {arrays[0].shape}, {arrays[1].shape}"
            )
        return arrays

    def parts(self, block: int) -> Iterator[sp.csr_matrix]:
        for shard, (values, indices, lengths) in self._shards:
            for first in range(0, len(lengths), block):
                with reading(shard):
                    n = np.asarray(lengths[first : first + block]).astype(np.int64)
                    width = values.shape[1]
                    if len(n) and not 0 <= n.min() <= n.max() <= width:
                        raise DataError(f"{shard}: n_genes is outside 0 to {width:,}: damaged")
                    is_value = np.arange(width) < n[:, None]  # the rest is padding
                    genes = np.asarray(indices[first : first + block])[is_value]
                    data = native(values[first : first + block])[is_value]
                rows = _rows_of(self._row, genes, -1)
                if (rows < 0).any():
                    wrong = genes[int((rows < 0).argmax())]
                    raise DataError(
                        f"{shard}: gene index {wrong} is not in the gene vocabulary: damaged"
                    )
                shape = (len(n), self.shape[1])
                yield sp.csr_matrix((data, rows.astype(np.int32), row_offsets(n)), shape=shape)


def _genes(path: Path, made_with: str) -> tuple[list[str], np.ndarray]:
    """Names of genes, and the row of each index of the vocabulary, -1 for none."""
    tree: Any = read_json(path)
    if isinstance(tree, list) and all(isinstance(name, str) for name in tree):
        tree = {name: row + _SPECIAL for row, name in enumerate(dict.fromkeys(tree))}
    numbers = list(tree.values()) if isinstance(tree, dict) else []
    are_whole = all(type(n) is int and 0 <= n < 2**24 for n in numbers)
    if not numbers or not are_whole or len(set(numbers)) < len(numbers):
        raise DataError(
            f"{path}: expected a gene vocabulary of scModelForge: a list of genes, or each with its index"
        )
    text = json.dumps(tree, sort_keys=True)
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    if digest != made_with:
        raise DataError(
            f"{path}: its hash is {digest[:12]}, the shards were made with {made_with[:12]}; give theirs"
        )
    row_of_index = np.full(max(numbers) + 1, -1, np.int32)
    row_of_index[numbers] = np.arange(len(numbers))
    return list(tree), row_of_index


def _shard_obs(folder: Path, sizes: list[int]) -> pd.DataFrame:
    frames = []
    names = []
    for number, n in enumerate(sizes):
        names += [f"{number:03d}_{row}" for row in range(n)]
        frame = pd.DataFrame(index=range(n))
        path = folder / f"shard_{number:03d}" / "obs.parquet"
        if path.is_file():
            parquet = optional_package("pyarrow.parquet", "arrow")
            with reading(path):
                stored = parquet.read_table(path, memory_map=True).to_pandas()
            # one without columns has no rows either
            frame = stored if len(stored.columns) else frame
        if len(frame) != n:
            raise DataError(f"{path}: expected {n:,} cells, as manifest.json, got {len(frame):,}")
        frames.append(frame)
    return as_obs(pd.concat([pd.DataFrame(), *frames], ignore_index=True), names)
