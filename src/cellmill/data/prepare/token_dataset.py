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
from cellmill.data.inputs.source import as_obs, optional_package
from cellmill.errors import DataError
from cellmill.files import read_json, require_file

TOKENS = "input_ids"
_ENDS = ("<pad>", "<mask>", "<cls>", "<eos>")  # tokens that are not genes
_LENGTH = "length"  # column with the number of tokens, which Geneformer adds
_NO_GENE, _UNKNOWN = -1, -2  # in place of the column of a token's gene
_ROWS = 8192  # cells in memory at once


def convert_tokens(folder: Path, tokens: Mapping[str, int], genes: Vocabulary, out: Path) -> str:
    """Write the cells of a token dataset to `out`, an .h5ad of genes in rank order; return the line to print.

    `tokens` are the numbers of genes and special tokens by name, `genes` those with a median. Raises DataError when the
    dataset is damaged, has a token that is not a gene with a median, or a cell has a gene twice.
    """
    arrow, files = optional_package("pyarrow", "arrow"), _data_files(folder)
    obs, left_out = _read_obs(folder, arrow, files)
    column = np.full(max(tokens.values()) + 1, _UNKNOWN, np.int32)
    column[[int(tokens[name]) for name in _ENDS if name in tokens]] = _NO_GENE
    column[[int(tokens[gene]) for gene in genes.gene_ids]] = np.arange(genes.n_genes)
    index = pd.Index(genes.gene_ids, name="gene_id")
    var = pd.DataFrame({"symbol": genes.symbols, "median": genes.medians}, index=index)
    n_values = sum(block.nnz for block in _blocks(folder, arrow, files, column, genes.n_genes))
    blocks = _blocks(folder, arrow, files, column, genes.n_genes)
    write_cells(out, obs, var, blocks, n_values, count_dtype(1), ordered=True, ranked=True)
    ignored = f"; columns left out: {', '.join(left_out)}" if left_out else ""
    return (
        f"{out}: {len(obs):,} cells, {n_values / max(1, len(obs)):,.0f} genes each in rank order, without counts: for "
        f"tokens.tokenizer rank and the objectives masked_gene and next_gene{ignored}"
    )


def _read_obs(folder: Path, arrow: Any, files: list[Path]) -> tuple[pd.DataFrame, list[str]]:
    """obs, and the names of columns that are not obs."""
    parts, left_out, types = [], list[str](), arrow.types
    plain = (types.is_string, types.is_large_string, types.is_boolean, types.is_integer, types.is_floating)
    for batch in _batches(arrow, files):
        kinds = dict(zip(batch.schema.names, batch.schema.types))
        tokens: Any = kinds.get(TOKENS)
        is_list = tokens is not None and (types.is_list(tokens) or types.is_large_list(tokens))
        if not (is_list and types.is_integer(tokens.value_type)):
            raise DataError(f"{folder}: no column {TOKENS} of lists of numbers; expected a token dataset of Geneformer")
        names = [name for name in kinds if name not in (TOKENS, _LENGTH)]
        kept = [n for n in names if n != "_index" and "/" not in n and any(is_kind(kinds[n]) for is_kind in plain)]
        left_out = [name for name in names if name not in kept]
        with reading(folder):
            columns = {name: batch.column(name).to_pandas() for name in kept}
            parts.append(pd.DataFrame(columns, index=range(batch.num_rows)))
    if not parts:
        raise DataError(f"{folder}: empty: no cells")
    frame = pd.concat(parts, ignore_index=True)
    return as_obs(frame, [f"cell_{row}" for row in range(len(frame))]), left_out


def _blocks(folder: Path, arrow: Any, files: list[Path], column: np.ndarray, n_genes: int) -> Iterator[sp.csr_matrix]:
    """All cells in order: CSR of ones, whose indices are in rank order. `column` gives the gene of each token."""
    first = 0
    for batch in _batches(arrow, files):
        for start in range(0, batch.num_rows, _ROWS):
            with reading(folder):
                lists = batch.column(TOKENS).slice(start, _ROWS).drop_null()
                lengths = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
                found = lists.flatten().to_numpy(zero_copy_only=False)
                if len(lengths) != min(_ROWS, batch.num_rows - start) or found.dtype.kind not in "iu":
                    raise DataError(f"{folder}: damaged: a cell has no tokens, or one that is not a number")
            inside = (found >= 0) & (found < len(column))
            columns = np.where(inside, column[np.where(inside, found, 0)], _UNKNOWN)
            cell = np.repeat(np.arange(len(lengths)), lengths)
            if (unknown := columns == _UNKNOWN).any():
                wrong = int(unknown.argmax())
                raise DataError(
                    f"{folder}: token {found[wrong]} of cell {first + cell[wrong]:,} is no gene with a median; give "
                    "the dictionaries with which the cells were tokenized (--dictionaries)"
                )
            columns, cell = columns[columns >= 0], cell[columns >= 0]
            keys = np.sort(cell * np.int64(n_genes) + columns)
            if (repeated := keys[1:][keys[1:] == keys[:-1]]).size:
                number = first + int(repeated[0]) // n_genes
                raise DataError(f"{folder}: cell {number:,} has a gene twice; expected ranks")
            starts = np.concatenate([[0], np.cumsum(np.bincount(cell, minlength=len(lengths)))])
            yield sp.csr_matrix((np.ones(len(columns), np.uint16), columns, starts), shape=(len(lengths), n_genes))
            first += len(lengths)


def _batches(arrow: Any, files: list[Path]) -> Iterator[Any]:
    for path in files:
        with reading(path), arrow.memory_map(str(path)) as source:
            for batch in arrow.ipc.open_stream(source):
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
