"""`LoadedModel`: an exported model that is used on cells in memory (`cellmill.load`)."""

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
from cellmill.evaluate.inference.files import digest_embedder
from cellmill.evaluate.inference.label_counts import MAX_NAMES
from cellmill.evaluate.inference.predict import Predictions, choose_thresholds, predict_heads
from cellmill.evaluate.seen.seen_cells import mark_seen_cells, tabulate_seen_cells


class LoadedModel:
    """An exported model with its vocabulary and tokens.

    The vector of a cell depends only on the cell's own counts. It does not depend on other cells or on
    their order, except for rounding errors of 5e-6. It is the vector that `cellmill embed` writes.

    Attributes: `folder`; `config`, the content of config.json; `vocabulary`; and `labels`, the labels of
    the first head that predicts labels. `labels` is empty without such a head.
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
        """Compute the vectors of all cells in their order, (n_obs, hidden) float32.

        A cell without counts of the model's genes has a row of NaN.

        `adata` is an AnnData in memory. Its genes are matched by Ensembl id or symbol. `counts` is X, raw,
        or the name of a layer. `dataset` is the name of the dataset. The name appears in warnings, and a
        model with covariate `dataset` makes a token of it. `options` are the options of section `embed`:
        token_budget, precision, min_coverage_frac, min_expressed_frac.

        Raises DataError if the matrix does not have counts, or if the model knows too few of its genes.
        """
        section = _embed_options("embed", options)
        with self._open_reader(adata, counts, dataset) as reader:
            embedding = embed_cells(reader, self._inference, section)
        _warn(dataset, describe_limits(embedding))
        return embedding.vectors

    def _open_reader(self, adata: Any, counts: str, dataset: str) -> CountsReader:
        """Open the cells of an AnnData as a dataset with the name `dataset`."""
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
        """Predict with all heads, as `cellmill predict` does: labels, calibrated probabilities and numbers.

        The result has what the command writes, under the same names, in `obs`, `obsm` and `about`. Its
        method `add_to(adata)` adds all of this to an AnnData. Its property `labels` has the labels of the
        first head.

        `min_probability` and `min_accuracy` are options of section `predict`. Other arguments are as in
        `embed`. Raises ConfigError for a model that predicts neither labels nor numbers.
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
        """Predict the expression of genes that `adata` lacks, as `cellmill impute` does.

        Returns an AnnData of cells by predicted genes. X is float32, log(1 + counts per 10,000).

        `genes` are ids or symbols. None stands for all genes of the model that `adata` lacks. Other
        arguments are as in `embed`. Raises ConfigError for a model that predicts no expression, and for an
        unknown gene. Raises DataError if `adata` measures all of the genes.
        """
        section = _embed_options("impute", options, ["genes"])
        # imported here, because it imports scikit-learn
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
        """Predict the response of the controls in `adata` to perturbations, as `cellmill perturb` does.

        Returns an AnnData of perturbations by genes. X is float32, the change of log(1 + counts per 10,000).

        `perturbations` are names. None stands for all perturbations that the model was trained on.
        `perturbation_column` is the obs column of perturbations, and `control` is the value of control cells
        in that column. By default both are those of the model's training. Each value of obs column `by` is
        predicted separately. Other arguments are as in `embed`.

        Raises ConfigError for a model that predicts no responses, and for an unknown perturbation. Raises
        DataError if there are too few controls.
        """
        given = {"perturbation_column": perturbation_column, "control": control, "by": by}
        section = _embed_options("perturb", options, ["perturbations", *given])
        # imported here, because it imports scikit-learn
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
        """Map the cells to the model's atlas, as `cellmill map` does: labels, neighbours and distances.

        `atlas` is the folder of the atlas, by default the folder `atlas` in the folder of the model.
        `refuse_frac` and `certainty` are options of section `map`. Other arguments are as in `embed`. The
        result's method `add_to(adata)` adds everything to an AnnData. Raises DataError if the atlas is
        missing or damaged, or if the atlas was made with another model.
        """
        given = {"refuse_frac": refuse_frac, "certainty": certainty}
        section = check_options(Map, given, "options of map")
        embed = _embed_options("map", options, [*given, "atlas"])
        folder = find_atlas(self.folder, None if atlas is None else Path(atlas))
        width = self._model.vector_width
        embedder = digest_embedder(self.config)
        cell_atlas = CellAtlas.read(folder, self.config["weights_sha256"], width, embedder)
        with self._open_reader(adata, counts, dataset) as reader:
            embedding = embed_cells(reader, self._inference, embed)
            seen = mark_seen_cells(reader, self.folder)
        _warn(dataset, describe_limits(embedding))
        return map_vectors(cell_atlas, embedding.vectors, seen, section)

    def seen(self, adata: Any, counts: str = "X", *, dataset: str = "adata") -> pd.DataFrame:
        """Find the cells that the model, or one of its ancestors, was trained on, as `cellmill seen` does.

        Returns a table with a row for each cell. Its column `seen` is exact, near or new
        (`seen_cells.KINDS`). Arguments are as in `embed`. Raises DataError if the model knows no gene of
        `adata`, or if the training cells of the model are not known.
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
    """Check the options of section `embed` that a method was called with, and return them as a section.

    `others` are the names of further arguments of the method. Raises ConfigError for an unknown argument.
    """
    known = ["counts", "dataset", *others, *Embed.model_fields]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"{method}: unknown argument {name!r}; {hint}")
    embed: Embed = check_options(Embed, options, f"options of {method}")
    return embed


def _warn(dataset: str, lines: Iterable[str]) -> None:
    """Warn of each line about a dataset, on behalf of the caller of a method."""
    for line in lines:
        warnings.warn(f"{dataset}: {line.removeprefix('warning: ')}", stacklevel=3)
