"""Predicted response of the control cells in a file to perturbations.

The model must have objective perturbation_response. A response is the change that task `perturbation`
scores as row `response head`: the expected log(1 + counts per 10,000) with the perturbation, minus that
without it. The change is averaged over the controls of each stratum, such as a batch of a donor, and then
over strata.

The model predicts from half of the controls of a stratum, at most 128. If the file also has perturbed
cells, their change is measured as the difference from the other half. The measured change is compared
with the prediction.

Legend: U units, G genes. A unit is a perturbation, with a value of option `by` if that is set.
"""

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd

from cellmill.config.run import Embed
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.prepare.qc_lines import list_first
from cellmill.errors import ConfigError
from cellmill.evaluate.inference.embed import InferenceModel, describe_limits, embed_cells
from cellmill.evaluate.inference.label_counts import MAX_NAMES
from cellmill.evaluate.inference.perturb.comparison import compare_responses
from cellmill.evaluate.inference.perturb.requested_units import (
    MeasuredUnits,
    RequestedUnits,
    list_units,
)
from cellmill.evaluate.inference.perturb.screen import (
    SEED,
    PerturbationScreen,
    PerturbRequest,
    check_request,
    read_screen,
)
from cellmill.evaluate.seen.seen_cells import Seen, mark_seen_cells
from cellmill.evaluate.tasks.perturbation.profiles import START_HALF
from cellmill.evaluate.tasks.perturbation.response import ResponseHead

ABOUT_RESPONSE = "cellmill_response"  # key of uns


def predict_response(
    reader: CountsReader,
    model: InferenceModel,
    folder: Path,
    request: PerturbRequest,
    section: Embed,
) -> tuple[ad.AnnData, list[str]]:
    """Predict the responses of a file's controls to the requested perturbations.

    `model` was read from `folder`. Returns the responses, and sentences on what limits their use. The
    responses have a row for each unit and a column for each gene. X, float32, is the change. Layer
    `control` is the mean of the controls. Layer `expression` is the sum of control and change, at least 0.
    Layer `measured` is the measured change, NaN for units without enough cells. The layer is absent if no
    unit was measured.

    Raises ConfigError for a model that predicts no responses, and for an unknown perturbation. Raises
    DataError for a file without counts, with too few controls, or with too few counts or genes that the
    model knows.
    """
    network, vocabulary, _, config = model
    check_request(request)
    head = ResponseHead.find(network, section.precision)
    if head is None:
        raise ConfigError(
            f"{folder}: it predicts no responses; export a run with objective perturbation_response"
        )

    # the controls in the file, and the units to predict
    training = head.objective.config
    trained = head.objective.list_trained_levels(network)
    screen = read_screen(reader, vocabulary, training, request)
    units = list_units(request.perturbations, screen, vocabulary, trained, training.control)
    notes = [*screen.notes]
    if screen.control in trained:
        notes.append(
            f"warning: the model was trained on the control {screen.control!r} as a perturbation: predicted responses "
            f"are changes from {training.control!r}, measured ones from {screen.control!r}"
        )

    # embed the controls that the model predicts from
    embedding = embed_cells(reader, model, section, screen.is_start)
    vectors = np.full((reader.n_obs, network.vector_width), np.nan, np.float32)
    vectors[screen.is_start] = embedding.vectors

    # measure the changes of perturbed cells that the model has not seen
    seen = mark_seen_cells(reader, folder)
    is_compared = screen.has_genes if seen.is_seen is None else screen.has_genes & ~seen.is_seen
    measured = MeasuredUnits.read(screen, units, is_compared)

    # predict the changes, and compare them with the measured changes
    weights = _compute_stratum_weights(screen, units, measured)
    changes = head.predict_changes(vectors, screen.profiles, weights, units.names, units.genes)
    scores, sentences = compare_responses(screen.profiles, units, changes, measured, trained)
    if measured.is_measured.any() and seen.caveat:
        sentences.append(f"the comparison may be on training cells: {seen.caveat}")

    about = {
        "model_digest": config["weights_sha256"],
        "vocabulary_digest": vocabulary.digest,
        "unit": "change of log(1 + counts per 10,000 of the genes in var)",
        "control": screen.control,
        "strata": screen.strata,
        "n_controls": int(screen.is_start.sum()),
        "seed": SEED,
        "comparison": sentences,
    }
    response = ad.AnnData(
        changes.astype(np.float32),
        _make_obs(units, request.by, measured, scores),
        screen.profiles.describe_genes(vocabulary),
        uns={ABOUT_RESPONSE: about},
        layers=_make_layers(screen, weights, changes, measured),
    )
    limits = _describe_limits(units, screen, seen)
    return response, [*notes, *limits, *describe_limits(embedding)]


