"""Changes of expression that a model trained with objective perturbation_response predicts.

Each control is given the perturbation: its predicted profile with the response minus that without, both as the expected
log(1 + counts per 10,000) of as many Poisson counts as the control has. An expected logarithm is not the logarithm of
an expectation: of a gene with 0.2 counts a cell it is a fifth of it or less.

Legend: U units, C controls, G genes.
"""

from collections.abc import Sequence

import numpy as np
import torch

from cellmill.config.tokens import SPECIAL
from cellmill.data.count_matrix import TARGET_SUM
from cellmill.evaluate.embed import inference
from cellmill.evaluate.perturbed import Profiles
from cellmill.evaluate.task import Context
from cellmill.models.objective import Objective
from cellmill.models.objectives.perturbation_response import PerturbationResponse

MOST_CONTROLS = 128  # of a stratum: the first of the half that predictions start from
LARGE = 30.0  # expected counts from which the logarithm of the expectation is within 0.02 of the expected one


def response_objective(objective: Objective) -> PerturbationResponse | None:
    """The objective, or the part of a sum, that predicts responses; None without one."""
    return next((part for part in objective.leaves().values() if isinstance(part, PerturbationResponse)), None)


def predicted_changes(
    context: Context, profiles: Profiles, strata: np.ndarray, names: Sequence[str], genes: Sequence[list[int]]
) -> np.ndarray | None:
    """(U, G) float64: predicted change of each unit; None for a model that predicts no responses.

    Parameters
    ----------
    strata
        (U, strata): share of each stratum in the cells of a unit.
    names, genes
        Perturbation of each unit, and the vocabulary rows of its genes.
    """
    network = context.model.network
    objective = response_objective(network.objective)
    if objective is None:
        return None
    changes = np.zeros((len(names), len(profiles.genes)))
    known: dict[tuple[str, int], np.ndarray] = {}
    for stratum in np.flatnonzero(strata.sum(0)).tolist():
        usable = (profiles.half == 0) & (profiles.stratum == stratum) & np.isfinite(context.vectors).all(1)
        cells = np.flatnonzero(usable)[:MOST_CONTROLS]
        before = _mean_expression(context, profiles, objective, cells, None, [])
        for unit in np.flatnonzero(strata[:, stratum]).tolist():
            key = names[unit], stratum
            if key not in known:
                known[key] = _mean_expression(context, profiles, objective, cells, names[unit], genes[unit]) - before
            changes[unit] += strata[unit, stratum] * known[key]
    return changes


def _mean_expression(
    context: Context,
    profiles: Profiles,
    objective: PerturbationResponse,
    cells: np.ndarray,
    perturbation: str | None,
    genes: list[int],
) -> np.ndarray:
    """(G,) float64: mean over the controls of their expected expression under a perturbation, or as they are."""
    network = context.model.network
    device = next(network.parameters()).device
    with inference(device, context.options.precision):
        vectors = torch.from_numpy(context.vectors[cells]).to(device)
        tokens = [row + len(SPECIAL) for row in genes]
        log_shares = objective.log_profile(network, vectors, perturbation, tokens)[:, torch.from_numpy(profiles.genes)]
        shares = log_shares.double().softmax(1).cpu().numpy()  # of the genes that the dataset has
    return expected_log_expression(shares, profiles.depth[cells]).mean(0)


def expected_log_expression(shares: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """(C, G) float64: mean of log(1 + k * 10,000 / depth) over Poisson counts k of mean depth * share."""
    mean = depth[:, None] * shares
    scale = TARGET_SUM / np.maximum(depth, 1)[:, None]
    small = np.minimum(mean, LARGE)
    last = int(np.ceil(small.max(initial=0) + 8 * small.max(initial=0) ** 0.5)) + 5
    probability, total = np.exp(-small), np.zeros_like(mean)
    for count in range(1, last + 1):
        probability = probability * small / count
        total += probability * np.log1p(count * scale)
    return np.where(mean < LARGE, total, np.log1p(mean * scale))
