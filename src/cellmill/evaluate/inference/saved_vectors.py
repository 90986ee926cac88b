"""Saves the vectors of cells while `embed` runs. After a kill, the next process continues from there.

The saved state is called `embedded`. It has the number of embedded cells and the seconds that they took.
It also has the sums of counts in each column, and the values that the reader has seen. The vectors are
saved as a stream of float32 rows, in the order of the cells. A cell without a known gene has a row of NaN.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from cellmill.config.run import Embed
from cellmill.data.inputs.fetch import state_of
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.saved_work import SavedRows, SavedWork
from cellmill.files import sha256_file
from cellmill.models.family import Model

STATE = "embedded"
FORMAT = 1  # version of the state; raise this number if the same cells get other vectors


class SavedVectors:
    """Saves `vectors`, `(cells, hidden)`, while they are computed in the order of the cells.

    `sums` are arrays by name, which add up values of the same cells. They are saved together with the
    vectors.
    """

    def __init__(
        self,
        saved: SavedWork,
        reader: CountsReader,
        sums: dict[str, np.ndarray],
        vectors: np.ndarray,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.first = 0  # index of the first cell that no earlier process has embedded
        self.earlier_s = 0.0  # seconds that earlier processes spent on the cells before `first`
        self._saved = saved
        self._reader = reader
        self._sums = sums
        self._vectors = vectors
        self._clock = clock
        self._began = clock()

    def restore(self) -> None:
        """Fill the vectors and sums with what a killed process has saved, if there is anything."""
        stored = self._saved.restore(STATE)
        self._rows = SavedRows(self._saved, STATE, {"vectors": self._vectors})
        if stored is None:
            return
        self.first = self._rows.restore(int(stored["n_cells"]))
        self.earlier_s = float(stored["seconds"])
        for name, array in self._sums.items():
            array[...] = stored[name]
        self._reader.restore_values(stored)
        print(f"{self._reader.path.stem}: {self.first:,} cells are embedded already", flush=True)

    def save_rows(self, blocks: Iterator[sp.csr_matrix]) -> Iterator[sp.csr_matrix]:
        """Yield the blocks of rows from row `first` on, and save vectors from time to time.

        The caller must write the vectors of a block before it takes the next block.
        """
        n_done = self.first
        for block in blocks:
            yield block
            n = block.shape[0]
            n_done += n
            if self._saved.is_due(n):
                self._save(n_done)

    def _save(self, n_cells: int) -> None:
        """Save the vectors of the first `n_cells` cells, and the state."""
        seen_values = self._reader.seen_values()
        seconds = self.earlier_s + self._clock() - self._began
        numbers = {"n_cells": np.array(n_cells), "seconds": np.array(seconds)}
        streams = self._rows.append(n_cells)
        self._saved.save(STATE, self._sums | seen_values | numbers, streams)


def list_embedding_facts(
    path: Path, read: Mapping[str, Any], folder: Path, model: Model, embed: Embed
) -> dict[str, Any]:
    """Facts that the vectors of a file's cells depend on. Saved work is used only if all facts are equal.

    `path` is the file of the cells, and `read` are the options by which it is read. `model` was read from
    `folder`.
    """
    device = next(model.parameters()).device
    is_gpu = device.type == "cuda"
    return {
        "input": {"files": state_of(path), **read},
        "model": {
            "weights": sha256_file(folder / "model.safetensors"),
            "config": sha256_file(folder / "config.json"),
            "vocabulary": sha256_file(folder / "vocabulary.tsv"),
        },
        "options": embed.model_dump(mode="json"),
        "device": torch.cuda.get_device_name(device) if is_gpu else device.type,
        "version": [FORMAT, torch.__version__],
    }
