"""Baselines of targets in views: what is known without a look at the cell is level with them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from small_corpus import write_corpus

from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.rows import SparseCounts
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards
from cellmill.data.stream.batch_tokenizer import BatchTokenizer
from cellmill.evaluate import training_shards
from cellmill.evaluate.training_shards import read_gene_statistics
from cellmill.models.batch import to_tensors
from cellmill.models.objective import EVALUATION_STEP, STATISTICS_STEP
from cellmill.runs.results import TOLERANCE
from tests.models import objective_of

N_CELLS = 4000
RATES = np.geomspace(0.1, 12, 40)  # mean count of each gene
TOKENS = Tokens.model_validate({"tokenizer": "continuous", "max_tokens": 64})
VIEWS: list[dict[str, Any]] = [
    {"view": "thin", "weights": "log1p"},
    {"view": "thin", "weights": "counts"},
    {"view": "drop"},
    {"view": "drop_thin"},
    {"view": "drop_thin", "view_loss": "vicreg"},
]


def _draw_counts(n_cells: int, seed: int) -> sp.csr_matrix:
    """Cells of one kind: no gene's count tells anything about another's."""
    counts = np.random.default_rng(seed).poisson(RATES, (n_cells, len(RATES)))
    return sp.csr_matrix(counts.astype(np.float32))


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("views")
    return write_corpus(folder, _draw_counts(N_CELLS, seed=1), cells_per_shard=1500)


def _objective(name: str, **options: Any) -> Any:
    objective = objective_of(TOKENS, name, **options)
    objective.training = False
    return objective


def _prepare(objective: Any, counts: sp.csr_matrix, seed: int, step: int) -> Any:
    cells = SparseCounts(
        counts.indptr.astype(np.int64), counts.indices.astype(np.int32), counts.data.astype(int)
    )
    tokenizer = BatchTokenizer(TOKENS, counts.shape[1])
    batch = to_tensors(tokenizer.make_batch(cells, np.arange(counts.shape[0]), with_counts=True))
    view = objective.view(batch, seed=seed, step=step)
    return objective.prepare(view, seed=seed, step=step)


def _mean_profile(prepared: Any) -> np.ndarray:
    genes = prepared.entry_token_ids.numpy() - len(SPECIAL)
    return np.bincount(genes, prepared.entry_targets.double(), len(RATES)) / len(prepared.n_entries)


@pytest.mark.parametrize("options", [*VIEWS, {"view": "thin", "target": "all"}], ids=str)
def test_a_constant_profile_is_level(manifest: Manifest, options: dict[str, Any]) -> None:
    objective = _objective("cell_decoding", **options)
    constant = _mean_profile(_prepare(objective, _draw_counts(N_CELLS, 2), seed=5, step=3))
    evaluated = _prepare(objective, _draw_counts(N_CELLS, 3), seed=0, step=EVALUATION_STEP)
    genes = evaluated.entry_token_ids.numpy() - len(SPECIAL)
    weights = 1 / np.repeat(evaluated.n_entries, evaluated.n_entries)
    observed = (genes, np.log(constant)[genes], evaluated.entry_targets.numpy(), weights)
    statistics = read_gene_statistics(manifest, objective, seed=0)
    metrics, [verdict] = objective.judge(*observed, statistics=statistics)
    assert metrics["n_targets"] == len(evaluated.n_entries)
    assert verdict.outcome == "level"
    assert abs(verdict.difference) < TOLERANCE


def _targets(prepared: Any) -> tuple[np.ndarray, np.ndarray]:
    """Genes and targets of the masked tokens of the second part."""
    batch = prepared.part_batches[1]
    is_value = batch.targets.is_floating_point()
    token_ids = batch.token_ids[batch.target_tokens] if is_value else batch.targets
    return token_ids.numpy() - len(SPECIAL), batch.targets.numpy()


@pytest.mark.parametrize("name", ["masked_gene", "masked_value"])
@pytest.mark.parametrize("options", VIEWS, ids=str)
def test_a_part_in_a_view_is_level_without_knowledge(
    manifest: Manifest, options: dict[str, Any], name: str
) -> None:
    # more than half of the tokens are masked, so that cells of few tokens count like others
    objective = _objective("sum", parts={"cell_decoding": options, name: {"mask_frac": 0.6}})
    masked = objective.parts[name]
    other = _prepare(objective, _draw_counts(N_CELLS, 2), seed=5, step=3)
    evaluated = _prepare(objective, _draw_counts(N_CELLS, 3), seed=0, step=EVALUATION_STEP)

    statistics = read_gene_statistics(manifest, objective, seed=0).shown
    assert statistics is not None
    assert statistics.n_cells == N_CELLS
    known_genes, known_targets = _targets(other)
    genes, targets = _targets(evaluated)
    counts = np.bincount(known_genes, minlength=len(RATES))
    if name == "masked_gene":
        is_correct = np.zeros(len(genes), bool)
        observed = (genes, is_correct, -np.log(counts / counts.sum())[genes])
    else:
        means = np.bincount(known_genes, known_targets, len(RATES)) / counts
        observed = (genes, targets, means[genes])
    _, [verdict] = masked.judge(*observed, statistics=statistics)
    # 4,000 cells of 10 to 20 targets have an error of about the tolerance
    assert abs(verdict.difference) < 2 * TOLERANCE


def test_queries_count_like_hidden_genes_of_all_cells(tmp_path: Path) -> None:
    """Of two kinds of cells, one detects few genes, and often no hidden one."""

    def draw(seed: int) -> sp.csr_matrix:
        depth = np.where(np.arange(N_CELLS) % 2, 1, 0.02)[:, None]
        counts = sp.csr_matrix(np.random.default_rng(seed).poisson(RATES * depth))
        return counts[counts.getnnz(1) > 0].astype(np.float32)

    counts = draw(2)
    manifest = write_corpus(tmp_path, counts)
    objective = _objective("query_decoding")
    objective.n_genes = len(RATES)
    statistics = read_gene_statistics(manifest, objective, seed=0)
    means = statistics.n_tokens / statistics.n_cells * statistics.mean
    prepared = _prepare(objective, draw(3), seed=0, step=EVALUATION_STEP)
    genes = prepared.query_token_ids.numpy() - len(SPECIAL)
    values = prepared.query_targets.double().numpy()
    weights = prepared.importance_weights.double().numpy()
    # the means times the factor of least weighted error
    factor = np.sum(weights * values * means[genes]) / np.sum(weights * means[genes] ** 2)
    metrics, [verdict] = objective.judge(
        genes, values, factor * means[genes], weights, statistics=statistics
    )
    detected_frac = counts.nnz / np.prod(counts.shape)
    assert metrics["detected_frac"] == pytest.approx(detected_frac, rel=0.02)
    assert abs(verdict.difference) < TOLERANCE


@pytest.mark.parametrize("options", VIEWS, ids=str)
def test_profiles_are_sums_over_one_cell_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    manifest = write_corpus(tmp_path, 20)
    objective = _objective("sum", parts={"cell_decoding": options, "masked_gene": {}})
    monkeypatch.setattr(training_shards, "BLOCK", 3)
    n_genes = manifest.n_genes
    profile = np.full(n_genes, 1 / n_genes)
    n_shown = np.zeros(n_genes, int)
    n_profiles = 1
    cell_id = 0
    tokenizer = BatchTokenizer(TOKENS, n_genes)
    for shard in open_shards(manifest, "train"):
        for row in range(shard.n_obs):
            cell = shard.read(row, 1)
            batch = to_tensors(tokenizer.make_batch(cell, np.array([cell_id]), with_counts=True))
            view = objective.view(batch, seed=4, step=STATISTICS_STEP)
            cell_id += 1
            hidden = dict(zip(view.entry_token_ids.tolist(), view.entry_counts.tolist()))
            for gene in view.token_ids[: view.lengths[0]].tolist():
                n_shown[gene - len(SPECIAL)] += 1
            expression = {
                gene: count if options.get("weights") == "counts" else np.log(1 + count)
                for gene, count in hidden.items()
            }
            n_profiles += bool(hidden)
            for gene, value in expression.items():
                profile[gene - len(SPECIAL)] += value / sum(expression.values())
    assert cell_id == 20
    statistics = read_gene_statistics(manifest, objective, seed=4)
    found = statistics.log_count_profile
    if options.get("weights") == "counts":
        found = statistics.count_profile
    assert statistics.shown is not None
    np.testing.assert_allclose(found, profile / n_profiles, rtol=1e-9)
    np.testing.assert_array_equal(statistics.shown.n_tokens, n_shown)
