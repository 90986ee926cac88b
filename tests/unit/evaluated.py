"""A simulated dataset under evaluation, with a small model of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cellmill.config.evaluate import Evaluate
from cellmill.data.inputs.formats import open_counts
from cellmill.data.shards.manifest import Manifest
from cellmill.evaluate.embed import load_for_inference
from cellmill.evaluate.task import Context, EvaluatedModel
from tests.unit.exported import export_model, make_corpus


def make_context(folder: Path, simulated: Path, **model_options: Any) -> Context:
    """Every second cell is scored, in 3 folds."""
    corpus = make_corpus(folder, simulated)
    exported = export_model(folder / "model", corpus["vocabulary"], **model_options)
    network, vocabulary, tokens, config = load_for_inference(exported)
    options = Evaluate.model_validate({"folds": 3, "seed": 4})
    model = EvaluatedModel(network, config, vocabulary, tokens, Manifest.read(corpus["manifest"]), options.seed)
    reader = open_counts(corpus["cells"])
    scored = np.arange(reader.n_obs) % 2 == 0
    vectors = np.zeros((reader.n_obs, 16), np.float32)
    return Context("simulated", reader, scored, vectors, {"label": reader.obs["cell_type"]}, model, options)
