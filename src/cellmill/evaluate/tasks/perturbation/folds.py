"""Folds of units: groups to fit on and groups to test.

If the model saw cells of some groups only, the others are tested, once. If it saw none, all groups
are tested in turn; if it saw all, none is tested. A split file has its own rule. Only folds of
perturbations have several repetitions: the others test each group once.
"""

from collections.abc import Iterator

import numpy as np
from sklearn.model_selection import GroupKFold, KFold

from cellmill.evaluate.splits import Fold
from cellmill.evaluate.tasks.perturbation.doses import MIN_DOSES, leave_out_doses
from cellmill.evaluate.tasks.perturbation.split_file import TEST, TRAIN
from cellmill.evaluate.tasks.perturbation.units import DOSE, PERTURBATION, PerturbedUnits


def divide_by_novelty(units: PerturbedUnits) -> dict[str, list[Fold]]:
    """Folds by the novelty of the units that they test, in words, such as `new donor`. Only a split
    file has several. Empty if nothing can be tested.
    """
    if units.split_file is None:
        folds = [*make_folds(units)]
        return {f"new {units.held_out}": folds} if folds else {}
    train = np.flatnonzero(units.split_of_unit == TRAIN)
    test = np.flatnonzero((units.split_of_unit == TEST) & units.is_testable)
    by_novelty = units.split_file.divide_by_novelty(
        test, train, units.perturbation, units.unit_context
    )
    return {novelty: [Fold(0, train, tested)] for novelty, tested in by_novelty.items()}


def make_folds(units: PerturbedUnits) -> Iterator[Fold]:
    """Folds by what the model saw and by what is held out. Empty if the model saw cells of all groups,
    if there are fewer than two groups, or for doses if no compound has MIN_DOSES of them.
    """
    if len(np.unique(units.group_of_unit)) < 2 or not units.is_testable.any():
        return
    if not units.is_testable.all():
        yield _test_the_rest(units)
    elif units.held_out == DOSE:
        yield from _divide_doses(units)
    elif units.held_out == PERTURBATION:
        yield from _divide_perturbations(units)
    else:
        yield from _divide_contexts(units)


def _test_the_rest(units: PerturbedUnits) -> Fold:
    """The one fold that tests the groups of which the model saw no cell.

    Baselines are fitted on the groups that the model was trained on, not on groups that only
    validated it. They are fitted on all other groups if the model was trained on none.
    """
    fitted = ~units.is_testable & units.in_trained_group
    if not fitted.any():
        fitted = ~units.is_testable
    return Fold(0, np.flatnonzero(fitted), np.flatnonzero(units.is_testable))


def _divide_doses(units: PerturbedUnits) -> Iterator[Fold]:
    """One repetition, whose first fold tests the lowest dose of each compound, the next one the next."""
    for tested in leave_out_doses(units.perturbation, units.log_dose):
        yield Fold(0, np.setdiff1d(np.arange(units.n_units), tested), tested)


def _divide_perturbations(units: PerturbedUnits) -> Iterator[Fold]:
    """A repetition for each of `seeds`, whose folds test perturbations in shuffled order."""
    groups = np.unique(units.group_of_unit)
    options = units.context.options
    n_folds = min(options.folds, len(groups))
    for repetition in range(units.config.seeds):
        splitter = KFold(n_folds, shuffle=True, random_state=options.seed + repetition)
        for _, test in splitter.split(groups):
            is_tested = np.isin(units.group_of_unit, groups[test])
            yield Fold(repetition, np.flatnonzero(~is_tested), np.flatnonzero(is_tested))


def _divide_contexts(units: PerturbedUnits) -> Iterator[Fold]:
    """One repetition, whose folds test a context or several, at most `most_folds`."""
    n_folds = min(len(np.unique(units.group_of_unit)), units.config.most_folds)
    splitter = GroupKFold(n_folds)
    for fitted, tested in splitter.split(units.group_of_unit, groups=units.group_of_unit):
        yield Fold(0, fitted, tested)


def explain_no_folds(units: PerturbedUnits) -> str:
    """Why there are no folds, if there are none."""
    n_groups = len(np.unique(units.group_of_unit))
    lacks_doses = units.config.doses == "column" and "dose" not in units.context.roles
    enough = f"{units.config.min_cells} cells or more (min_cells)"
    reason = f"expected two or more values of {units.held_out} with {enough}, got {n_groups}"
    if n_groups and (units.split_file is not None or not units.is_testable.any()):
        reason = (
            "the model saw cells of every group; hold some out (shard.split_by), or use cells: all"
        )
    elif units.held_out == DOSE and lacks_doses:
        reason = "the dataset has no dose column"
    elif n_groups > 1 and units.held_out == DOSE:
        reason = f"no compound has {MIN_DOSES} doses of {enough}"
    return f"held out {units.held_out}: {reason}"
