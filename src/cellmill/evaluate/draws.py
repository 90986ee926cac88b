"""Random draws of an evaluation, and the key of each use.

Draws with the same seed and key are equal. Some uses share a key. This does no harm,
as they draw different things or from another seed, and other keys would change every evaluation. A new
use takes a new key.
`splits.draw_shots` makes its keys from the number of shots, shifted by 32 bits, plus the
repetition. Keys from 1 << 60 are left to tasks of other packages.
"""

import numpy as np

LABELLED_CELLS = 0  # scored cells of a task with labels
KNOCKED_OUT_CELLS = 0  # of a stage of its own
UMAP_CELLS = 1
RANDOM_VECTORS = 2  # of cells, a row of integration
RECONSTRUCTED_CELLS = 2  # an order of cells, not normal numbers
HALVES_OF_CONTROLS = 4
HALVES_OF_UNITS = 5  # of the cells of each perturbation
HALVES_OF_LABELS = 6  # of the cells of each label
RANDOM_GENE_VECTORS = 6  # normal numbers, not an order of cells
PROBE_NOISE = 6  # shifted by 32 bits, plus the unit
OTHER_GENES = 7  # genes that are in no set
ATLAS_CELLS = 7  # of a stage of its own
RANDOM_PAIRS = 8  # similarities of transcription factors and genes
IMPUTED_CELLS = 9
HIDDEN_GENES = 10
RIDGE_PARTS = 10  # parts of the genes, hidden in turn; of stage consolidate
# tasks/classification/degraded.py adds repetitions and levels to these
SCORED_CELL_DEGRADATIONS = 1000
TRAINING_CELL_DEGRADATIONS = 2000


def seeded(seed: int, key: int) -> np.random.Generator:
    """Random numbers of `seed` for one use, `key`."""
    return np.random.Generator(np.random.Philox(key=[seed, key]))


def draw_cells(cells: np.ndarray, max_cells: int, seed: int, key: int) -> np.ndarray:
    """`cells` (indices, ascending), or a seeded draw of `max_cells` of them, ascending."""
    if len(cells) <= max_cells:
        return cells
    return np.sort(seeded(seed, key).permutation(cells)[:max_cells])
