"""Division of labelled cells, or of perturbed units, into folds.

A fold has cells to fit on and cells to test.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from sklearn.model_selection import GroupKFold, StratifiedKFold

from cellmill.data.arrays import text_values
from cellmill.evaluate.draws import seeded

PLURALS = {"donor": "donors", "batch": "batches"}  # plural in messages of each role of groups


class Fold(NamedTuple):
    """Cells or units of one fold, as indices."""

    repetition: int  # repetition that the fold belongs to, from 0
    fitted: np.ndarray  # classifiers and predictions are fitted on these
    tested: np.ndarray


def split_by_class(
    labels: np.ndarray, n_folds: int, n_repetitions: int, seed: int
) -> Iterator[Fold]:
    """Divide cells into `n_folds` stratified folds, and draw new folds in each repetition.

    `labels`, `(cells,)`, are the classes. Each class must have at least `n_folds` cells.
    """
    for repetition in range(n_repetitions):
        splitter = StratifiedKFold(n_folds, shuffle=True, random_state=seed + repetition)
        for fitted, tested in splitter.split(labels, labels):
            yield Fold(repetition, fitted, tested)


def draw_shots(
    labels: np.ndarray, classes: list[str], shots: int, n_repetitions: int, seed: int
) -> Iterator[Fold]:
    """Draw `shots` fitted cells of each of `classes`, and test all other cells of these classes.

    `labels`, `(cells,)`, are the classes of all cells. Each repetition is one fold.
    """
    for repetition in range(n_repetitions):
        generator = seeded(seed, (shots << 32) + repetition)
        drawn = [generator.permutation(np.flatnonzero(labels == name)) for name in classes]
        fitted = np.concatenate([cells[:shots] for cells in drawn])
        tested = np.concatenate([cells[shots:] for cells in drawn])
        yield Fold(repetition, fitted, tested)


def split_groups(
    groups: pd.Series, most_folds: int, labels: np.ndarray | None = None, min_cells: int = 1
) -> list[Fold]:
    """Divide cells into at most `most_folds` folds that each test whole groups.

    `groups` has the group of each cell, NaN for none. Cells without a group are in no fold. The folds are
    numbered as repetitions. A single group makes no fold.

    A fold is left out if it has fewer than `min_cells` fitted or tested cells. With `labels`, `(cells,)`,
    a fold is also left out if its fitted cells have a single class, because no classifier can be fitted.
    """
    grouped_cells = np.flatnonzero(groups.notna().to_numpy())
    names = text_values(groups.iloc[grouped_cells]).astype(str)
    n_groups = len(np.unique(names))
    folds: list[Fold] = []
    if n_groups < 2:
        return folds
    for split in GroupKFold(min(n_groups, most_folds)).split(grouped_cells, groups=names):
        fitted, tested = (grouped_cells[indices] for indices in split)
        has_classes = labels is None or len(np.unique(labels[fitted])) > 1
        if has_classes and min(len(fitted), len(tested)) >= min_cells:
            folds.append(Fold(len(folds), fitted, tested))
    return folds


def split_donors(
    roles: Mapping[str, pd.Series],
    cells: np.ndarray,
    most_folds: int,
    labels: np.ndarray | None = None,
    min_cells: int = 1,
) -> tuple[str, list[Fold]]:
    """Divide `cells` (indices) into folds of donors, or into folds of batches if donors make no folds.

    Returns the role of the groups, `donor` or `batch`, and the folds of `split_groups`. Without any fold,
    the role is "". The folds have positions in `cells`. `labels` are those of `cells`.
    """
    for role in ("donor", "batch"):
        if role in roles:
            folds = split_groups(roles[role].iloc[cells], most_folds, labels, min_cells)
            if folds:
                return role, folds
    return "", []


def explain_no_groups(
    roles: Mapping[str, pd.Series], cells: np.ndarray, names: Sequence[str] = tuple(PLURALS)
) -> str:
    """Say why `split_groups` makes no folds of labelled `cells` (indices) by any of the roles `names`."""
    reasons = []
    for role in names:
        n = roles[role].iloc[cells].nunique() if role in roles else 0
        if n > 1:
            reasons.append(
                f"whichever fold of the {n} {PLURALS[role]} is left out, the other scored cells have one class"
            )
    plurals = " or ".join(PLURALS[role] for role in names)
    return "; ".join(reasons) or f"the scored cells have no two {plurals}"
