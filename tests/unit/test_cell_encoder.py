"""Around the blocks: tokens of obs columns and ends of cells, which nothing masks or averages, and
the poolings.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from cellmill.config.checks import check_together
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import CLS, EOS, EncoderBatch, add_ends, to_tensors
from cellmill.models.cell_encoder import CovariatePrefix, attended_state
from tests.checks import assert_near, refused
from tests.models import KEYS, initialized, prepare, random_cells, seeded, spec, train_options
from tests.unit.test_cell_decoding import cells_of, decoding_model

N_GENES = 60
LEVELS = {"assay": ("a", "b"), "donor": ("x", "y", "z"), "tissue": ("l", "m")}
COLUMNS = ["donor", "assay"]


def _tokens(**options: Any) -> Tokens:
    return Tokens.model_validate({"max_tokens": 64, "covariates": COLUMNS} | options)


def _model(objective: str = "cell_decoding", layers: int = 1, **options: Any) -> Any:
    given = {
        "family": "encoder",
        "hidden": 16,
        "layers": layers,
        "heads": 2,
        "objective": objective,
    }
    return initialized(spec(N_GENES, _tokens(**options), LEVELS, **given)).eval()


def _cells(n: int = 6) -> Batch:
    rng = np.random.default_rng(0)
    lengths = [20, 31, 1, 14, 2]
    lengths += rng.integers(1, 5, n - 5).tolist()
    cells = random_cells(lengths, _tokens(), N_GENES)
    n_levels = [len(names) for names in LEVELS.values()]
    levels = rng.integers(0, np.add(n_levels, 1), (n, len(n_levels)))
    return to_tensors(replace(cells, levels=levels.astype(np.int32)))


def test_a_token_per_column_stands_before_the_genes_of_each_cell() -> None:
    batch: Any = _cells()
    prefixed: Any = CovariatePrefix(_tokens(), LEVELS).add_to(batch)
    assert prefixed.lengths == [n + 2 for n in batch.lengths]
    assert prefixed.cu_seqlens.diff().tolist() == prefixed.lengths
    for field, prefix in (("token_ids", SPECIAL.index("<pad>")), ("values", 0), ("counts", 0)):
        cells = getattr(batch, field).split(batch.lengths)
        prefixed_cells = getattr(prefixed, field).split(prefixed.lengths)
        for cell, prefixed_cell in zip(cells, prefixed_cells):
            assert prefixed_cell.tolist() == [prefix, prefix, *cell.tolist()]
    # rows of the table: none, donors from unknown, assays from unknown
    first_assay = 1 + 1 + len(LEVELS["donor"])
    rows_by_cell = prefixed.covariate_rows.split(prefixed.lengths)
    for cell, (assay, donor, _) in enumerate(batch.levels.tolist()):
        of_genes = [0] * batch.lengths[cell]
        assert rows_by_cell[cell].tolist() == [1 + donor, first_assay + assay, *of_genes]
    covariates = _model().covariates
    vectors = covariates(prefixed.covariate_rows)
    assert not vectors[prefixed.covariate_rows == 0].any()
    of_donors = vectors[prefixed.cu_seqlens[:-1].long()]
    assert torch.equal(of_donors, covariates.tables[0].weight[batch.levels[:, 1]])


def test_without_attention_a_vector_depends_only_on_genes() -> None:
    batch = _cells()
    vectors = _model(layers=0).embed(batch)
    of_genes = _model(layers=0, covariates=[]).embed(batch)
    torch.testing.assert_close(vectors, of_genes)
    with_attention = _model().embed(batch)
    of_genes = _model(covariates=[]).embed(batch)
    assert not torch.allclose(with_attention, of_genes, atol=1e-4)


def test_a_vector_depends_on_the_levels_of_its_cell() -> None:
    model = _model()
    batch: Any = _cells()
    with torch.no_grad():
        for table in model.covariates.tables:
            table.weight.normal_(generator=seeded(1))
        expected = model.embed(batch)
        for column, is_read in enumerate((True, True, False)):
            levels = batch.levels.clone()
            levels[1, column] = (levels[1, column] + 1) % 3
            changed = model.embed(replace(batch, levels=levels))
            differs = (changed - expected).abs().amax(1) > 1e-3
            assert differs.tolist() == [False, is_read, False, False, False, False]
        unknown = torch.zeros_like(batch.levels)
        of_unknown = model.embed(replace(batch, levels=unknown))
        without_levels = model.embed(replace(batch, levels=None))
        assert torch.equal(without_levels, of_unknown)


@pytest.mark.parametrize("objective", ["masked_value", "masked_gene"])
def test_no_objective_masks_covariate_tokens(objective: str) -> None:
    batch = _cells()
    prepared = prepare(_model(objective), batch)
    plain = prepare(_model(objective, covariates=[]), batch)
    is_gene = prepared.covariate_rows == 0
    assert is_gene[prepared.target_tokens].all()
    assert len(plain.token_ids) == int(is_gene.sum())
    for cell in range(6):
        is_of_cell = prepared.token_cells == cell
        assert is_of_cell[prepared.target_tokens].any(), "every cell has a target"
        values = prepared.values[is_of_cell & is_gene]
        n_shown = int((is_of_cell & is_gene & ~prepared.value_hidden).sum())
        assert_near(prepared.center[cell], values.sum() / max(n_shown, 1))


def test_training_hides_some_levels_by_step() -> None:
    model = _model(covariate_unknown_frac=0.25).train()
    batch = _cells(4000)
    batch = replace(batch, levels=torch.ones_like(batch.levels))  # type: ignore[arg-type]

    def draw_unknown(step: int) -> torch.Tensor:
        """(cells, 2): the levels of each cell that are unknown to the model in a step."""
        rows = model.view(batch, seed=3, step=step).covariate_rows
        return rows[rows > 0].view(-1, 2) != torch.tensor([2, 6])

    unknown = draw_unknown(4)
    assert torch.equal(draw_unknown(4), unknown)
    assert not torch.equal(draw_unknown(5), unknown)
    assert unknown.float().mean(0).tolist() == pytest.approx([0.25, 0.25], abs=0.03)
    # each level is drawn by itself
    both = unknown.all(1).float().mean().item()
    assert both == pytest.approx(0.25**2, abs=0.02)
    model.eval()
    assert not draw_unknown(4).any()


def test_a_family_without_covariate_tokens_refuses_them() -> None:
    given = train_options(tokens={"covariates": ["donor"]}, model={"family": "profile"})
    assert given.obs_columns() == {"donor": "tokens.covariates"}
    with refused(
        "tokens.covariates: family profile has no tokens of obs columns; leave them out, or use encoder"
    ):
        check_together(given)


def _encoder(pooling: str, **options: Any) -> Any:
    model = decoding_model("encoder", pooling=pooling, **options)
    if pooling == "attention":
        torch.nn.init.normal_(model.pool_query, generator=seeded(0))
    return model


def test_the_cls_vector_is_the_last_state_before_the_cell() -> None:
    model = _encoder("cls").eval()
    batch = cells_of((5,))
    genes = model.objective.prepare(model.objective.view(batch, **KEYS), **KEYS)
    x = torch.cat([model.cell_token[None], model.inputs(genes)])
    n = len(x)
    cu_seqlens = torch.tensor([0, n], dtype=torch.int32)
    for block in model.blocks:
        x = block(x, cu_seqlens, [n], torch.arange(n))
    prepared = prepare(model, batch)
    vectors = model.cell_vectors(model.states(prepared), prepared)
    torch.testing.assert_close(vectors, model.norm(x)[:1])


def test_attention_is_a_softmax_over_each_cell() -> None:
    model = _encoder("attention").eval()
    prepared = prepare(model, cells_of((7, 1, 20)))
    # a softmax that is not shifted would overflow
    states = 100 * torch.randn(sum(prepared.lengths), 16)
    vectors = model.cell_vectors(states, prepared)
    for vector, states_of_cell in zip(vectors, states.split(prepared.lengths), strict=True):
        if len(states_of_cell) == 0:
            assert not vector.any()
            continue
        scores = states_of_cell @ model.pool_query / 16**0.5
        assert_near(vector, scores.softmax(0) @ states_of_cell, 1e-4)
    mean = decoding_model("encoder").cell_vectors(states, prepared)
    without_query = attended_state(states, prepared, torch.zeros(16))
    assert_near(without_query, mean, 1e-4)


@pytest.mark.parametrize("pooling", ["cls", "attention"])
def test_a_pooling_that_no_loss_trains_is_refused(pooling: str) -> None:
    masked = {"name": "masked_value", "cell_loss_weight": 0}
    both = {"name": "sum", "parts": {"cell_decoding": {}, "masked_value": {"cell_loss_weight": 0}}}
    check_together(train_options(model={"pooling": pooling}, objective=both))
    with refused(
        f"model.pooling {pooling}: the objective does not read the cell's vector; set mean"
    ):
        check_together(train_options(model={"pooling": pooling}, objective=masked))


SIZES = {"hidden": 16, "layers": 2, "heads": 2}
TOKENS = {
    "bert": Tokens.model_validate({"max_tokens": 30, "tokenizer": "rank"}),
    "scgpt": Tokens.model_validate({"max_tokens": 30, "tokenizer": "binned"}),
}


def _post_norm(family: str, **options: Any) -> Any:
    given = SIZES | options | {"family": family}
    return initialized(spec(N_GENES, TOKENS[family], **given)).eval()


def _whole_cells(family: str) -> Batch:
    return to_tensors(random_cells((20, 1, 25, 3), TOKENS[family], N_GENES))


@pytest.mark.parametrize("n_ends", [1, 2])
def test_end_tokens_surround_each_unchanged_cell(n_ends: int) -> None:
    batch = _whole_cells("scgpt")
    ended = add_ends(batch, n_ends)
    for field, first, last in (("token_ids", CLS, EOS), ("values", 0, 0), ("counts", 0, 0)):
        cells = getattr(batch, field).split(batch.lengths)
        ended_cells = getattr(ended, field).split(ended.lengths)
        for cell, ended_cell in zip(cells, ended_cells, strict=True):
            expected = [first, *cell.tolist()]
            if n_ends == 2:
                expected.append(last)
            assert ended_cell.tolist() == expected
    assert ended.cu_seqlens.diff().tolist() == ended.lengths


def test_end_tokens_do_not_enter_the_mean_value_of_a_cell() -> None:
    batch = to_tensors(random_cells((20, 1, 25, 3), _tokens(), N_GENES))
    ended = EncoderBatch.from_batch(add_ends(batch, 2))
    assert_near(ended.center, EncoderBatch.from_batch(batch).center)


@pytest.mark.parametrize(
    ("family", "objective"), [("bert", "masked_gene"), ("scgpt", "masked_value")]
)
def test_only_genes_are_masked(family: str, objective: str) -> None:
    model = _post_norm(family, ends="cls", objective=objective, mask_frac=0.01)
    prepared = prepare(model, _whole_cells(family), 100)
    assert (prepared.targets > (1 if objective == "masked_gene" else 0)).all(), "of genes"
    assert set(prepared.token_cells[prepared.target_tokens].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"pooling": "cls"},
            "pooling: cls needs the token <cls>; set ends to cls or cls_eos, or pooling to mean",
        ),
        ({"embed_layer": -3}, "embed_layer: expected at least -2 with layers = 2, got -3"),
        ({"heads": 3}, "hidden: 16 is not a multiple of heads = 3"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_together_are_refused(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        FamilyConfig.model_validate(SIZES | {"family": "bert"} | options)


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("bert", {"activation": "gelu"}),
        ("bert", {"norm_eps": 0.1}),
        ("bert", {"ends": "cls"}),
        ("scgpt", {"cls_value": -2.0}),
    ],
    ids=str,
)
def test_each_option_changes_the_embedding(family: str, option: dict[str, Any]) -> None:
    options = {"ends": "none" if family == "bert" else "cls", "objective": "masked_gene"}
    batch = _whole_cells(family)
    with torch.inference_mode():
        before = _post_norm(family, **options).embed(batch)
        after = _post_norm(family, **options | option).embed(batch)
    assert not torch.allclose(before, after, atol=1e-4)