def _compute_stratum_weights(
    screen: PerturbationScreen, units: RequestedUnits, measured: MeasuredUnits
) -> np.ndarray:
    """Weight of each stratum in the mean response of a unit, (U, strata) float64.

    For a measured unit, the weight is the share of the stratum in the unit's measured cells. For another
    unit, it is the share of the stratum in the controls with the unit's value of `by`.
    """
    profiles = screen.profiles
    values = sorted({*units.by_values})
    # index in `values` of each control's value, (cells,); -1 for other cells
    value_of_cell = np.searchsorted(values, screen.by_values).clip(max=len(values) - 1)
    is_known = np.isin(screen.by_values, values)
    value_of_cell = np.where(screen.is_control & is_known, value_of_cell, -1)
    value_shares = profiles.compute_stratum_shares(value_of_cell, len(values))
    control_shares = value_shares[np.searchsorted(values, units.by_values)]
    cell_shares = profiles.compute_stratum_shares(measured.unit_of_cell, len(units.names))
    return np.where(measured.is_measured[:, None], cell_shares, control_shares)


def _make_obs(
    units: RequestedUnits, by: str | None, measured: MeasuredUnits, scores: dict[str, np.ndarray]
) -> pd.DataFrame:
    """Make obs with a row for each unit. The column of option `by` keeps its name."""
    columns: dict[str, Any] = {"perturbation": units.names}
    if by:
        columns[by] = units.by_values
    columns |= {"trained": units.trained, "n_cells": measured.n_cells, **scores}
    return pd.DataFrame(columns, index=units.texts)


def _make_layers(
    screen: PerturbationScreen, weights: np.ndarray, changes: np.ndarray, measured: MeasuredUnits
) -> dict[str, np.ndarray]:
    """Make the layers of the result, (U, G) float32 by name.

    They are the mean of the controls, the predicted expression, and the measured changes if there are any.
    """
    controls = weights @ np.nan_to_num(screen.profiles.average_controls(START_HALF))
    layers = {"control": controls, "expression": np.maximum(controls + changes, 0)}
    if measured.is_measured.any():
        layers["measured"] = measured.changes
    return {name: values.astype(np.float32) for name, values in layers.items()}


def _describe_limits(units: RequestedUnits, screen: PerturbationScreen, seen: Seen) -> list[str]:
    """Return sentences on untrained perturbations, on doses with equal predictions, and on seen controls."""
    lines = []
    untrained = list(dict.fromkeys(np.array(units.names)[~units.trained].tolist()))
    if untrained:
        lines.append(
            f"warning: the model was not trained on {len(untrained):,} perturbations, which are predicted from their "
            f"genes only: {list_first(untrained, MAX_NAMES)}"
        )
    if screen.has_doses:
        lines.append("warning: it has doses: a response is the same at each of them")
    if seen.is_seen is not None:
        n_seen = int((seen.is_seen & screen.is_start).sum())
        if n_seen:
            lines.append(
                f"{n_seen:,} of {int(screen.is_start.sum()):,} controls come from the model's training or "
                "validation cells"
            )
    if seen.caveat:
        lines.append(seen.caveat)
    return lines
