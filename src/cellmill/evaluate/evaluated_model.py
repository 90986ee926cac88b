"""The exported model under evaluation, together with its training corpus."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.parts.tokens import Tokens
from cellmill.data.arrays import gene_counts, log_normalise
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import DataError
from cellmill.evaluate.features.components import PrincipalComponents, pca
from cellmill.evaluate.hidden_genes.ridge import GeneRidge
from cellmill.evaluate.inference.embed import load_for_inference
from cellmill.evaluate.training_shards import read_cell_names, read_counts, read_gene_statistics
from cellmill.models.build import build
from cellmill.models.export import initial_tensors, spec_of
from cellmill.models.family import Model
from cellmill.models.objective import GeneStatistics
from cellmill.parallel.materialize import materialize, to_empty

PCA_CELLS = 10_000  # principal components are fitted on at most this many training cells


@dataclass(frozen=True)
class EvaluatedModel:
    """The exported model, and values that are computed from the model and its training shards.

    Each such value is computed when it is first read.
    """

    network: Model  # in eval mode, on a GPU if there is one
    config: dict[str, Any]  # content of config.json
    vocabulary: Vocabulary
    tokens: Tokens
    manifest: Manifest  # of the training corpus
    seed: int
    # regression that predicts hidden genes together with the decoder
    ridge: GeneRidge | None = None

    @property
    def supervised_by(self) -> list[str]:
        """obs columns of labels that the model was trained with, in alphabetical order.

        They include the columns of the model that this model started from.
        """
        return sorted(
            {*self.network.objective.config.supervised_by, *self.config.get("supervised_by", [])}
        )

    @property
    def supervision_note(self) -> str | None:
        """Note that names all label columns that the model was trained with; None if there are none."""
        columns = self.supervised_by
        return f"supervised by {', '.join(columns)}" if columns else None

    @cached_property
    def untrained(self) -> Model:
        """A model of the same architecture with the initial weights of `seed`, on the same device."""
        config = dict(self.config)
        if config["model"]["family"] == "hf":  # whose initial weights are pretrained
            config["model"] = config["model"] | {"weights": "random"}
        model = to_empty(build(spec_of(config, self.vocabulary.n_genes)), "cpu")
        device = next(self.network.parameters()).device
        materialize(model, device, initial_tensors(model, self.seed, None, self.vocabulary))
        return model.eval()

    def is_training_cell(self, dataset: str, cells: pd.Index) -> np.ndarray:
        """Mark the obs names in `cells` that a training shard has for `dataset`, (cells,) bool."""
        training_names = {
            name
            for dataset_of_cell, name in read_cell_names(self.manifest, ["train"])
            if dataset_of_cell == dataset
        }
        return np.asarray(cells.isin([*training_names]))

    @cached_property
    def gene_statistics(self) -> GeneStatistics:
        """Statistics of the genes in training cells, from which the objective makes its baselines."""
        return read_gene_statistics(self.manifest, self.network.objective, self.seed)

    @cached_property
    def components(self) -> PrincipalComponents:
        """Principal components fitted on log-normalised training cells; a baseline of several tasks."""
        profiles = self.training_profiles()
        return pca(profiles.shape).fit(profiles)

    def training_profiles(self) -> sp.csr_matrix:
        """Read at most PCA_CELLS training cells, log-normalised, `(cells, genes)` float32.

        Each call reads the shards again.
        """
        counts = read_counts(self.manifest, PCA_CELLS)
        return log_normalise(gene_counts(counts, self.manifest.ordered))


def load_evaluated(model: Path, manifest: Manifest, seed: int) -> EvaluatedModel:
    """Read the exported model in the folder `model`.

    Raises DataError if the shards of `manifest` have another vocabulary than the model.
    """
    network, vocabulary, tokens, config = load_for_inference(model)
    digest = manifest.vocabulary["digest"]
    if vocabulary.digest != digest:
        raise DataError(
            f"{manifest.path}: its vocabulary is {digest[:12]}, the model's {vocabulary.digest[:12]}; "
            "pass the manifest of the shards that the model was trained on"
        )
    ridge = GeneRidge.read(model, config)
    return EvaluatedModel(network, config, vocabulary, tokens, manifest, seed, ridge)
