"""Task `reconstruct`: the training objective on the evaluated cells, compared with gene statistics of
training cells (docs/evaluation.md).

The random numbers of a mask depend on the seed, the cell and the position only. So the same genes are
masked in every evaluation.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cellmill.config.corpus import DATASET
from cellmill.config.load import check_options
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tasks import ReconstructConfig
from cellmill.data.shards.obs import parse_columns
from cellmill.data.stream.micro_batches import split_batch
from cellmill.errors import ConfigError
from cellmill.evaluate import draws
from cellmill.evaluate.draws import draw_cells
from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.evaluate.features.cell_features import TOKEN_BUDGET
from cellmill.evaluate.inference.embed import (
    ROW_BLOCK,
    inference_mode,
    read_levels,
    tokenize_blocks,
)
from cellmill.evaluate.inference.label_counts import count_labels
from cellmill.evaluate.inference.predict import find_classifiers
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.models.batch import copy_to_device, to_tensors
from cellmill.models.build import build
from cellmill.models.export import fill_buffers, spec_of
from cellmill.models.family import Model
from cellmill.models.objective import EVALUATION_STEP
from cellmill.parallel.materialize import to_empty
from cellmill.runs.results import TaskResult

# At most this many cells are used. The standard error of R² is then below 0.001.
MAX_RECONSTRUCTED_CELLS = 10_000


class Reconstruct(Task):
    config: ReconstructConfig

    def run(self, context: Context) -> TaskResult:
        """Metrics and verdicts of the objective on the evaluated cells.

        Raises Skipped if no scored cell has a gene that the model knows.
        """
        cells = draw_cells(
            np.flatnonzero(context.scored),
            MAX_RECONSTRUCTED_CELLS,
            context.options.seed,
            draws.RECONSTRUCTED_CELLS,
        )
        model = self._with_objective_options(context.model)
        network = model.network
        arrays = _observe(context, network, cells)
        if not arrays:
            raise Skipped("no scored cell has a gene that the model knows")
        for head, classifier in find_classifiers(network, context.model.config).values():
            # Without option `objective` this changes the network that all tasks share, which is
            # harmless: only `judge` reads the temperature.
            head.calibrated_temperature = (classifier["calibration"] or {}).get("temperature")
        metrics, verdicts = network.objective.judge_observed(
            *arrays, statistics=model.gene_statistics
        )
        figures, notes = _describe_unknown_labels(context, network, cells)
        return TaskResult(
            figures={"n_cells": len(cells)} | metrics | figures, verdicts=verdicts, notes=notes
        )

    def estimate_s(self, sizes: DatasetSizes) -> float:
        n = sizes.count_cells(MAX_RECONSTRUCTED_CELLS)
        # masks, states and predictions take about as long as four embeddings
        return 0.2 + sizes.read_s() + 4 * n * sizes.forward_s

    def _with_objective_options(self, model: EvaluatedModel) -> EvaluatedModel:
        """The evaluated model, or a copy of the model if option `objective` is set. The objective of the
        copy has the options that are set. The copy has the parameters of the model.

        Raises ConfigError if the options would change what was trained.
        """
        if not self.config.objective:
            return model
        spec = spec_of(model.config, model.vocabulary.n_genes)
        changed = spec.objective.model_dump() | self.config.objective
        objective = check_options(ObjectiveConfig, changed, "evaluate.tasks.reconstruct.objective")
        network = to_empty(build(replace(spec, objective=objective)), "cpu")
        trained = model.network.state_dict()
        shapes = {(name, tensor.shape) for name, tensor in network.state_dict().items()}
        trained_shapes = {(name, tensor.shape) for name, tensor in trained.items()}
        # names and shapes of tensors that only one of the two networks has
        differing = sorted(shapes ^ trained_shapes)
        if differing:
            raise ConfigError(
                f"evaluate.tasks.reconstruct.objective: expected options that leave the trained parameters as they "
                f"are, got {self.config.objective}, which changes {differing[0][0]}; leave out what changes it"
            )
        network.load_state_dict(trained, assign=True)
        fill_buffers(network, model.config.get("seed", 0), model.vocabulary)
        network.to(next(model.network.parameters()).device).eval()
        return replace(model, network=network)


def _describe_unknown_labels(
    context: Context, network: Model, cells: np.ndarray
) -> tuple[dict[str, Any], list[str]]:
    """Figures on `cells` (indices) whose label the model does not know, and a note for each obs column with
    such cells. These cells are not judged.
    """
    figures: dict[str, Any] = {}
    notes = []
    dataset = context.reader.dataset or context.dataset
    for name, part in network.objective.parts_by_name().items():
        prefix = f"{name}." if name else ""
        judged = part.judged_labels()
        obs = context.reader.read_obs([*judged, DATASET]).iloc[cells]
        for column, labels in judged.items():
            counts = count_labels(obs, dataset, column, labels)
            figures |= {f"{prefix}{key}": value for key, value in counts.figures().items()}
            if counts.problem:
                consequence = "no cell is judged"
                if counts.n_unknown < counts.n_labelled:
                    consequence = "such cells are not judged"
                notes.append(f"{part.config.name} of {counts.problem}; {consequence}.")
    return figures, notes


def _observe(context: Context, network: Model, cells: np.ndarray) -> list[np.ndarray]:
    """The arrays that `objective.observe` returns, each concatenated over all batches of `cells` (indices).
    The list is empty if no cell has a token.
    """
    model = context.model
    reader = context.reader
    objective = network.objective
    device = next(network.parameters()).device
    obs_numbers = None
    if objective.number_columns:
        obs_numbers = parse_columns(
            reader.read_obs(objective.number_columns), objective.number_columns
        )
    per_cell = {"levels": read_levels(reader, network), "numbers": obs_numbers}
    keys = {"seed": context.options.seed, "step": EVALUATION_STEP}
    # the arrays that `observe` returned for each micro-batch
    observed: list[list[np.ndarray]] = []
    with inference_mode(device, context.options.precision):
        batches = tokenize_blocks(
            reader.rows(ROW_BLOCK),
            context.gene_columns,
            model.vocabulary,
            model.tokens,
            chosen=np.isin(np.arange(reader.n_obs), cells),
            with_counts=objective.config.needs_counts,
            per_cell=per_cell,
        )
        for batch in batches:
            for micro_batch in split_batch(batch, TOKEN_BUDGET):
                view = network.view(to_tensors(micro_batch), **keys)
                prepared = copy_to_device(network.prepare(view, **keys), device)
                arrays = []
                for tensor in objective.observe(network, prepared):
                    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16
                        tensor = tensor.float()
                    arrays.append(tensor.cpu().numpy())
                observed.append(arrays)
    return [np.concatenate(pieces) for pieces in zip(*observed)]
