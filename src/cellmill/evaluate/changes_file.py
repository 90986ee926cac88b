"""Predicted changes of held-out perturbations and measured cells in one .h5ad file, for metrics of other packages.

X       log(1 + counts per 10,000) over the model's genes that the dataset has, CSR float32
obs     `group`: `start control` (the half of the controls that predictions start from), `measured control` (the other
        half) or `measured` (a scored cell of a held-out perturbation); `perturbation`: the control's name, or one of
        those below; `stratum`: number of the batch of a donor that has controls of its own
var     Ensembl ids, and `symbol`
uns["cellmill_changes"]
        perturbations, with the dose behind ` | ` where there is one; methods and kinds (model or baseline);
        changes, float32 (methods, perturbations, genes); control; seed; model_digest; n_folds

A predicted profile is the mean of the start controls, weighted by the strata of the measured cells, and the change.

Legend: U units (a perturbation and its dose), G genes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd

from cellmill.config.corpus import IS_CONTROL
from cellmill.data.counts_writer import write_anndata
from cellmill.data.h5_file import create_h5
from cellmill.evaluate.perturbed import Profiles, controlled_role
from cellmill.evaluate.score_table import kind_of
from cellmill.evaluate.task import Context

ABOUT = "cellmill_changes"  # key in uns
GROUPS = ("start control", "measured control", "measured")


@dataclass(frozen=True)
class PredictedChanges:
    """Of the tested units of one dataset."""

    names: list[str]  # (U,)
    by_method: Mapping[str, np.ndarray]  # (U, G) float64
    unit: np.ndarray  # (cells,) int64: tested unit of a cell that changes are measured from; -1 of other cells
    n_folds: int


def write_changes(
    path: Path, context: Context, profiles: Profiles, changes: PredictedChanges, model_digest: str
) -> ad.AnnData:
    """Write the file and return its content. Atomic; OSError names `path`."""
    group = np.where(changes.unit >= 0, 2, np.where(profiles.stratum >= 0, profiles.half, -1))
    cells = np.flatnonzero(group >= 0)
    column = context.roles[controlled_role(context)]
    control = str(column[context.roles[IS_CONTROL].fillna(False).to_numpy(bool)].iloc[0])
    names = np.array([*changes.names, control], object)  # unit -1 takes the last
    obs = pd.DataFrame(
        {
            "group": pd.Categorical.from_codes(group[cells], list(GROUPS)),
            "perturbation": pd.Categorical(names[changes.unit[cells]]),
            "stratum": profiles.stratum[cells],
        },
        index=context.reader.obs.index[cells],
    )
    vocabulary = context.model.vocabulary
    symbols, ids = ([of[row] for row in profiles.genes] for of in (vocabulary.symbols, vocabulary.gene_ids))
    about = {
        "perturbations": np.array(changes.names, object),
        "methods": np.array([*changes.by_method], object),
        "kinds": np.array([kind_of(name) for name in changes.by_method], object),
        "changes": np.stack([*changes.by_method.values()]).astype(np.float32),
        "control": control,
        "seed": context.options.seed,
        "model_digest": model_digest,
        "n_folds": changes.n_folds,
    }
    made = ad.AnnData(profiles.expression[cells], obs, pd.DataFrame({"symbol": symbols}, index=ids), uns={ABOUT: about})
    with create_h5(path) as file:
        write_anndata(file, made)
    return made
