"""An exported model in Python: embeddings and labels of an AnnData in memory; `cellmill.load` returns it."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from cellmill.config.load import check_options
from cellmill.config.run import Embed, Predict
from cellmill.data.counts_reader import CountsReader
from cellmill.data.inputs.in_memory import open_memory
from cellmill.evaluate.embed import Embedding, embed_cells, load_for_inference
from cellmill.evaluate.embedding_checks import check_coverage, limits_of
from cellmill.evaluate.predicted import Predicted, predict_heads, thresholds_of


class LoadedModel:
    """An exported model with its vocabulary and tokens. A cell's vector depends on its counts alone.

    Neither the other cells nor their order change it (but for rounding, 5e-6), and it is that of `cellmill embed`.

    Attributes: `folder`, `config` (config.json), `vocabulary`, and `labels`, of the first head; empty without any.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model, self.vocabulary, self._tokens, self.config = load_for_inference(folder)
        self.labels: list[str] = list((self.config.get("classifier") or {}).get("labels", ()))

    def embed(self, adata: Any, counts: str = "X", *, dataset: str = "adata", **options: Any) -> np.ndarray:
        """Vectors of all cells in their order, (n_obs, hidden) float32; NaN for a cell without a gene of the model.

        Parameters
        ----------
        adata
            An AnnData in memory, with raw counts; genes are matched by Ensembl id or symbol, as for a file.
        counts
            Matrix of the counts: X, raw, or the name of a layer.
        dataset
            Name of the dataset, which a model with the covariate `dataset` reads.
        **options
            Those of section `embed` of the configuration: token_budget, precision, min_coverage_frac,
            min_expressed_frac.

        Raises
        ------
        DataError
            If the matrix holds no counts, or the model knows too few of its genes.
        """
        return self._embed(adata, counts, dataset, options).vectors

    def _embed(self, adata: Any, counts: str, dataset: str, options: dict[str, Any]) -> Embedding:
        section = check_options(Embed, options, "options of embed")
        with CountsReader(open_memory(adata, counts, dataset)) as reader:
            reader.dataset = dataset
            embedding = embed_cells(
                reader, self._model, self.vocabulary, self._tokens, section.token_budget, precision=section.precision
            )
            check_coverage(reader.path, embedding, section)
            reader.warn_if_rounded()
        for line in limits_of(embedding):
            warnings.warn(f"{dataset}: {line.removeprefix('warning: ')}", stacklevel=3)
        return embedding

    def predict(
        self,
        adata: Any,
        counts: str = "X",
        *,
        min_probability: float | None = None,
        min_accuracy: float | None = None,
        dataset: str = "adata",
        **options: Any,
    ) -> Predicted:
        """Predictions of all heads, as `cellmill predict` writes them: labels, calibrated probabilities and numbers.

        `obs`, `obsm` and `about` have what the command writes, under its names, and `add_to(adata)` adds it;
        `labels` and `probabilities` are those of the first head of labels. Thresholds are those of section `predict` of
        the configuration; other arguments are those of `embed`. Raises ConfigError for a model that predicts neither
        labels nor numbers.
        """
        given = {"min_probability": min_probability, "min_accuracy": min_accuracy}
        section = check_options(Predict, given, "options of predict")
        smallest = thresholds_of(self._model, self.config, section, str(self.folder))
        return predict_heads(self._model, self.config, self._embed(adata, counts, dataset, options), smallest)
