"""Vectors of a teacher for the cells that a training reads: stage `teach` writes them, objective `distill` reads them.

    vectors.npy     `(cells, width)` float32: of the training cells, then of the validation cells, in the order of the
                    shards; NaN where the teacher has none. Over the training cells each column has mean 0 and standard
                    deviation 1, so that a loss weighs all columns alike
    vectors.json    a `TeacherVectors`; written last

As the index of the shards, they are mapped, and need no HDF5.
"""

from pathlib import Path

import numpy as np

from cellmill.config import check_options
from cellmill.config.parts.objective import TeacherVectors
from cellmill.data.shards.index import open_array
from cellmill.data.shards.manifest import READ, Manifest
from cellmill.errors import DataError
from cellmill.files import read_json, sha256_file

ABOUT, TABLE = "vectors.json", "vectors.npy"
AGAIN = "run teach again"


def open_vectors(folder: Path, shards: Manifest, verify: bool = False) -> tuple[TeacherVectors, dict[str, np.ndarray]]:
    """Return what is known of the teacher, and the vectors of each split; with `verify`, hash them.

    Raises UserError if they are missing, damaged or of other shards.
    """
    about: TeacherVectors = check_options(TeacherVectors, read_json(folder / ABOUT), str(folder / ABOUT))
    if (there := about.shards) != (here := shards.fingerprint):
        raise DataError(f"{folder / ABOUT}: expected vectors of shards {here[:12]}, got of {there[:12]}; {AGAIN}")
    n_train, n_val = (shards.splits[split].n_obs for split in READ)
    table = open_array(folder / TABLE, (n_train + n_val, about.width), "<f4", AGAIN)
    if verify and (found := sha256_file(folder / TABLE)) != about.sha256:
        raise DataError(f"{folder / TABLE}: expected sha256 {about.sha256[:12]}, got {found[:12]}: changed; {AGAIN}")
    return about, {"train": table[:n_train], "val": table[n_train:]}
