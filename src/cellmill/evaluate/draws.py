"""Random draws of an evaluation, and the key of each use.

Draws with the same seed and the same key are equal. Some uses share a key. Shared keys are harmless:
the uses draw different things, or they belong to different stages. The shared keys are kept, because
changing a key would change the results of earlier evaluations. A new use takes a new key.

The key of `splits.draw_shots` is (shots << 32) + repetition. Keys from 1 << 60 on are left to tasks of
other packages.
"""

import numpy as np

LABELLED_CELLS = 0  # cells that a task with labels scores, if there are too many
KNOCKED_OUT_CELLS = 0  # cells from which stage knock_out removes genes, if there are too many
UMAP_CELLS = 1  # cells of a UMAP

RANDOM_VECTORS = 2  # normal numbers: random vectors of cells, a method of task integration
RECONSTRUCTED_CELLS = 2  # permutation of the cells of task reconstruct

HALVES_OF_CONTROLS = 4  # halves of the control cells of a stratum
HALVES_OF_UNITS = 5  # halves of the cells of each perturbation

HALVES_OF_LABELS = 6  # permutation that divides the cells of each label into halves
RANDOM_GENE_VECTORS = 6  # normal numbers: random vectors of genes
PROBE_NOISE = 6  # normal numbers; the key of a unit is (PROBE_NOISE << 32) + unit

OTHER_GENES = 7  # genes that are in no gene set
ATLAS_CELLS = 7  # cells of the atlas that stage atlas compares with other donors
RANDOM_PAIRS = 8  # random similarities of transcription factors and genes

IMPUTED_CELLS = 9  # cells of task imputation
HIDDEN_GENES = 10  # genes that task imputation hides
RIDGE_PARTS = 10  # parts of the genes, which stage consolidate hides in turn

# tasks/classification/degraded.py adds the numbers of repetition and level to these two keys
SCORED_CELL_DEGRADATIONS = 1000
TRAINING_CELL_DEGRADATIONS = 2000


def seeded(seed: int, key: int) -> np.random.Generator:
    """Return the generator of one use's random numbers; `key` is made from the constants above."""
    return np.random.Generator(np.random.Philox(key=[seed, key]))


def draw_cells(cells: np.ndarray, max_cells: int, seed: int, key: int) -> np.ndarray:
    """Draw at most `max_cells` of `cells` (indices, ascending).

    Returns the drawn cells in ascending order. All cells are returned if there are no more than
    `max_cells`.
    """
    if len(cells) <= max_cells:
        return cells
    return np.sort(seeded(seed, key).permutation(cells)[:max_cells])
