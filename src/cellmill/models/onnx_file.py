"""The embedder of an exported model as an ONNX file, for runtimes without torch.

Inputs are `genes` (cells, tokens) int64, padded with 0, and `values` (cells, tokens), padded with
0, as the model's tokenizer makes them; cells have at least one gene. The output `cell_vector` is
(cells, width) float32. Metadata `tokens`, `vocabulary` and `vocabulary_digest` hold the tokenizer's
options and the genes of the tokens in their order; `medians`, and `variability` if there is one, the
numbers by which genes of a cell are sorted and cut.
"""

import json
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.stream.batch import Batch
from cellmill.errors import ConfigError, DataError
from cellmill.files import atomic_path
from cellmill.models.batch import PAD_TOKEN
from cellmill.models.export import load_model, spec_of
from cellmill.models.family import Model

try:
    import onnx
    import onnxruntime
    import onnxscript  # noqa: F401  torch's exporter imports it
except ImportError as error:
    raise ConfigError(
        f"the package {error.name} is not installed; pip install 'cellmill[onnx]'"
    ) from None

TOLERANCE = 1e-4
"""Largest difference from the model's vectors, relative to the largest number of the vectors."""
TRACED = (5, 4)  # number of genes of each cell of the trace
COMPARED = (3, 7, 1)  # likewise for the comparison: other numbers of cells and genes


class Padded(nn.Module):
    """A model whose forward pass is `embed_padded`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, genes: Tensor, values: Tensor) -> Tensor:
        return self.model.embed_padded(genes, values)


def write_onnx(folder: Path, out: Path) -> float:
    """Write the model's embedder as ONNX; return how far its vectors differ from the model's.

    The difference is relative to the largest number of the vectors. Raise ConfigError or DataError.
    """
    model, vocabulary, config = load_model(folder)
    spec = spec_of(config, vocabulary.n_genes)
    tokens = spec.tokens
    what = ""
    if type(model).embed_padded is Model.embed_padded:
        what = f"family {spec.model.family}"
    for option in ("covariates", "zero_frac"):
        if getattr(tokens, option):
            what = f"tokens.{option}"
    # genes are drawn by a hash of the counts, which the file does not have
    if tokens.truncation == "random" and tokens.max_tokens < vocabulary.n_genes:
        what = f"tokens.truncation random with fewer max_tokens than genes ({vocabulary.n_genes:,})"
    if what:
        raise ConfigError(
            f"{folder}: {what} cannot be exported to ONNX; families encoder, autoencoder and profile can, without "
            "covariates, genes without counts and a random choice of genes"
        )
    with atomic_path(out) as temporary:
        _trace(model, _draw_cells(tokens, vocabulary.n_genes, TRACED), temporary)
        exported = onnx.load(temporary)
        about = {
            "tokens": json.dumps(tokens.model_dump(mode="json")),
            "vocabulary": "\n".join(vocabulary.gene_ids),
            "medians": "\n".join(map(str, vocabulary.medians.tolist())),
        }
        if vocabulary.variability is not None:
            about["variability"] = "\n".join(map(str, vocabulary.variability.tolist()))
        onnx.helper.set_model_props(exported, about | {"vocabulary_digest": vocabulary.digest})
        onnx.save(exported, temporary)
        session = onnxruntime.InferenceSession(str(temporary), providers=["CPUExecutionProvider"])
        difference = _difference(session, model, *_draw_cells(tokens, vocabulary.n_genes, COMPARED))
        if not difference <= TOLERANCE:
            raise DataError(
                f"{out}: not written: its vectors differ from the model's by {difference:.1g}, more than {TOLERANCE:g}"
            )
    return difference


def _draw_cells(tokens: Tokens, n_genes: int, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Draw genes and values of cells by a fixed seed, padded.

    A cell has as many genes as in `lengths`, or as many as it can have.
    """
    lengths = tuple(min(n, n_genes, tokens.max_tokens) for n in lengths)
    draw = torch.Generator().manual_seed(0)
    longest = max(lengths)
    is_token = torch.arange(longest) < torch.tensor(lengths)[:, None]
    rows = [torch.randperm(n_genes, generator=draw)[:longest] for _ in lengths]
    genes = torch.stack(rows) + len(SPECIAL)
    if tokens.value_kind == "scalar":
        values = 5 * torch.rand(len(lengths), longest, generator=draw)
    elif tokens.value_kind == "place":
        values = torch.arange(longest).expand(len(lengths), -1)
    else:
        values = torch.randint(1, tokens.n_values, (len(lengths), longest), generator=draw)
    return torch.where(is_token, genes, PAD_TOKEN), values * is_token


def _trace(model: Model, example: tuple[Tensor, Tensor], out: Path) -> None:
    """Write the model as ONNX for any number of cells and tokens, traced with the `example`."""
    shapes = {0: torch.export.Dim("cells"), 1: torch.export.Dim("tokens")}
    quiet = logging.getLogger("torch.onnx")
    before = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's exporter warns about itself
            torch.onnx.export(
                Padded(model).eval(),
                example,
                out,
                dynamo=True,
                input_names=["genes", "values"],
                output_names=["cell_vector"],
                dynamic_shapes={"genes": shapes, "values": shapes},
                external_data=False,
                verbose=False,
            )
    finally:
        quiet.setLevel(before)


def _difference(session: Any, model: Model, genes: Tensor, values: Tensor) -> float:
    """Return the largest relative difference between the file's vectors and the model's."""
    (found,) = session.run(["cell_vector"], {"genes": genes.numpy(), "values": values.numpy()})
    is_token = genes != PAD_TOKEN
    lengths = is_token.sum(1)
    packed = Batch(
        token_ids=genes[is_token],
        values=values[is_token],
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()]),
        cell_ids=torch.arange(len(genes)),
        lengths=lengths.tolist(),
    )
    with torch.no_grad():
        expected = model.embed(packed).numpy()
    if found.shape != expected.shape:
        return math.inf
    return float(np.abs(found - expected).max() / np.abs(expected).max())
