"""`LoadedModel`, an exported model for cells in memory (`cellmill.load`)."""

import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cellmill.config.load import check_options, find_atlas
from cellmill.config.run import Embed, Map, Predict
from cellmill.data.genes.names import organisms_of
from cellmill.data.inputs.anndata_files import open_memory
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.prepare.qc_lines import list_first
from cellmill.errors import ConfigError, did_you_mean
from cellmill.evaluate.atlas.mapping import AtlasMapping, map_vectors
from cellmill.evaluate.atlas.store import CellAtlas
from cellmill.evaluate.inference.embed import describe_limits, embed_cells, load_for_inference
from cellmill.evaluate.inference.label_counts import MAX_NAMES
from cellmill.evaluate.inference.predict import Predictions, choose_thresholds, predict_heads
from cellmill.evaluate.seen.seen_cells import mark_seen_cells, tabulate_seen_cells


class LoadedModel:
    """An exported model with its vocabulary and tokens.

    A cell's vector depends only on its own counts, not on the other cells or their order (except
    for rounding, 5e-6). It is the vector that `cellmill embed` writes.

    Attributes: `folder`, `config` (config.json), `vocabulary`, and `labels` of the first head that
    predicts labels; empty without one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inference = load_for_inference(folder)
        self._model = self._inference.network
        self.vocabulary = self._inference.vocabulary
        self.config = self._inference.config
        self.labels: list[str] = list((self.config.get("classifier") or {}).get("labels", ()))

    def embed(
        self, adata: Any, counts: str = "X", *, dataset: str = "adata", **options: Any
    ) -> np.ndarray:
        """Vectors of all cells in their order, (n_obs, hidden) float32; NaN for a cell without a
        gene of the model.

        `adata` is an AnnData in memory; genes are matched by Ensembl id or symbol. `counts` is X,
        raw, or the name of a layer. `dataset` is the name of the dataset. It appears in warnings, and
        a model with covariate `dataset` makes a token of it. `options` are the options of section `embed`:
        token_budget, precision, min_coverage_frac, min_expressed_frac. Raises DataError if the matrix
        holds no counts, or the model knows too few of its genes.
        """
        section = _embed_options("embed", options)
        with self._open_reader(adata, counts, dataset) as reader:
            embedding = embed_cells(reader, self._inference, section)
        _warn(dataset, describe_limits(embedding))
        return embedding.vectors

    def _open_reader(self, adata: Any, counts: str, dataset: str) -> CountsReader:
        reader = CountsReader(open_memory(adata, counts, dataset))
        reader.dataset = dataset
        return reader

    def predict(
        self,
        adata: Any,
        counts: str = "X",
        *,
        min_probability: float | None = None,
        min_accuracy: float | None = None,
        dataset: str = "adata",
        **options: Any,
    ) -> Predictions:
        """Predictions of all heads, as `cellmill predict` writes them: labels, calibrated
        probabilities and numbers.

        `obs`, `obsm` and `about` have what the command writes, under its names, and `add_to(adata)`
        adds it; `labels` are from the first head of labels. Thresholds are options of section
        `predict`; other arguments are as in `embed`. Raises ConfigError for a model that predicts
        neither labels nor numbers.
        """
        given = {"min_probability": min_probability, "min_accuracy": min_accuracy}
        section = check_options(Predict, given, "options of predict")
        thresholds = choose_thresholds(self._model, self.config, section, str(self.folder))
        embed = _embed_options("predict", options, given)
        with self._open_reader(adata, counts, dataset) as reader:
            embedding = embed_cells(reader, self._inference, embed)
            seen = mark_seen_cells(reader, self.folder)
            predicted = predict_heads(
                self._model, self.config, embedding, thresholds, reader.obs, seen
            )
        _warn(dataset, describe_limits(embedding))
        return predicted

    def impute(
        self,
        adata: Any,
        genes: Sequence[str] | None = None,
        counts: str = "X",
        *,
        dataset: str = "adata",
        **options: Any,
    ) -> Any:
        """Predicted expression of genes that `adata` lacks, as `cellmill impute` writes it: an AnnData
        of cells by predicted genes, X float32, log(1 + counts per 10,000).

        `genes` are ids or symbols, None for all genes of the model that `adata` lacks; other
        arguments are as in `embed`. Raises ConfigError for a model that predicts no expression, or
        an unknown gene; DataError if `adata` measures all of them.
        """
        section = _embed_options("impute", options, ["genes"])
        # imports scikit-learn
        impute = import_module("cellmill.evaluate.inference.impute")
        with self._open_reader(adata, counts, dataset) as reader:
            imputer = impute.FileImputer(reader, self._inference, self.folder, genes, section)
            values = np.concatenate([*imputer.blocks()])
            described = imputer.describe()
        _warn(dataset, imputer.describe_limits(described))
        described.X = values
        return described

    def perturb(
        self,
        adata: Any,
        perturbations: Sequence[str] | None = None,
        counts: str = "X",
        *,
        perturbation_column: str | None = None,
        control: str | None = None,
        by: str | None = None,
        dataset: str = "adata",
        **options: Any,
    ) -> Any:
        """Predicted response of the controls in `adata` to perturbations, as `cellmill perturb` writes
        it: an AnnData of perturbations by genes, X float32, change of log(1 + counts per 10,000).

        `perturbations` are names, None for all that the model was trained on. `perturbation_column` is
        the obs column of perturbations, and `control` its value for controls, by default the model's;
        values of obs column `by` are predicted separately. Other arguments are as in `embed`. Raises
        ConfigError for a model that predicts no responses, or an unknown perturbation; DataError
        without enough controls.
        """
        given = {"perturbation_column": perturbation_column, "control": control, "by": by}
        section = _embed_options("perturb", options, ["perturbations", *given])
        # imports scikit-learn
        perturb = import_module("cellmill.evaluate.inference.perturb.predict")
        request = perturb.PerturbRequest(perturbations, **given)
        with self._open_reader(adata, counts, dataset) as reader:
            response, lines = perturb.predict_response(
                reader, self._inference, self.folder, request, section
            )
        _warn(dataset, lines)
        return response

    def map(
        self,
        adata: Any,
        counts: str = "X",
        *,
        refuse_frac: float = 0.05,
        certainty: float = 0.8,
        atlas: Path | str | None = None,
        dataset: str = "adata",
        **options: Any,
    ) -> AtlasMapping:
        """Labels, neighbours and distances in the model's atlas, as `cellmill map` writes them.

        `atlas` is its folder, by default `atlas` in the model's. `add_to(adata)` of the result adds
        everything. Thresholds are options of section `map`; other arguments are as in `embed`.
        Raises DataError if the atlas is missing, damaged or another model's.
        """
        given = {"refuse_frac": refuse_frac, "certainty": certainty}
        section = check_options(Map, given, "options of map")
        embed = _embed_options("map", options, [*given, "atlas"])
        folder = find_atlas(self.folder, None if atlas is None else Path(atlas))
        width = self._model.vector_width
        cell_atlas = CellAtlas.read(folder, self.config["weights_sha256"], width)
        with self._open_reader(adata, counts, dataset) as reader:
            embedding = embed_cells(reader, self._inference, embed)
            seen = mark_seen_cells(reader, self.folder)
        _warn(dataset, describe_limits(embedding))
        return map_vectors(cell_atlas, embedding.vectors, seen, section)

    def seen(self, adata: Any, counts: str = "X", *, dataset: str = "adata") -> pd.DataFrame:
        """Cells that the model, or a model before it, was trained on, as `cellmill seen` finds them.

        A row per cell; column `seen` is exact, near or new (`seen_cells.KINDS`). Arguments are as in
        `embed`. Raises DataError if no gene is known, or the training cells are not: the model has
        no list of them.
        """
        with self._open_reader(adata, counts, dataset) as reader:
            table, notes = tabulate_seen_cells(reader, self.folder, self.vocabulary)
        _warn(dataset, notes)
        return table

    def __repr__(self) -> str:
        organisms = ", ".join(organisms_of(self.vocabulary)) or "unknown organism"
        n_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        lines = [
            f"LoadedModel {self.folder}",
            f"{self.config['family']} of {self._model.vector_width:,} dimensions, "
            f"{n_parameters:,} parameters, {self.vocabulary.n_genes:,} genes ({organisms})",
            f"labels: {list_first(self.labels, MAX_NAMES) or 'none'}",
        ]
        return "\n    ".join(lines)


def _embed_options(method: str, options: dict[str, Any], others: Iterable[str] = ()) -> Embed:
    """Options of section `embed` that a method was called with; `others` are its other arguments."""
    known = ["counts", "dataset", *others, *Embed.model_fields]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"{method}: unknown argument {name!r}; {hint}")
    embed: Embed = check_options(Embed, options, f"options of {method}")
    return embed


def _warn(dataset: str, lines: Iterable[str]) -> None:
    for line in lines:
        warnings.warn(f"{dataset}: {line.removeprefix('warning: ')}", stacklevel=3)
