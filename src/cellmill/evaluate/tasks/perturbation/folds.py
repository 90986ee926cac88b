"""Folds of units: groups to fit on, and groups to test.

A group is what is held out together, such as all units of a donor. The folds depend on what the model
saw in training and validation:

- if the model saw cells of some groups, one fold tests all other groups;
- if the model saw cells of no group, the folds test all groups in turn;
- if the model saw cells of all groups, there are no folds.

Perturbations that are tested in turn are divided anew in each repetition. Groups of other kinds are
tested once. A split file says itself which units are fitted on, and which are tested.
"""

from collections.abc import Iterator

import numpy as np
from sklearn.model_selection import GroupKFold, KFold

from cellmill.evaluate.splits import Fold
from cellmill.evaluate.tasks.perturbation.doses import MIN_DOSES, leave_out_doses
from cellmill.evaluate.tasks.perturbation.split_file import TEST, TRAIN
from cellmill.evaluate.tasks.perturbation.units import DOSE, PERTURBATION, PerturbedUnits


def divide_by_novelty(units: PerturbedUnits) -> dict[str, list[Fold]]:
    """Folds by novelty, which says in words how the tested units are new, such as `new donor`. Empty if
    no unit can be tested.

    Only a split file has several novelties, with one fold each.
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
    """Folds of the units without a split file. There are none if the model saw cells of all groups, if
    there are fewer than two groups, or if doses are held out and no compound has MIN_DOSES doses.
    """
    if len(np.unique(units.group_of_unit)) < 2 or not units.is_testable.any():
        return
    if not units.is_testable.all():
        yield _test_unseen_groups(units)
    elif units.held_out == DOSE:
        yield from _divide_doses(units)
    elif units.held_out == PERTURBATION:
        yield from _divide_perturbations(units)
    else:
        yield from _divide_contexts(units)


def _test_unseen_groups(units: PerturbedUnits) -> Fold:
    """The one fold that tests all groups of which the model saw no cell.

    Baselines are fitted on the groups that the model was trained on, but not on groups that only
    validated the model. If the model was trained on no group, baselines are fitted on all groups that
    are not tested.
    """
    fitted = ~units.is_testable & units.in_trained_group
    if not fitted.any():
        fitted = ~units.is_testable
    return Fold(0, np.flatnonzero(fitted), np.flatnonzero(units.is_testable))


def _divide_doses(units: PerturbedUnits) -> Iterator[Fold]:
    """Folds of one repetition. The first fold tests the lowest dose of each compound, and each further
    fold tests the next higher dose.
    """
    for tested in leave_out_doses(units.perturbation, units.log_dose):
        yield Fold(0, np.setdiff1d(np.arange(units.n_units), tested), tested)


def _divide_perturbations(units: PerturbedUnits) -> Iterator[Fold]:
    """Folds of `seeds` repetitions. The folds of a repetition divide the shuffled perturbations."""
    groups = np.unique(units.group_of_unit)
    options = units.context.options
    n_folds = min(options.folds, len(groups))
    for repetition in range(units.config.seeds):
        splitter = KFold(n_folds, shuffle=True, random_state=options.seed + repetition)
        for _, test in splitter.split(groups):
            is_tested = np.isin(units.group_of_unit, groups[test])
            yield Fold(repetition, np.flatnonzero(~is_tested), np.flatnonzero(is_tested))


def _divide_contexts(units: PerturbedUnits) -> Iterator[Fold]:
    """Folds of one repetition, at most `most_folds`. A fold tests one context, or several if there are
    more contexts than folds.
    """
    n_folds = min(len(np.unique(units.group_of_unit)), units.config.most_folds)
    splitter = GroupKFold(n_folds)
    for fitted, tested in splitter.split(units.group_of_unit, groups=units.group_of_unit):
        yield Fold(0, fitted, tested)


def explain_no_folds(units: PerturbedUnits) -> str:
    """The reason for which `divide_by_novelty` returned no folds, as a message."""
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
