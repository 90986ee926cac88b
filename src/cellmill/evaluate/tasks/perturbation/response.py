"""Changes that a model with objective perturbation_response predicts from control cells.

Legend: U units, G genes, H hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from cellmill.config.parts.tokens import SPECIAL
from cellmill.evaluate.features.expression import expected_log_expression
from cellmill.evaluate.inference.embed import check_heads, inference_mode
from cellmill.evaluate.tasks.perturbation.profiles import Profiles
from cellmill.models.family import Model
from cellmill.models.objectives.perturbation_response import PerturbationResponse


@dataclass(frozen=True)
class ResponseHead:
    """Head of a model that predicts the response of cells to a perturbation."""

    network: Model
    objective: PerturbationResponse
    precision: str  # number format, an option of `embed` and `evaluate`

    @classmethod
    def find(cls, network: Model, precision: str) -> Self | None:
        """Head of the objective, or of a part of a sum; None for a model without such a head.

        Raises ConfigError as `check_heads`.
        """
        for part in network.objective.parts_by_name().values():
            if isinstance(part, PerturbationResponse):
                check_heads(network)
                return cls(network, part, precision)
        return None

    def predict_changes(
        self,
        vectors: np.ndarray,
        profiles: Profiles,
        stratum_shares: np.ndarray,
        names: Sequence[str],
        genes: Sequence[list[int]],
    ) -> np.ndarray:
        """(U, G) float64: predicted change of each unit, the mean over strata by their shares; NaN for a
        unit with cells in a stratum without `start_controls`.

        `vectors`, (cells, H), may be NaN for cells other than `start_controls`. `stratum_shares`,
        (U, strata), are the shares of a unit's cells in each stratum. `names` are the perturbations
        of the units, `genes` the vocabulary rows of their genes.
        """
        has_vector = np.isfinite(vectors).all(1)
        changes = np.zeros((len(names), len(profiles.genes)))
        for stratum in np.flatnonzero(stratum_shares.sum(0)).tolist():
            controls = profiles.start_controls(stratum, has_vector)
            if not len(controls):
                changes[stratum_shares[:, stratum] > 0] = np.nan
                continue
            unperturbed = self._predict_mean(vectors, profiles, controls, None, [])
            # all doses of a perturbation get the same prediction
            change_by_name: dict[str, np.ndarray] = {}
            for unit in np.flatnonzero(stratum_shares[:, stratum]).tolist():
                name = names[unit]
                if name not in change_by_name:
                    perturbed = self._predict_mean(vectors, profiles, controls, name, genes[unit])
                    change_by_name[name] = perturbed - unperturbed
                changes[unit] += stratum_shares[unit, stratum] * change_by_name[name]
        return changes

    def _predict_mean(
        self,
        vectors: np.ndarray,
        profiles: Profiles,
        controls: np.ndarray,
        name: str | None,
        genes: list[int],
    ) -> np.ndarray:
        """(G,) float64: mean expected expression of the cells `controls` under perturbation `name` of
        `genes`, rows of the vocabulary; None is no perturbation.
        """
        device = next(self.network.parameters()).device
        tokens = [row + len(SPECIAL) for row in genes]
        with inference_mode(device, self.precision):
            inputs = torch.from_numpy(vectors[controls]).to(device)
            log_shares = self.objective.predict_log_profile(self.network, inputs, name, tokens)
            # shares of the genes that the dataset has sum to 1
            measured = log_shares[:, torch.from_numpy(profiles.genes)]
            shares = measured.double().softmax(1).cpu().numpy()
        return expected_log_expression(shares, profiles.depth[controls]).mean(0)
