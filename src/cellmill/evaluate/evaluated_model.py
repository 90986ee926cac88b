"""The exported model under evaluation, with its training corpus."""

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

PCA_CELLS = 10_000  # training cells that principal components are fitted on, at most


@dataclass(frozen=True)
class EvaluatedModel:
    """The exported model, and what is computed from it and its training shards when first read."""

    network: Model  # in eval mode, on its device
    config: dict[str, Any]  # its config.json
    vocabulary: Vocabulary
    tokens: Tokens
    manifest: Manifest  # manifest of its training corpus
    seed: int
    ridge: GeneRidge | None = None  # predicts hidden genes together with the decoder

    @property
    def supervised_by(self) -> list[str]:
        """obs columns whose labels the model, or the model that it started from, was trained with."""
        return sorted(
            {*self.network.objective.config.supervised_by, *self.config.get("supervised_by", [])}
        )

    @property
    def supervision_note(self) -> str | None:
        """Note on all labels that the model was trained with."""
        columns = self.supervised_by
        return f"supervised by {', '.join(columns)}" if columns else None

    @cached_property
    def untrained(self) -> Model:
        """The same architecture with initial weights of `seed`, in eval mode, on the same device."""
        model = to_empty(build(spec_of(self.config, self.vocabulary.n_genes)), "cpu")
        device = next(self.network.parameters()).device
        materialize(model, device, initial_tensors(model, self.seed, None, self.vocabulary))
        return model.eval()

    def is_training_cell(self, dataset: str, cells: pd.Index) -> np.ndarray:
        """(cells,) bool: True for the obs names in `cells` that a training shard has for `dataset`."""
        names = {
            name
            for dataset_of_cell, name in read_cell_names(self.manifest, ["train"])
            if dataset_of_cell == dataset
        }
        return np.asarray(cells.isin([*names]))

    @cached_property
    def gene_statistics(self) -> GeneStatistics:
        """Statistics of the genes of training cells, for the baselines of the network's objective."""
        return read_gene_statistics(self.manifest, self.network.objective, self.seed)

    @cached_property
    def components(self) -> PrincipalComponents:
        """Principal components of log-normalised training cells, which several tasks compare with."""
        profiles = self.training_profiles()
        return pca(profiles.shape).fit(profiles)

    def training_profiles(self) -> sp.csr_matrix:
        """Log-normalised training cells, at most PCA_CELLS, `(cells, genes)` float32; read again at
        each call.
        """
        counts = read_counts(self.manifest, PCA_CELLS)
        return log_normalise(gene_counts(counts, self.manifest.ordered))


def load_evaluated(model: Path, manifest: Manifest, seed: int) -> EvaluatedModel:
    """The exported model in the folder `model`. Raises DataError if the shards of `manifest` have
    another vocabulary.
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
