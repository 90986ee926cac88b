"""Passes over the cells of a vocabulary, which a later process resumes after a kill.

A pass adds up a few arrays of a fixed size. They are saved next to the vocabulary (`SavedWork`), in a
state for each pass, with `position`, int64 (4,): file, row in it, training cells and cells so far. A
process that finds sums of the same files and options continues from there. The result is the same to
the bit as without a kill, because each sum takes the same blocks in the same order.
"""

from collections.abc import Iterator, Mapping
from itertools import compress, islice
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from cellmill.config.corpus import SPLITS, Shard, VocabularyConfig
from cellmill.data.arrays import select_rows
from cellmill.data.genes.vocabulary import VocabularyCells
from cellmill.data.inputs.fetch import state_of
from cellmill.data.inputs.formats import open_counts
from cellmill.data.saved_work import SavedWork
from cellmill.data.split import (
    hash_cells,
    hash_genes,
    split_by_value,
    split_of_hashes,
)
from cellmill.errors import DataError
from cellmill.files import digest, progress

BLOCK = 1024  # cells
FIRST = "first"
SECOND = "second"
FORMAT = 1  # format of the sums; raise it when the same cells give other sums
_TRAIN = SPLITS.index("train")


class CellPasses:
    """Passes over the cells of a vocabulary: all cells of the files, or with `split` its training cells.

    Sums depend on `options`, and on the genes that these allow (bool). They are saved next to `out`, if
    it is given.
    """

    def __init__(
        self,
        paths: list[Path],
        gene_ids: list[str],
        split: Shard | None,
        options: VocabularyConfig,
        out: Path | None,
        allowed: np.ndarray,
    ):
        self._paths = paths
        self.gene_ids = gene_ids
        self._split = split
        self._rows = {gene: row for row, gene in enumerate(gene_ids)}
        self._gene_hashes = hash_genes([])
        self._masks: dict[Path, np.ndarray] = {}  # training cells, if a column splits
        if split is not None and split.split_by is not None:
            self._masks = _training_masks(paths, split, split.split_by)
        elif split is not None:
            self._gene_hashes = hash_genes(gene_ids)
        facts = {
            "format": FORMAT,
            "files": [state_of(path) for path in paths],
            "vocabulary": options.model_dump(mode="json"),
            "genes": digest(list(compress(gene_ids, allowed))),
            "split": None if split is None else split.model_dump(mode="json"),
        }
        self._saved = SavedWork(out or Path(), None if out is None else facts)
        # file, row in it, training cells and cells so far, of the pass that was read last
        self._position = np.zeros(4, np.int64)

    def blocks(
        self, name: str, sums: Mapping[str, np.ndarray]
    ) -> Iterator[tuple[np.ndarray, sp.csr_matrix]]:
        """Blocks of cells of all files, each with the row in `gene_ids` of every value.

        The caller adds each block to the arrays `sums` in place, before it takes the next one. In
        pass `name` these begin as a killed process saved them, and the cells that it had added are
        left out.
        """
        state = {**sums, "position": self._position}
        self._position[:] = 0
        stored = self._saved.restore(name)
        if stored is not None:
            for key, array in state.items():
                array[...] = stored[key]
            print(f"{self._position[3]:,} cells are counted already", flush=True)
        started, done, _, _ = self._position.tolist()
        paths = progress(self._paths, "vocabulary", len(self._paths), "files")
        for number, path in islice(enumerate(paths), started, None):
            with open_counts(path) as reader:
                row_of_column = np.array([self._rows[gene] for gene in reader.var_names], np.int32)
                first = done if number == started else 0
                left = reader.rows(BLOCK, first)
                for block in progress(left, f"vocabulary {path.stem}", reader.n_obs - first):
                    last = first + block.shape[0]
                    if path in self._masks:
                        chosen = select_rows(block, self._masks[path][first:last])
                    elif self._split is not None:
                        chosen = self._select_by_content(block, row_of_column, self._split)
                    else:
                        chosen = block
                    yield row_of_column.take(chosen.indices), chosen
                    self._position += (0, last - first, chosen.shape[0], last - first)
                    first = last
                    if self._saved.is_due(block.shape[0]):
                        self._saved.save(name, state)
            self._position[:2] = (number + 1, 0)
        if self._saved.has_saved:
            self._saved.save(name, state)  # another pass may follow

    def training(self) -> VocabularyCells | None:
        """Describe the training cells that `blocks` gave last; None without a split.

        Raises DataError if there were none.
        """
        if self._split is None:
            return None
        n_training, n_all = self._position[2:].tolist()
        if not n_training:
            raise DataError(
                f"none of {n_all:,} cells is for training; lower shard.val_frac or test_frac"
            )
        return VocabularyCells(n_training, n_all, self._split.split_by or "")

    def _select_by_content(
        self, block: sp.csr_matrix, row_of_column: np.ndarray, split: Shard
    ) -> sp.csr_matrix:
        genes = row_of_column.take(block.indices)
        hashes = hash_cells(block.indptr, genes, block.data, self._gene_hashes)[:, 0]
        number = split_of_hashes(hashes, split.seed, split.val_frac, split.test_frac)
        return select_rows(block, number == _TRAIN)


def _training_masks(paths: list[Path], split: Shard, column: str) -> dict[Path, np.ndarray]:
    """Mask of the training cells of each file, by the values of an obs column."""
    values = []
    for path in paths:
        with open_counts(path) as reader:
            values.append(reader.split_values(column))
    number = split_by_value(
        np.concatenate(values),
        column,
        split.seed,
        split.val_frac,
        split.test_frac,
        split.train_values,
    )
    ends = np.cumsum(list(map(len, values)))[:-1]
    return dict(zip(paths, np.split(number == _TRAIN, ends)))
