"""The file that stage `predict_changes` writes: predictions of task `perturbation`, and measured cells.
It is one .h5ad, for metrics of other packages.

X       log(1 + counts per 10,000) over the model's genes that the dataset has, CSR float32
obs     a row for each control in a stratum with enough controls, and for each scored cell of a
        held-out perturbation
        `group`: `start control` (controls that predictions start from), `measured control` (the other
        half of the controls), or `measured` (cells of held-out perturbations)
        `perturbation`: one of `perturbations` below, or the name of the control
        `stratum`: number of the cell's stratum (see `profiles.py`)
var     Ensembl ids, and `symbol`
uns["cellmill_changes"]
        `perturbations`: names, each followed by ` | ` and the dose, and by ` | ` and the context, if there
        are any
        `methods` and `kinds`: names and kinds of the methods
        `changes`: predicted changes, float32 (methods, perturbations, genes)
        `control`, `seed`, `model_digest`, `n_folds`

A predicted profile is a predicted change plus the mean of the start controls. This mean is weighted by
the strata of the measured cells.

Legend: U units (see `profiles.py`), G genes.
"""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd

from cellmill.config.corpus import IS_CONTROL
from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.data.inputs.h5 import create_h5, write_anndata
from cellmill.errors import DataError
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.perturbation.baselines import ChangesByMethod
from cellmill.evaluate.tasks.perturbation.folds import divide_by_novelty
from cellmill.evaluate.tasks.perturbation.predictions import ChangePredictor
from cellmill.evaluate.tasks.perturbation.probes import choose_best_methods, make_probes
from cellmill.evaluate.tasks.perturbation.profiles import controlled_role, require_changes
from cellmill.evaluate.tasks.perturbation.scoring import score_predictions
from cellmill.evaluate.tasks.perturbation.split_file import SplitFile
from cellmill.evaluate.tasks.perturbation.units import PERTURBATION, PerturbedUnits

ABOUT_CHANGES = "cellmill_changes"  # key in uns
# Values of obs column `group`. The group of controls is at the index of their half, which is
# START_HALF (0) or REFERENCE_HALF (1).
CELL_GROUPS = ["start control", "measured control", "measured"]


def write_changes(
    path: Path, context: Context, config: PerturbationConfig, model_digest: str
) -> ad.AnnData:
    """Write the file of stage `predict_changes`, and return its content. Raises DataError if nothing
    can be held out.
    """
    units, folds = _hold_out(context, config)
    tested = np.sort(np.concatenate([fold.tested for fold in folds]))
    changes = _predict_changes(units, folds, tested)

    # names of the tested units and of the control, and the cells that are written
    names = [units.unit_names[unit] for unit in tested.tolist()]
    is_control = context.roles[IS_CONTROL].fillna(False).to_numpy(bool)
    control = str(context.roles[controlled_role(context.roles)][is_control].iloc[0])
    obs = _describe_cells(units, tested, [*names, control])
    cells = np.flatnonzero(obs["group"].notna())

    # methods, with a note if the model was trained with labels
    methods = []
    for method in changes:
        if method.network == "trained":
            method = replace(method, supervised=context.supervision_note or "")
        methods.append(method)
    about = {
        "perturbations": np.array(names, object),
        "methods": np.array([method.name for method in methods], object),
        "kinds": np.array([method.kind for method in methods], object),
        "changes": np.stack([*changes.values()]).astype(np.float32),
        "control": control,
        "seed": context.options.seed,
        "model_digest": model_digest,
        "n_folds": len(folds),
    }
    var = units.profiles.describe_genes(context.model.vocabulary)
    expression = units.profiles.expression[cells]
    adata = ad.AnnData(expression, obs.iloc[cells], var, uns={ABOUT_CHANGES: about})
    with create_h5(path) as file:
        write_anndata(file, adata)
    return adata


def _hold_out(context: Context, config: PerturbationConfig) -> tuple[PerturbedUnits, list[Fold]]:
    """The perturbed units, and the folds of the first repetition. Raises DataError if the dataset has no
    changes of expression, or if no perturbation can be tested.
    """
    try:
        require_changes(context)
        split_file = None if config.split_file is None else SplitFile.read(config, context)
        units = PerturbedUnits.read(context, config, PERTURBATION, split_file)
    except Skipped as reason:
        raise DataError(
            f"{context.dataset}: {reason}; expected perturbations, and controls in each batch or donor (columns of the "
            "table of datasets)"
        ) from None
    every_fold = chain.from_iterable(divide_by_novelty(units).values())
    folds = [fold for fold in every_fold if fold.repetition == 0]
    if not folds:
        n_perturbations = len(np.unique(units.perturbation))
        n_testable = len(np.unique(units.perturbation[units.is_testable]))
        raise DataError(
            f"{context.dataset}: expected two perturbations of {config.min_cells} cells, and one that the model saw no "
            f"cell of, got {n_perturbations} and {n_testable}; set shard.split_by: perturbation, or evaluate.cells: all"
        )
    return units, folds


def _predict_changes(
    units: PerturbedUnits, folds: list[Fold], tested: np.ndarray
) -> ChangesByMethod:
    """Predicted changes of the tested units, (tested units, G) by method, by the model, by baselines and
    by the probes of the best methods. `tested` are all units that `folds` test, ascending.
    """
    predictions = [*ChangePredictor(units).predict(folds)]
    changes = _collect_changes(folds, predictions, tested)
    scores = score_predictions(units, folds, predictions)
    pearson = {method: scores["Pearson"][method] for method in changes}
    noise = units.config.probe_noise
    seed = units.context.options.seed
    for method in choose_best_methods(pearson):
        changes |= make_probes(method, changes[method], tested, noise, seed)
    return changes


def _collect_changes(
    folds: list[Fold], predictions: list[ChangesByMethod], tested: np.ndarray
) -> ChangesByMethod:
    """The predictions of all folds as one array for each method, (tested units, G). Methods that do not
    predict every tested unit are left out.
    """
    changes: ChangesByMethod = {}
    for fold, by_method in zip(folds, predictions):
        rows = np.searchsorted(tested, fold.tested)
        for method, values in by_method.items():
            if method not in changes:
                changes[method] = np.full((len(tested), values.shape[1]), np.nan)
            changes[method][rows] = values
    return {method: values for method, values in changes.items() if np.isfinite(values).all()}


def _describe_cells(units: PerturbedUnits, tested: np.ndarray, names: list[str]) -> pd.DataFrame:
    """obs of all cells. The `group` of cells that are not written is missing.

    `names` are the names of the tested units, followed by the name of the control.
    """
    profiles = units.profiles
    # position (U + 1,): index of a unit in `tested`, and -1 for a unit that is not tested. The last
    # entry, also -1, is for cells without a unit, because their unit is -1.
    position = np.full(units.n_units + 1, -1, np.int64)
    position[tested] = np.arange(len(tested))
    position_of_cell = position[units.scored_unit_of_cell]
    # (cells,): index in CELL_GROUPS, and -1 for cells that are not written
    group = np.where(profiles.stratum >= 0, profiles.half, -1)
    group = np.where(position_of_cell >= 0, CELL_GROUPS.index("measured"), group)
    return pd.DataFrame(
        {
            "group": pd.Categorical.from_codes(group, CELL_GROUPS),
            # the position of controls is -1, which is the index of the last name
            "perturbation": pd.Categorical(np.array(names, object)[position_of_cell]),
            "stratum": profiles.stratum,
        },
        index=units.context.reader.obs_names,
    )
