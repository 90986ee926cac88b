"""Units that perturbation tasks hold out, their folds, and the predicted changes of the tested ones.

All predictions are fitted on the other units: of a tested one the gene, the context and the strata of its cells are
read, and no expression. Task `perturbation` scores them, stage `predict_changes` writes them.

Legend: U units, G genes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from sklearn.model_selection import GroupKFold, KFold

from cellmill.config.evaluate import PerturbationConfig
from cellmill.data.perturbed_genes import perturbed_genes
from cellmill.data.text_columns import text_values
from cellmill.evaluate.change_baselines import Prediction, of_new_contexts, of_new_perturbations
from cellmill.evaluate.gene_features import features_of, gene_features
from cellmill.evaluate.perturbed import Profiles
from cellmill.evaluate.responses import predicted_changes
from cellmill.evaluate.score_table import EMBEDDING
from cellmill.evaluate.task import Context

RESPONSE = f"{EMBEDDING} + response head"
UNSEEN_FRAC = 0.9
"""Share of the cells of a perturbation that are scored where it counts as not seen in training; others may be equal to
training cells, or have no gene of the model."""
STRATA = ("batch", "donor")
Fold = tuple[int, np.ndarray, np.ndarray]  # repetition, training units, test units


@dataclass(frozen=True)
class Units:
    """Unit of prediction: a perturbation, its dose, and its context if contexts are held out."""

    of_cell: np.ndarray  # (cells,) int64; -1 for controls, and for units with too few cells
    perturbation: np.ndarray  # (units,) text
    group: np.ndarray  # (units,) text: what is held out whole, the perturbation or the context
    unseen: np.ndarray  # (units,) bool: of a group that the model saw no cell of
    left_out: list[str]

    def __len__(self) -> int:
        return len(self.group)


def strata_of(held_out: str) -> tuple[str, ...]:
    """Roles whose values have controls of their own where `held_out` is left out."""
    return STRATA if held_out in (*STRATA, "perturbation") else (*STRATA, held_out)


def find_units(context: Context, profiles: Profiles, held_out: str, min_cells: int) -> Units:
    """Units of at least `min_cells` cells; of units that may be tested, of scored cells."""
    text = profiles.perturbation
    values = text if held_out == "perturbation" else text_values(context.roles[held_out]).astype(str)
    missing = (text == "") | (profiles.stratum < 0)
    if held_out != "perturbation":
        missing |= context.roles[held_out].isna().to_numpy()
    groups, group = np.unique(np.where(missing, "", values), return_inverse=True)
    n_scored, n_cells = (np.bincount(group[among], minlength=len(groups)) for among in (context.scored, slice(None)))
    unseen_group = n_scored >= UNSEEN_FRAC * n_cells
    names = np.array([" | ".join(parts) for parts in zip(text, profiles.dose, values)])
    labels, first, number = np.unique(names, return_index=True, return_inverse=True)
    unseen = unseen_group[group[first]]
    counted = ~missing & (context.scored | ~unseen[number])
    enough = np.bincount(number[counted], minlength=len(labels)) >= min_cells
    is_unit = np.bincount(number[~missing], minlength=len(labels)) > 0
    kept = np.flatnonzero(enough & is_unit)
    place = np.full(len(labels), -1, np.int64)
    place[kept] = np.arange(len(kept))
    left_out = sorted({str(text[first[at]]) for at in np.flatnonzero(is_unit & ~enough)})
    return Units(
        np.where(missing, -1, place[number]), text[first[kept]], values[first[kept]], unseen[kept], left_out
    )  # fmt: skip


def folds_of(context: Context, config: PerturbationConfig, units: Units, held_out: str) -> Iterator[Fold]:
    """Units to fit on and to test; none where the model saw cells of all groups, or groups are too few."""
    groups, unseen = np.unique(units.group), np.unique(units.group[units.unseen])
    every = np.arange(len(units))
    if len(groups) < 2 or not len(unseen):
        return
    if len(unseen) < len(groups):
        yield 0, every[~units.unseen], every[units.unseen]
    elif held_out == "perturbation":
        for repetition in range(config.seeds):
            shuffled = KFold(
                min(context.options.folds, len(groups)),
                shuffle=True,
                random_state=context.options.seed + repetition,
            )
            for _, test in shuffled.split(groups):
                tested = np.isin(units.group, groups[test])
                yield repetition, every[~tested], every[tested]
    else:
        for train, test in GroupKFold(min(len(groups), config.most_folds)).split(every, groups=units.group):
            yield 0, train, test


def predictions(
    context: Context, profiles: Profiles, units: Units, folds: list[Fold], held_out: str
) -> Iterator[tuple[int, np.ndarray, Prediction]]:
    """Repetition, test units and their predicted changes by method, `(test units, G)`, of each fold."""
    given = profiles.control_means(0)
    known = profiles.changes(units.of_cell, len(units), given)
    genes = genes_of(context, units.perturbation)
    features = {}
    if held_out == "perturbation":
        features = {name: features_of(genes, values) for name, values in gene_features(context.model).items()}
    states = profiles.controls_of(units.of_cell, len(units), given)
    shares = np.nan_to_num(profiles.strata_of(scored_units(context, units), len(units)))
    responses = predicted_changes(context, profiles, shares, units.perturbation.tolist(), genes)
    for repetition, train, test in folds:
        if held_out == "perturbation":
            predicted = of_new_perturbations(known, train, test, features)
        else:
            predicted = of_new_contexts(known, train, test, units.perturbation, states)
        if responses is not None:
            predicted[RESPONSE] = responses[test]
        yield repetition, test, predicted


def scored_units(context: Context, units: Units) -> np.ndarray:
    """(cells,) int64: unit of each scored cell, from which changes are measured; -1 of other cells."""
    return np.where(context.scored, units.of_cell, -1)


def genes_of(context: Context, perturbation: np.ndarray) -> list[list[int]]:
    """Rows of the vocabulary of each unit's perturbed genes."""
    rows = perturbed_genes(sorted(set(perturbation)), context.model.vocabulary)
    return [rows[name] for name in perturbation]
