"""A model with covariates reads them wherever it embeds cells, as `cellmill embed` does."""

from pathlib import Path

import anndata as ad
import numpy as np
import pytest

import cellmill
from cellmill import open_cells
from cellmill.evaluate.features.cell_features import embed_counts, read_rows
from cellmill.evaluate.hidden_genes.partly_hidden_cells import PartlyHiddenCells
from cellmill.evaluate.inference import impute
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.imputation.training_cell_regressions import TrainingCellRegressions
from cellmill.evaluate.training_shards import read_cell_names
from tests.unit.evaluated import make_context

TOKENS = {"tokenizer": "continuous", "covariates": ["batch"], "max_tokens": 512}
LEVELS = {"batch": ("batch_0", "batch_1")}
NO_GENES = np.zeros(0, np.int64)
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("covariates")


@pytest.fixture(scope="module")
def context(folder: Path, corpus: dict[str, Path]) -> Context:
    return make_context(folder, corpus, tokens=TOKENS, levels=LEVELS, objective="cell_decoding")


@pytest.fixture(scope="module")
def cells(corpus: dict[str, Path]) -> ad.AnnData:
    return open_cells(corpus["cells"])


@pytest.fixture(scope="module")
def vectors(folder: Path, context: Context, cells: ad.AnnData) -> np.ndarray:
    """What `embed` gives, which depends on the batch."""
    model = cellmill.load(folder / "model")
    own = model.embed(cells)
    without = model.embed(_in_batch(cells, "another"))
    assert np.abs(own - without).max(1).min() > 10 * ROUNDING
    return own


def _in_batch(cells: ad.AnnData, batch: str) -> ad.AnnData:
    changed = cells.copy()
    changed.obs["batch"] = batch
    return changed


def test_tasks_embed_cells_with_their_covariates(context: Context, vectors: np.ndarray) -> None:
    chosen = np.arange(3, 90, 3)
    counts = read_rows(context.reader, chosen)
    network = context.model.network
    hidden = PartlyHiddenCells.from_context(context, chosen, counts, NO_GENES)
    for found in (embed_counts(context, chosen, counts, network), hidden.embed(network)):
        np.testing.assert_allclose(found, vectors[chosen], atol=ROUNDING)


def test_training_cells_are_embedded_with_covariates(
    context: Context, cells: ad.AnnData, vectors: np.ndarray
) -> None:
    regressions = TrainingCellRegressions.read(context, NO_GENES)
    assert regressions is not None
    names = [name for _, name in read_cell_names(context.model.manifest, ["train"])]
    found = regressions.training_cells.embed(context.model.network)
    expected = vectors[cells.obs_names.get_indexer(names)]
    np.testing.assert_allclose(found, expected, atol=ROUNDING)


def test_imputed_values_depend_on_covariates(
    folder: Path, context: Context, cells: ad.AnnData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(impute, "ROW_BLOCK", 70)
    model = cellmill.load(folder / "model")
    panel = cells[:160, :-9].copy()
    batches = [model.impute(_in_batch(panel, batch)).X for batch in LEVELS["batch"]]
    is_first = (panel.obs["batch"] == LEVELS["batch"][0]).to_numpy()
    expected = np.where(is_first[:, None], *batches)
    np.testing.assert_allclose(model.impute(panel).X, expected, atol=ROUNDING)
    assert np.abs(batches[0] - batches[1]).max() > 10 * ROUNDING
