"""Token datasets of Geneformer as cells of ranks: folders that Hugging Face `datasets` saved, memory-mapped.

    state.json                  names of the data files
    data-00000-of-00001.arrow   Arrow streams of columns: `input_ids`, the tokens of a cell in rank order, and metadata

The order of a cell's genes is all that such a dataset has of their counts, up to the longest cell that it was made
for. So a converted cell has genes in rank order and no counts: tokenizer `rank` reads it, others are refused.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.h5 import count_dtype, reading, write_cells
from cellmill.data.inputs.source import as_obs, import_arrow
from cellmill.errors import DataError
from cellmill.files import read_json, require_file

TOKENS = "input_ids"
_ENDS = ("<pad>", "<mask>", "<cls>", "<eos>")  # tokens that are not genes
_MADE = "length"  # column with the number of tokens, which Geneformer adds
_ROWS = 8192  # cells in memory at once


def convert_tokens(folder: Path, tokens: Mapping[str, int], genes: Vocabulary, out: Path) -> str:
    """Write the cells of a token dataset to `out`, an .h5ad of genes in rank order; return the line to print.

    `tokens` are the numbers of genes and special tokens by name, `genes` those with a median. Raises DataError when the
    dataset is damaged, has a token that is no gene with a median, or a cell has a gene twice.
    """
    dataset = _TokenDataset(folder)
    column = _columns(tokens, genes)
    var = pd.DataFrame(
        {"symbol": genes.symbols, "median": genes.medians}, index=pd.Index(genes.gene_ids, name="gene_id")
    )
    n_values = sum(block.nnz for block in dataset.blocks(column, genes.n_genes))
    blocks = dataset.blocks(column, genes.n_genes)
    write_cells(out, dataset.obs, var, blocks, n_values, count_dtype(1), ordered=True, ranked=True)
    left_out = f"; columns left out: {', '.join(dataset.left_out)}" if dataset.left_out else ""
    each = n_values / max(1, len(dataset.obs))
    return (
        f"{out}: {len(dataset.obs):,} cells, {each:,.0f} genes each in rank order, without counts: for "
        f"tokens.tokenizer rank and the objectives masked_gene and next_gene{left_out}"
    )


def _columns(tokens: Mapping[str, int], genes: Vocabulary) -> np.ndarray:
    """Column of each token, int32: -1 if it is not a gene, -2 if it is unknown."""
    column = np.full(max(tokens.values()) + 1, -2, np.int32)
    column[[int(tokens[name]) for name in _ENDS if name in tokens]] = -1
    column[[int(tokens[gene]) for gene in genes.gene_ids]] = np.arange(genes.n_genes)
    return column


class _TokenDataset:
    """A folder of `datasets.Dataset.save_to_disk`. Attributes: `obs`, and `left_out`, columns that are not obs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._arrow = folder, import_arrow()
        self._files = _data_files(folder)
        parts = []
        for batch in self._batches():
            kinds = dict(zip(batch.schema.names, batch.schema.types))
            if TOKENS not in kinds or not _is_list_of_numbers(self._arrow, kinds[TOKENS]):
                raise DataError(
                    f"{folder}: no column {TOKENS} of lists of numbers; expected a token dataset of Geneformer"
                )
            kept = [name for name, kind in kinds.items() if _is_obs(self._arrow, name, kind)]
            self.left_out = [name for name in kinds if name not in (*kept, TOKENS, _MADE)]
            with reading(folder):
                columns = {name: batch.column(name).to_pandas() for name in kept}
                parts.append(pd.DataFrame(columns, index=range(batch.num_rows)))
        if not parts:
            raise DataError(f"{folder}: empty: no cells")
        frame = pd.concat(parts, ignore_index=True)
        self.obs = as_obs(frame, [f"cell_{row}" for row in range(len(frame))])

    def blocks(self, column: np.ndarray, n_genes: int) -> Iterator[sp.csr_matrix]:
        """All cells in order: CSR of ones, whose indices are in rank order."""
        first = 0
        for batch in self._batches():
            for start in range(0, batch.num_rows, _ROWS):
                with reading(self._folder):
                    lists = batch.column(TOKENS).slice(start, _ROWS).drop_null()
                    lengths = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
                    found = lists.flatten().to_numpy(zero_copy_only=False)
                    if len(lengths) != min(_ROWS, batch.num_rows - start) or found.dtype.kind not in "iu":
                        raise DataError(f"{self._folder}: damaged: a cell has no tokens, or one that is no number")
                yield self._ranks(found, lengths, column, n_genes, first)
                first += len(lengths)

    def _ranks(
        self, found: np.ndarray, lengths: np.ndarray, column: np.ndarray, n_genes: int, first: int
    ) -> sp.csr_matrix:
        inside = (found >= 0) & (found < len(column))
        columns = np.where(inside, column[np.where(inside, found, 0)], -2)
        cell = np.repeat(np.arange(len(lengths)), lengths)
        if (unknown := columns == -2).any():
            at = int(unknown.argmax())
            raise DataError(
                f"{self._folder}: token {found[at]} of cell {first + cell[at]:,} is no gene with a median; give the "
                "dictionaries with which the cells were tokenized (--dictionaries)"
            )
        genes = columns >= 0
        columns, cell = columns[genes], cell[genes]
        keys = np.sort(cell * np.int64(n_genes) + columns)
        if (repeated := keys[1:][keys[1:] == keys[:-1]]).size:
            raise DataError(
                f"{self._folder}: cell {first + int(repeated[0]) // n_genes:,} has a gene twice; expected ranks"
            )
        starts = np.concatenate([[0], np.cumsum(np.bincount(cell, minlength=len(lengths)))])
        return sp.csr_matrix((np.ones(len(columns), np.uint16), columns, starts), shape=(len(lengths), n_genes))

    def _batches(self) -> Iterator[Any]:
        for path in self._files:
            with reading(path), self._arrow.memory_map(str(path)) as source:
                stream = self._arrow.ipc.open_stream(source)
                while True:
                    try:
                        batch = stream.read_next_batch()
                    except StopIteration:
                        break
                    batch.validate(full=True)
                    yield batch


def _data_files(folder: Path) -> list[Path]:
    if not (folder / "state.json").is_file():
        raise DataError(f"{folder}: not a saved dataset: no state.json; give the folder that save_to_disk wrote")
    state = read_json(folder / "state.json")
    try:
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise DataError(f"{folder}: a selection of another dataset; call flatten_indices() and save it again")
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{folder}/state.json: names no data files; save the dataset again") from None
    for name in names:
        if Path(name).name != name:
            raise DataError(f"{folder}/state.json: {name[:80]!r} is outside the folder")
        require_file(folder / name)
    return [folder / name for name in names]


def _is_list_of_numbers(arrow: Any, kind: Any) -> bool:
    is_list = arrow.types.is_list(kind) or arrow.types.is_large_list(kind)
    return bool(is_list and arrow.types.is_integer(kind.value_type))


def _is_obs(arrow: Any, name: str, kind: Any) -> bool:
    types = arrow.types
    plain = types.is_string(kind) or types.is_large_string(kind) or types.is_boolean(kind)
    return (
        name not in (_MADE, "_index")
        and "/" not in name
        and bool(plain or types.is_integer(kind) or types.is_floating(kind))
    )
