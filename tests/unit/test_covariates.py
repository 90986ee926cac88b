"""Tokens of obs columns: where they stand, what they change, and that no objective masks, counts or averages them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cellmill.config.checks import check_together
from cellmill.config.options import TrainOptions
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.stream.batch import Batch
from cellmill.errors import ConfigError
from cellmill.models.batch import to_tensors
from cellmill.models.cell_encoder import CovariatePrefix
from tests.models import initialized, prepare, random_cells, spec

N_GENES = 60
LEVELS = {"assay": ("a", "b"), "donor": ("x", "y", "z"), "tissue": ("l", "m")}
COLUMNS = ["donor", "assay"]
OBJECTIVES = pytest.mark.parametrize("objective", ["cell_decoding", "masked_value", "masked_gene"])


def _tokens(**options: Any) -> Tokens:
    return Tokens.model_validate({"max_tokens": 64, "covariates": COLUMNS} | options)


def _model(objective: str = "cell_decoding", layers: int = 1, **options: Any) -> Any:
    given = {"family": "encoder", "hidden": 16, "layers": layers, "heads": 2, "objective": objective}
    return initialized(spec(N_GENES, _tokens(**options), LEVELS, **given)).eval()


def _cells(n: int = 6) -> Batch:
    rng = np.random.default_rng(0)
    lengths = [20, 31, 1, 14, 2, *rng.integers(1, 5, max(n - 5, 0))][:n]
    cells = random_cells(lengths, _tokens(), N_GENES, rng=rng)
    levels = np.stack([rng.integers(0, len(known) + 1, n) for known in LEVELS.values()], axis=1).astype(np.int32)
    return replace(cells, levels=levels)


def test_a_token_per_column_stands_before_the_genes_of_each_cell() -> None:
    batch = to_tensors(_cells())
    made = CovariatePrefix(_tokens(), LEVELS).before(batch)
    genes, rows, counts, values, ends = [], [], [], [], [0]
    for cell, (start, n) in enumerate(zip(batch.cu_seqlens.tolist(), batch.lengths)):
        assay, donor = batch.levels[cell, :2].tolist()  # type: ignore[index]
        rows += [1 + donor, 1 + len(LEVELS["donor"]) + 1 + assay] + [0] * n
        genes += [SPECIAL.index("<pad>")] * 2 + batch.genes[start : start + n].tolist()
        counts += [0, 0, *batch.counts[start : start + n].tolist()]  # type: ignore[index]
        values += [0.0, 0.0, *batch.values[start : start + n].tolist()]
        ends.append(len(genes))
    assert made.covariate_rows.tolist() == rows  # type: ignore[union-attr]
    assert (made.genes.tolist(), made.values.tolist()) == (genes, values)
    assert made.counts.tolist() == counts  # type: ignore[union-attr]
    assert (made.cu_seqlens.tolist(), made.lengths) == (ends, np.diff(ends).tolist())
    table = _model().covariates(made.covariate_rows)
    assert not table[made.covariate_rows == 0].any()
    donors = batch.levels[:, 1]  # type: ignore[index]
    assert torch.equal(table[made.cu_seqlens[:-1].long()], _model().covariates.tables[0].weight[donors])


def test_without_attention_a_vector_is_that_of_the_genes_alone() -> None:
    batch = to_tensors(_cells())
    plain, told = _model(layers=0, covariates=[]), _model(layers=0)
    torch.testing.assert_close(told.embed(batch), plain.embed(batch))
    assert not torch.allclose(_model().embed(batch), _model(covariates=[]).embed(batch), atol=1e-4)


def test_a_vector_depends_on_the_cell_s_own_levels_of_named_columns() -> None:
    model, batch = _model(), to_tensors(_cells())
    with torch.no_grad():
        for table in model.covariates.tables:
            table.weight.normal_(generator=torch.Generator().manual_seed(1))
        expected = model.embed(batch)
        for column, changes in enumerate((True, True, False)):
            levels = batch.levels.clone()  # type: ignore[union-attr]
            levels[1, column] = (levels[1, column] + 1) % 3
            differs = (model.embed(replace(batch, levels=levels)) - expected).abs().amax(1) > 1e-3
            assert differs.tolist() == [False, changes] + [False] * 4
        unknown = model.embed(replace(batch, levels=torch.zeros_like(batch.levels)))  # type: ignore[arg-type]
        assert torch.equal(model.embed(replace(batch, levels=None)), unknown)


@OBJECTIVES
def test_no_objective_masks_them(objective: str) -> None:
    model, batch = _model(objective), to_tensors(_cells())
    prepared = prepare(model, batch)
    if objective != "cell_decoding":
        prefix = prepared.covariate_rows > 0
        assert not prefix[prepared.targets].any()
        assert set(prepared.cell[prepared.targets].tolist()) == set(range(6))  # every cell has a target
        plain = prepare(_model(objective, covariates=[]), batch)
        cells = torch.zeros(6).index_add(0, prepared.cell[~prefix], prepared.values[~prefix])
        shown = torch.zeros(6).index_add(0, prepared.cell, (~prefix & ~prepared.value_hidden).float())
        torch.testing.assert_close(prepared.center, cells / shown.clamp(min=1))
        assert len(plain.genes) == int((~prefix).sum())


def test_training_makes_some_levels_unknown_by_cell_and_step() -> None:
    model, batch = _model(covariate_unknown_frac=0.25).train(), to_tensors(_cells(4000))
    batch = replace(batch, levels=torch.ones_like(batch.levels))  # type: ignore[arg-type]
    rows = [model.view(batch, seed=3, step=step).covariate_rows for step in (4, 4, 5)]
    assert torch.equal(rows[0], rows[1])
    unknown = rows[0][rows[0] > 0].view(-1, 2) != torch.tensor([2, 6])
    assert unknown.float().mean(0).tolist() == pytest.approx([0.25, 0.25], abs=0.03)
    assert (unknown[:, 0] & unknown[:, 1]).float().mean() == pytest.approx(0.0625, abs=0.02)  # each by itself
    assert not torch.equal(rows[0][rows[0] > 0], rows[2][rows[2] > 0])
    known = model.eval().view(batch, seed=3, step=4).covariate_rows
    assert (known[known > 0].view(-1, 2) == torch.tensor([2, 6])).all()


def test_a_family_without_tokens_of_cells_refuses_them() -> None:
    tree = {"tokens": {"covariates": ["donor"]}, "model": {"family": "profile"}, "train": {"steps": 1}}
    given = TrainOptions.model_validate({"stream": {}, "parallel": {}} | tree)
    assert given.obs_columns() == {"donor": "tokens.covariates"}
    with pytest.raises(ConfigError) as refused:
        check_together(given)
    assert str(refused.value) == (
        "tokens.covariates: family profile has no tokens of obs columns; leave them out, or choose model.family encoder"
    )
