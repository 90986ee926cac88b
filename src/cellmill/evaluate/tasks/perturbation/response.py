"""Changes that a model with objective `perturbation_response` predicts from control cells.

Legend: U units (see `profiles.py`), G genes, H hidden width.
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
    """Head of a model. It predicts the expression of control cells under a perturbation."""

    network: Model
    objective: PerturbationResponse
    precision: str  # number format of the model's layers, as in options `embed` and `evaluate`

    @classmethod
    def find(cls, network: Model, precision: str) -> Self | None:
        """The head of the model's objective, or of a part of it if the objective is a sum. None for a
        model without such a head.

        Raises ConfigError if the embeddings are of another block than the head was trained on
        (`embed_layer`).
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
        """(U, G) float64: predicted change of each unit. The change is predicted from the controls of
        each stratum, and averaged over strata with the weights `stratum_shares`. NaN for a unit that has
        cells in a stratum without controls to start from.

        `vectors`, (cells, H), are embeddings. Controls whose row is NaN are not used. `stratum_shares`,
        (U, strata), are the shares of a unit's cells that are in each stratum. `names` are the
        perturbations of the units, and `genes` the vocabulary rows of the genes that they perturb.
        """
        has_vector = np.isfinite(vectors).all(1)
        changes = np.zeros((len(names), len(profiles.genes)))
        for stratum in np.flatnonzero(stratum_shares.sum(0)).tolist():
            controls = profiles.find_start_controls(stratum, has_vector)
            if not len(controls):
                changes[stratum_shares[:, stratum] > 0] = np.nan
                continue
            unperturbed = self._predict_mean(vectors, profiles, controls, None, [])
            # units of the same name, which differ in dose or context only, get the same prediction
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
        """(G,) float64: expression that the model expects of the cells `controls` (indices) under a
        perturbation, averaged over these cells.

        `name` is the perturbation, and None for no perturbation. `genes` are the vocabulary rows of the
        genes that the perturbation perturbs.
        """
        device = next(self.network.parameters()).device
        tokens = [row + len(SPECIAL) for row in genes]
        with inference_mode(device, self.precision):
            inputs = torch.from_numpy(vectors[controls]).to(device)
            log_shares = self.objective.predict_log_profile(self.network, inputs, name, tokens)
            # the shares of all genes that the dataset measures sum to 1
            measured = log_shares[:, torch.from_numpy(profiles.genes)]
            shares = measured.double().softmax(1).cpu().numpy()
        return expected_log_expression(shares, profiles.depth[controls]).mean(0)
