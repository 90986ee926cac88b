"""predict_changes: predicted expression under perturbations that were held out, beside the measured one.

The predictions are those that task `perturbation` scores: of the same folds (the first of its repetitions), by the same
methods, fitted to none of the tested cells. A file holds changes and cells (`evaluate.changes_file`); packages that
compare predicted cells with measured ones make cells of them, each in its own rule (workflow/rules/bridges.smk).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cellmill.config.evaluate import Evaluate, PerturbationConfig
from cellmill.config.options import EvaluateOptions
from cellmill.data.dataset_file import local_input
from cellmill.data.h5_file import check_h5ad
from cellmill.data.manifest import Manifest
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.changes_file import PredictedChanges, write_changes
from cellmill.evaluate.evaluated_datasets import DatasetFiles, EvaluatedDatasets
from cellmill.evaluate.held_out_units import Units, find_units, folds_of, predictions, scored_units, strata_of
from cellmill.evaluate.perturbed import Profiles, read_profiles, without_changes
from cellmill.evaluate.score_table import is_own
from cellmill.evaluate.scored_cells import TrainedCells, load_evaluated, scored_cells
from cellmill.evaluate.task import Context, supervised_name
from cellmill.files import sha256_file

HELD_OUT = "perturbation"


def run(
    *,
    options: EvaluateOptions,
    model: Path,
    manifest: Path,
    cells: Path | str,
    embedding: Path,
    out: Path,
    ancestors: Sequence[Path] = (),
) -> None:
    """Write predicted changes and measured cells of one dataset to `out` (.h5ad).

    `cells` may be a URL. `ancestors` are manifests of the runs that the initial weights came from.
    """
    check_h5ad(out, "--out")
    section, path = options.evaluate, local_input(cells)
    config = _task(section)
    shards = Manifest.read(manifest)
    evaluated = load_evaluated(model, manifest, shards, section.seed)
    digest, name = sha256_file(model / "model.safetensors"), path.stem
    trained = TrainedCells([shards, *map(Manifest.read, ancestors)], [name])
    opened = EvaluatedDatasets({name: DatasetFiles(path, embedding, [])}, digest, evaluated.network.vector_width)
    with opened.open(name) as dataset:
        unseen, _ = trained.unseen(name, dataset.reader)
        scored = scored_cells(dataset.reader, unseen, section) & np.isfinite(dataset.vectors).all(axis=1)
        context = Context(name, dataset.reader, scored, dataset.vectors, dataset.roles, evaluated, section)
        profiles, changes = predict(context, config)
        made = write_changes(out, context, profiles, changes, digest)
    n = made.obs["group"].value_counts()
    print(
        f"{name}: {len(changes.names):,} held-out perturbations, {n['measured']:,} measured cells and "
        f"{n['measured control']:,} controls, {n['start control']:,} controls to start from, {made.n_vars:,} genes, by "
        f"{', '.join(changes.by_method)} -> {out}"
    )


def predict(context: Context, config: PerturbationConfig) -> tuple[Profiles, PredictedChanges]:
    """Profiles of the dataset, and the predicted changes of each perturbation that is tested.

    Raises DataError for a dataset without perturbations that can be held out.
    """
    if (reason := without_changes(context)) is not None:
        raise DataError(f"{context.dataset}: {reason}; name them in the table of datasets")
    profiles = read_profiles(context, strata_of(HELD_OUT))
    if profiles.stratum.max() < 0:
        raise DataError(f"{context.dataset}: no batch or donor has enough controls")
    units = find_units(context, profiles, HELD_OUT, config.min_cells)
    folds = [fold for fold in folds_of(context, config, units, HELD_OUT) if fold[0] == 0]
    if not folds:
        raise DataError(
            f"{context.dataset}: expected two perturbations of {config.min_cells} cells, and one that the model saw no "
            f"cell of, got {len(units)} and {int(units.unseen.sum())}; set shard.split_by: perturbation, or "
            "evaluate.cells: all"
        )
    tested = np.sort(np.concatenate([test for _, _, test in folds]))
    changes: dict[str, np.ndarray] = {}
    for _, test, predicted in predictions(context, profiles, units, folds, HELD_OUT):
        for method, values in predicted.items():
            name = supervised_name(method, context.supervised) if is_own(method) else method
            of_method = changes.setdefault(name, np.full((len(tested), values.shape[1]), np.nan))
            of_method[np.searchsorted(tested, test)] = values
    place = np.full(len(units) + 1, -1, np.int64)  # the last is that of cells without a unit
    place[tested] = np.arange(len(tested))
    return profiles, PredictedChanges(
        _names(profiles, units, tested), changes, place[scored_units(context, units)], len(folds)
    )


def _names(profiles: Profiles, units: Units, tested: np.ndarray) -> list[str]:
    """Name of each tested unit: its perturbation, and behind it the dose where the dataset has doses."""
    doses = dict(zip(units.of_cell.tolist(), profiles.dose.tolist()))
    return [" | ".join(filter(None, (str(units.perturbation[unit]), doses[unit]))) for unit in tested.tolist()]


def _task(section: Evaluate) -> PerturbationConfig:
    """Options of task perturbation, which say what is held out."""
    config = section.tasks.get("perturbation")
    if not isinstance(config, PerturbationConfig):
        raise ConfigError("evaluate.tasks: no task perturbation, whose predictions these are; add perturbation: {}")
    if HELD_OUT not in config.held_out:
        raise ConfigError("evaluate.tasks.perturbation.held_out: expected perturbation among them; add it")
    return config
