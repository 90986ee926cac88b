"""Folds: labelled cells, or perturbed units, divided into those to fit on and those to test."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from sklearn.model_selection import GroupKFold, StratifiedKFold

from cellmill.data.arrays import text_values
from cellmill.evaluate.draws import seeded


class Fold(NamedTuple):
    """Cells or units of one fold or draw."""

    repetition: int
    train: np.ndarray  # indices
    test: np.ndarray  # indices


def split_by_class(labels: np.ndarray, n_folds: int, repetitions: int, seed: int) -> Iterator[Fold]:
    """Stratified folds of classes with at least `n_folds` cells each, in repetitions from 0."""
    for repetition in range(repetitions):
        splitter = StratifiedKFold(n_folds, shuffle=True, random_state=seed + repetition)
        for train, test in splitter.split(labels, labels):
            yield Fold(repetition, train, test)


def draw_shots(
    labels: np.ndarray, classes: list[str], shots: int, n_draws: int, seed: int
) -> Iterator[Fold]:
    """Train on `shots` cells of each of `classes`, and test on all other cells of these classes."""
    for draw in range(n_draws):
        generator = seeded(seed, (shots << 32) + draw)
        drawn = [generator.permutation(np.flatnonzero(labels == name)) for name in classes]
        train = np.concatenate([cells[:shots] for cells in drawn])
        test = np.concatenate([cells[shots:] for cells in drawn])
        yield Fold(draw, train, test)


def split_groups(groups: pd.Series, most_folds: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Training and test cells of each fold, without cells of no group; none for a single group."""
    known = np.flatnonzero(groups.notna().to_numpy())
    names = text_values(groups.iloc[known]).astype(str)
    n_groups = len(np.unique(names))
    if n_groups < 2:
        return
    splitter = GroupKFold(min(n_groups, most_folds))
    for train, test in splitter.split(known, groups=names):
        yield known[train], known[test]
