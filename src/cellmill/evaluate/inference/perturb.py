"""Predicted response of the control cells of a file to perturbations, by a model with objective
perturbation_response.

A response is the change that task `perturbation` scores as row `response head`: the mean over
controls of the expected log(1 + counts per 10,000) with minus without the perturbation, in each
stratum (a batch of a donor), weighted by strata. Half of the controls of a stratum, at most
128, are predicted from. If the file has perturbed cells too, their change is measured from the
other half, and compared with the prediction.

Legend: U units (a perturbation, and a value of option `by`), G genes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd

from cellmill.config.corpus import IS_CONTROL
from cellmill.config.evaluate import Evaluate
from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.config.run import Embed
from cellmill.config.section import shown
from cellmill.data.arrays import text_values
from cellmill.data.genes.names import SEPARATOR, match_columns, organisms_of, perturbed_genes
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.prepare.perturbations import TargetNames, merge_names
from cellmill.data.prepare.qc_lines import list_first
from cellmill.errors import ConfigError, DataError, did_you_mean
from cellmill.evaluate.inference.embed import describe_limits, embed_cells
from cellmill.evaluate.inference.label_counts import MAX_NAMES
from cellmill.evaluate.methods import ByMethod
from cellmill.evaluate.scores import ScoreColumn
from cellmill.evaluate.seen.seen_cells import Seen, mark_seen_cells
from cellmill.evaluate.tasks.perturbation.baselines import NO_CHANGE
from cellmill.evaluate.tasks.perturbation.doses import NAME
from cellmill.evaluate.tasks.perturbation.held_out import STRATA
from cellmill.evaluate.tasks.perturbation.profiles import (
    MEASURED,
    MIN_CONTROLS,
    START,
    Profiles,
    read_profiles,
)
from cellmill.evaluate.tasks.perturbation.response import ResponseHead
from cellmill.evaluate.tasks.perturbation.task import METRICS, average_perturbations, change_scores
from cellmill.models.family import Model
from cellmill.runs.results import ScoredMethod

ABOUT_RESPONSE = "cellmill_response"  # uns
TASK = PerturbationConfig.model_validate({})
SHOWN = ("Pearson", "MAE")  # metrics of the printed comparison
RESPONSE = ScoredMethod("the response")
OTHERS_MEAN = ScoredMethod("the mean of other perturbations")
_OWN_COLUMNS = ("perturbation", "trained", "n_cells")  # of the output's obs


class Wanted(NamedTuple):
    """What to predict; fields are arguments of `cellmill perturb`."""

    perturbations: Sequence[str] | None = None  # None for all that the model was trained on
    # None for the model's; all cells are controls without it
    perturbation_column: str | None = None
    control: str | None = None  # None for the model's
    by: str | None = None  # obs column


class Units(NamedTuple):
    """Perturbations to predict, each with a value of option `by`, or with an empty one."""

    names: list[str]
    values: list[str]
    genes: list[list[int]]  # vocabulary rows of the perturbed genes
    trained: np.ndarray  # (U,) bool


def predict_file(
    reader: CountsReader,
    loaded: tuple[Model, Vocabulary, Tokens, dict[str, Any]],
    folder: Path,
    wanted: Wanted,
    section: Embed,
) -> tuple[ad.AnnData, list[str]]:
    """Responses to the `wanted` perturbations, and lines on what limits their use.

    `loaded` is the model in `folder` (`load_for_inference`). The result has a row per unit and a
    column per gene: X, float32, is the change; layers `control` (mean of the controls),
    `expression` (their sum, at least 0) and, if cells of the file were measured, `measured` (NaN
    for other units). Raises ConfigError for a model without responses, or an unknown perturbation;
    DataError as `embed_cells`, and for a file without counts or with too few controls.
    """
    network, vocabulary, tokens, config = loaded
    _check_words(wanted)
    head = ResponseHead.find(network, section.precision)
    if head is None:
        raise ConfigError(
            f"{folder}: it predicts no responses; export a run with objective perturbation_response"
        )
    objective = head.objective
    columns = match_columns(reader, vocabulary)
    if columns.ordered:
        raise DataError(
            f"{reader.path}: its genes are ordered and have no counts; perturb predicts expression from counts"
        )
    own_control = objective.config.control
    column = wanted.perturbation_column or objective.config.perturbation_column
    if wanted.by in (column, *_OWN_COLUMNS):
        raise ConfigError(
            f"--by: expected an obs column other than {column!r} and the output's {', '.join(_OWN_COLUMNS)}, "
            f"got {wanted.by!r}; rename yours"
        )
    roles, lines = _read_roles(reader, vocabulary, column, own_control, wanted)
    strata = [*(name for name in STRATA if name in roles), *(["by"] if wanted.by else [])]
    groups = list(dict.fromkeys(str(roles[name].name) for name in strata))
    seed = Evaluate.model_validate({}).seed
    profiles = read_profiles(reader, columns, roles, strata, seed)
    has_genes = profiles.depth > 0
    is_control = roles[IS_CONTROL].to_numpy()
    if not (is_control & has_genes).any():
        raise DataError(
            f"{reader.path}: none of its {int(is_control.sum()):,} controls has a count on a gene that the model "
            "knows; name other controls (--control)"
        )
    # the model predicts from no cell of other strata
    strata_with_start = np.unique(profiles.stratum[(profiles.half == START) & has_genes])
    has_start = np.isin(profiles.stratum, strata_with_start)
    profiles = replace(profiles, stratum=np.where(has_start, profiles.stratum, -1))
    if profiles.stratum.max() < 0:
        raise DataError(
            f"{reader.path}: expected {2 * MIN_CONTROLS} controls in a group of {' and '.join(groups) or 'cells'}, "
            f"got {int(is_control.sum()):,} controls in all; name other controls (--control)"
        )
    n_left_out = int((is_control & (profiles.stratum < 0)).sum())
    if n_left_out:
        lines.append(
            f"{n_left_out:,} controls are left out: their group of {' and '.join(groups)} has fewer than "
            f"{2 * MIN_CONTROLS}, or none with counts"
        )
    values = text_values(roles["by"]).astype(str) if wanted.by else np.full(reader.n_obs, "")
    trained = objective.trained_levels(network)
    control = wanted.control or own_control
    names = _choose_names(wanted.perturbations, vocabulary, trained, [own_control, control])
    if control in trained:
        lines.append(
            f"warning: the model was trained on the control {control!r} as a perturbation: predicted responses are "
            f"changes from {own_control!r}, measured ones from {control!r}"
        )
    genes = perturbed_genes(names, vocabulary)
    for name in names:
        _check_known(name, genes[name], vocabulary, trained)
    of_values = np.unique(values[is_control & (profiles.stratum >= 0)]).tolist()
    units = Units(
        [name for name in names for _ in of_values],
        len(names) * of_values,
        [genes[name] for name in names for _ in of_values],
        np.repeat(np.isin(names, trained), len(of_values)),
    )

    is_read = np.zeros(reader.n_obs, bool)
    for stratum in range(profiles.stratum.max() + 1):
        is_read[profiles.start_controls(stratum, has_genes)] = True
    embedding = embed_cells(reader, network, vocabulary, tokens, section, is_read)
    vectors = np.full((reader.n_obs, network.vector_width), np.nan, np.float32)
    vectors[is_read] = embedding.vectors
    seen = mark_seen_cells(reader, folder)
    is_scored = has_genes if seen.cells is None else has_genes & ~seen.cells

    # (cells,): unit of each perturbed cell that may be compared, -1 for other cells
    number = {pair: unit for unit, pair in enumerate(zip(units.names, units.values))}
    pairs = zip(profiles.perturbation.tolist(), values.tolist())
    unit_of_cell = np.array([number.get(pair, -1) for pair in pairs])
    unit_of_cell[~is_scored | (profiles.stratum < 0)] = -1
    n_cells = np.bincount(unit_of_cell[unit_of_cell >= 0], minlength=len(units.names))
    is_measured = n_cells >= TASK.min_cells
    shares = _share_strata(profiles, units, unit_of_cell, is_measured, is_control, values)
    changes = head.predict_changes(vectors, profiles, shares, units.names, units.genes)
    measured = profiles.changes(unit_of_cell, len(n_cells), profiles.control_means(MEASURED))
    measured[~is_measured] = np.nan
    scores, sentences = _compare(profiles, units, changes, measured, trained)
    if is_measured.any() and seen.unknown:
        sentences.append(f"the comparison may be on training cells: {seen.unknown}")

    controls = shares @ np.nan_to_num(profiles.control_means(START))
    layers = {"control": controls, "expression": np.maximum(controls + changes, 0)}
    if is_measured.any():
        layers["measured"] = measured
    by = {wanted.by: units.values} if wanted.by else {}
    texts = [" | ".join(filter(None, pair)) for pair in zip(units.names, units.values)]
    obs = pd.DataFrame(
        {"perturbation": units.names, **by, "trained": units.trained, "n_cells": n_cells, **scores},
        index=texts,
    )
    symbols = [vocabulary.symbols[row] for row in profiles.genes]
    var = pd.DataFrame(
        {"symbol": symbols}, index=[vocabulary.gene_ids[row] for row in profiles.genes]
    )
    about = {
        "model_digest": config["weights_sha256"],
        "vocabulary_digest": vocabulary.digest,
        "unit": "change of log(1 + counts per 10,000 of the genes in var)",
        "control": control,
        "strata": groups,
        "n_controls": int(is_read.sum()),
        "seed": seed,
        "comparison": sentences,
    }
    response = ad.AnnData(
        changes.astype(np.float32),
        obs,
        var,
        uns={ABOUT_RESPONSE: about},
        layers={name: values.astype(np.float32) for name, values in layers.items()},
    )
    return response, [*lines, *_describe(units, roles, seen, is_read), *describe_limits(embedding)]


def _check_words(wanted: Wanted) -> None:
    """Raise ConfigError for a value, given in Python or as an empty argument, that is no text."""
    for field in ("perturbation_column", "control", "by"):
        value = getattr(wanted, field)
        if value is not None and not (isinstance(value, str) and value):
            raise ConfigError(f"--{field.replace('_', '-')}: expected a name, got {shown(value)}")


def _read_roles(
    reader: CountsReader,
    vocabulary: Vocabulary,
    column: str,
    own_control: str,
    wanted: Wanted,
) -> tuple[dict[str, pd.Series], list[str]]:
    """obs columns by role, as `Context` has them, with `wanted.by` as role `by`; and lines on them.

    Perturbations have the names that stage preprocess gives them. Raises DataError for a column
    that is missing, or without controls.
    """
    obs = reader.read_obs([*STRATA, "dose", column])
    control = wanted.control or own_control
    roles = {name: obs[name] for name in (*STRATA, "dose") if name in obs}
    if wanted.by is not None:
        roles["by"] = reader.obs_column(wanted.by, "--by")
    if column not in obs and wanted.perturbation_column is None and wanted.control is None:
        roles["perturbation"] = pd.Series(np.full(len(obs), control), obs.index)
        roles[IS_CONTROL] = pd.Series(np.ones(len(obs), bool), obs.index)
        return roles, [
            f"warning: it has no obs column {column!r}: all cells are taken as controls; name the column of "
            "perturbations (--perturbation-column) if some are perturbed"
        ]
    texts = text_values(reader.obs_column(column, "--perturbation-column")).astype(str)
    organism = next(iter(organisms_of(vocabulary)), None)
    merged = merge_names({*texts.tolist()}, [control], TargetNames.read(reader, organism)).names
    names = np.array([merged[text] for text in texts.tolist()], object)
    is_control = names == control
    if not is_control.any():
        values = list_first([name for name in sorted({*merged}) if name], MAX_NAMES) or "no value"
        raise DataError(
            f"{reader.path}: expected controls named {control!r} in obs column {column!r}, got {values}; name the "
            "control (--control)"
        )
    roles["perturbation"] = pd.Series(names, obs.index)
    roles[IS_CONTROL] = pd.Series(is_control, obs.index)
    return roles, []


def _choose_names(
    given: Sequence[str] | None,
    vocabulary: Vocabulary,
    trained: Sequence[str],
    controls: Sequence[str],  # the model's and the file's
) -> list[str]:
    """Names of the perturbations to predict, as stage preprocess writes them, each once."""
    if given is None:
        return [name for name in trained if name not in controls]
    organism = next(iter(organisms_of(vocabulary)), None)
    targets = TargetNames([*vocabulary.symbols, *vocabulary.gene_ids], organism)
    given = [given] if isinstance(given, str) else list(given)
    for name in given:
        if not isinstance(name, str):
            raise ConfigError(f"perturbations: expected names, got {shown(name)}")
    given = [name if name in trained else name.strip() for name in given]
    if not all(given):
        raise ConfigError("perturbations: expected names, got an empty one; leave it out")
    merged = merge_names(given, controls[:1], targets).names
    names = [name if name in trained else merged[name] for name in given]
    for text, name in zip(given, names):
        if name in controls:
            raise ConfigError(
                f"perturbations: {text!r} is the control, which has no response; leave it out"
            )
    if not names:
        raise ConfigError("perturbations: expected names, got none")
    return list(dict.fromkeys(names))


def _check_known(
    name: str, genes: list[int], vocabulary: Vocabulary, trained: Sequence[str]
) -> None:
    """Raise ConfigError for a perturbation that was not trained on, and whose `genes` are not all
    known: its response would be that of any perturbation.
    """
    parts = [part.strip() for part in name.split(SEPARATOR)]
    if name in trained or len(genes) == len(parts):
        return
    with_dose = NAME.fullmatch(name)
    compound = with_dose["compound"] if with_dose else name
    doses = []
    for level in trained:
        match = NAME.fullmatch(level)
        if level == compound or (match is not None and match["compound"] == compound):
            doses.append(level)
    if doses:
        raise ConfigError(
            f"perturbations: {name!r}: the model was trained on {list_first(doses, MAX_NAMES)} and predicts no other "
            "dose; name one of them"
        )
    unknown = [part for part in parts if not perturbed_genes([part], vocabulary)[part]]
    hint = did_you_mean(unknown[0], [*trained, *vocabulary.symbols])
    if unknown[0] in trained:  # by a vector of its own
        hint = f"name {unknown[0]} without other genes, on which it was trained"
    raise ConfigError(
        f"perturbations: the model was not trained on {name!r} and has no gene {', '.join(unknown)}, so it cannot "
        f"tell it from others; {hint}"
    )


def _share_strata(
    profiles: Profiles,
    units: Units,
    unit_of_cell: np.ndarray,
    is_measured: np.ndarray,
    is_control: np.ndarray,
    values: np.ndarray,
) -> np.ndarray:
    """(U, strata) float64: share of each stratum in the measured cells of a unit, or else in the controls
    with its value of `by`.
    """
    names = sorted({*units.values})
    value_of_cell = np.where(
        is_control, np.searchsorted(names, values).clip(max=len(names) - 1), -1
    )
    value_of_cell[~np.isin(values, names)] = -1
    of_controls = profiles.stratum_shares(value_of_cell, len(names))
    of_cells = profiles.stratum_shares(unit_of_cell, len(units.names))
    of_units = of_controls[np.searchsorted(names, units.values)]
    return np.where(is_measured[:, None], of_cells, of_units)


def _compare(
    profiles: Profiles,
    units: Units,
    changes: np.ndarray,
    measured: np.ndarray,
    trained: Sequence[str],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """obs columns with the scores of each unit, and sentences on the response against the mean of other
    perturbations, and no change; both empty without measured units.

    Scores are as in task perturbation. The mean is over the file's perturbations that the model was
    `trained` on, or over all but the unit's own. Units whose perturbation was trained on, by other
    cells, are compared separately.
    """
    is_measured = np.isfinite(measured).all(1)
    columns: dict[str, np.ndarray] = {}
    sentences = []
    names = np.array(units.names)
    in_file, known_changes = _measure_perturbations(profiles)
    is_known_to_model = np.isin(in_file, trained)
    perturbed = np.array([np.isin(profiles.genes, rows) for rows in units.genes])
    for is_trained in (False, True):
        chosen = np.flatnonzero(is_measured & (units.trained == is_trained))
        if not len(chosen):
            continue
        predictions = {RESPONSE: changes[chosen], NO_CHANGE: np.zeros_like(changes[chosen])}
        others = [in_file != names[unit] for unit in chosen]
        if not is_trained and is_known_to_model.any():
            others = len(chosen) * [is_known_to_model]
        if all(other.any() for other in others):
            predictions[OTHERS_MEAN] = np.array([known_changes[other].mean(0) for other in others])
        by_metric: dict[str, ByMethod] = {metric: {} for metric in METRICS}
        for method, predicted in predictions.items():
            scores = change_scores(predicted, measured[chosen], perturbed[chosen], TASK.top_genes)
            for metric, by_unit in scores.items():
                if not np.isfinite(by_unit).any():
                    continue
                key = f"{metric}, {method.name}"
                columns.setdefault(key, np.full(len(names), np.nan))[chosen] = by_unit
                by_metric[metric][method] = average_perturbations(by_unit[None], names[chosen])
        n = len({*names[chosen]})
        training = "also trained on, by other cells" if is_trained else "not trained on"
        heading = f"{n:,} measured perturbations that the model was {training}"
        for metric in SHOWN:
            sentences += _describe_scores(metric, heading, by_metric[metric])
    return columns, sentences


def _measure_perturbations(profiles: Profiles) -> tuple[np.ndarray, np.ndarray]:
    """Perturbations of the file with enough cells, text, and their changes from the controls that
    predictions start from, (perturbations, G) float64.
    """
    is_usable = (profiles.perturbation != "") & (profiles.stratum >= 0)
    names, unit_of_cell = np.unique(
        np.where(is_usable, profiles.perturbation, ""), return_inverse=True
    )
    changes = profiles.changes(
        np.where(is_usable, unit_of_cell, -1), len(names), profiles.control_means(START)
    )
    has_enough = np.bincount(unit_of_cell[is_usable], minlength=len(names)) >= TASK.min_cells
    return names[has_enough], changes[has_enough]


def _describe_scores(metric: str, heading: str, scores: ByMethod) -> list[str]:
    """Sentence with the means of a metric, and the verdict on the response against each baseline."""
    column = ScoreColumn(heading, METRICS[metric], scores, lower_is_better=metric == "MAE")
    if RESPONSE not in scores:
        return []
    means = [f"{method.name} {column.mean(method):.3f}" for method in scores]
    verdicts = [column.compare(RESPONSE, other).sentence for other in scores if other != RESPONSE]
    return [f"{heading}: {METRICS[metric]}: {', '.join(means)}. {' '.join(verdicts)}".strip()]


def _describe(
    units: Units, roles: Mapping[str, pd.Series], seen: Seen, is_read: np.ndarray
) -> list[str]:
    """Lines on untrained perturbations, on doses that are not told apart, and on seen controls."""
    lines = []
    untrained = list(dict.fromkeys(np.array(units.names)[~units.trained].tolist()))
    if untrained:
        lines.append(
            f"warning: the model was not trained on {len(untrained):,} perturbations, which are predicted from their "
            f"genes only: {list_first(untrained, MAX_NAMES)}"
        )
    if "dose" in roles:
        lines.append("warning: it has doses: a response is the same at each of them")
    if seen.cells is not None and (seen.cells & is_read).any():
        n_seen = int((seen.cells & is_read).sum())
        lines.append(
            f"{n_seen:,} of {int(is_read.sum()):,} controls are of the model's training or validation"
        )
    if seen.unknown:
        lines.append(seen.unknown)
    return lines
