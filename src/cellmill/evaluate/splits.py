"""Folds: labelled cells, or perturbed units, divided into those to fit on and those to test."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from sklearn.model_selection import GroupKFold, StratifiedKFold

from cellmill.data.arrays import text_values
from cellmill.evaluate.draws import seeded

PLURALS = {"donor": "donors", "batch": "batches"}


class Fold(NamedTuple):
    """Cells or units of one fold or draw, as indices."""

    repetition: int
    fitted: np.ndarray  # those that classifiers and predictions are fitted on
    tested: np.ndarray


def split_by_class(
    labels: np.ndarray, n_folds: int, n_repetitions: int, seed: int
) -> Iterator[Fold]:
    """Stratified folds of classes with at least `n_folds` cells each, drawn anew in each repetition."""
    for repetition in range(n_repetitions):
        splitter = StratifiedKFold(n_folds, shuffle=True, random_state=seed + repetition)
        for fitted, tested in splitter.split(labels, labels):
            yield Fold(repetition, fitted, tested)


def draw_shots(
    labels: np.ndarray, classes: list[str], shots: int, n_repetitions: int, seed: int
) -> Iterator[Fold]:
    """Folds that fit on `shots` cells of each of `classes`, and test all other cells of these classes."""
    for repetition in range(n_repetitions):
        generator = seeded(seed, (shots << 32) + repetition)
        drawn = [generator.permutation(np.flatnonzero(labels == name)) for name in classes]
        fitted = np.concatenate([cells[:shots] for cells in drawn])
        tested = np.concatenate([cells[shots:] for cells in drawn])
        yield Fold(repetition, fitted, tested)


def split_groups(
    groups: pd.Series, most_folds: int, labels: np.ndarray | None = None, min_cells: int = 1
) -> list[Fold]:
    """Folds that test one group or several, at most `most_folds`, each as a repetition of its own; none
    for a single group. Cells of no group are left out.

    Folds with fewer than `min_cells` cells on either side are left out. With `labels`, `(cells,)`,
    folds whose fitted cells are of a single class are left out too: no classifier fits one class.
    """
    known = np.flatnonzero(groups.notna().to_numpy())
    names = text_values(groups.iloc[known]).astype(str)
    n_groups = len(np.unique(names))
    folds: list[Fold] = []
    if n_groups < 2:
        return folds
    for split in GroupKFold(min(n_groups, most_folds)).split(known, groups=names):
        fitted, tested = (known[indices] for indices in split)
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
    """Folds of `split_groups` that test donors, or batches if donors make no folds; and which of these
    roles it is. The folds have indices of `cells`, which are indices of the values in `roles`.
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
    """Why `split_groups` makes no folds of labelled cells (indices) by the roles `names`."""
    reasons = []
    for role in names:
        n = roles[role].iloc[cells].nunique() if role in roles else 0
        if n > 1:
            reasons.append(
                f"whichever fold of the {n} {PLURALS[role]} is left out, the other scored cells have one class"
            )
    plurals = " or ".join(PLURALS[role] for role in names)
    return "; ".join(reasons) or f"the scored cells have no two {plurals}"
