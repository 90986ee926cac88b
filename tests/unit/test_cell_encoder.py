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
from cellmill.models.batch import CLS, EOS, to_tensors, with_ends
from cellmill.models.cell_encoder import CovariatePrefix, attended_state
from tests.checks import refused
from tests.models import KEYS, initialized, prepare, random_cells, spec, train_options
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
    lengths = [20, 31, 1, 14, 2, *rng.integers(1, 5, max(n - 5, 0))][:n]
    cells = random_cells(lengths, _tokens(), N_GENES, rng=rng)
    levels = np.stack(
        [rng.integers(0, len(known) + 1, n) for known in LEVELS.values()], axis=1
    ).astype(np.int32)
    return to_tensors(replace(cells, levels=levels))


def test_a_token_per_column_stands_before_the_genes_of_each_cell() -> None:
    batch: Any = _cells()
    made: Any = CovariatePrefix(_tokens(), LEVELS).add_to(batch)
    assert made.lengths == made.cu_seqlens.diff().tolist() == [n + 2 for n in batch.lengths]
    for name, prefix in (("genes", SPECIAL.index("<pad>")), ("values", 0), ("counts", 0)):
        before, after = (getattr(each, name).split(each.lengths) for each in (batch, made))
        assert [cell.tolist() for cell in after] == [
            [prefix, prefix, *cell.tolist()] for cell in before
        ]
    rows = [
        [1 + donor, 1 + len(LEVELS["donor"]) + 1 + assay]
        for assay, donor, _ in batch.levels.tolist()
    ]
    expected = [row + [0] * n for row, n in zip(rows, batch.lengths)]
    assert [cell.tolist() for cell in made.covariate_rows.split(made.lengths)] == expected
    table = _model().covariates(made.covariate_rows)
    assert not table[made.covariate_rows == 0].any()
    assert torch.equal(
        table[made.cu_seqlens[:-1].long()], _model().covariates.tables[0].weight[batch.levels[:, 1]]
    )


def test_without_attention_a_vector_depends_only_on_genes() -> None:
    batch = _cells()
    torch.testing.assert_close(
        _model(layers=0).embed(batch), _model(layers=0, covariates=[]).embed(batch)
    )
    assert not torch.allclose(_model().embed(batch), _model(covariates=[]).embed(batch), atol=1e-4)


def test_a_vector_depends_on_the_levels_of_its_cell() -> None:
    model: Any
    batch: Any
    model = _model()
    batch = _cells()
    with torch.no_grad():
        for table in model.covariates.tables:
            table.weight.normal_(generator=torch.Generator().manual_seed(1))
        expected = model.embed(batch)
        for column, changes in enumerate((True, True, False)):
            levels = batch.levels.clone()
            levels[1, column] = (levels[1, column] + 1) % 3
            differs = (model.embed(replace(batch, levels=levels)) - expected).abs().amax(1) > 1e-3
            assert differs.tolist() == [False, changes] + [False] * 4
        unknown = model.embed(replace(batch, levels=torch.zeros_like(batch.levels)))
        assert torch.equal(model.embed(replace(batch, levels=None)), unknown)


@pytest.mark.parametrize("objective", ["masked_value", "masked_gene"])
def test_no_objective_masks_them(objective: str) -> None:
    batch = _cells()
    prepared, plain = (
        prepare(_model(objective, **options), batch) for options in ({}, {"covariates": []})
    )
    prefix = prepared.covariate_rows > 0
    assert not prefix[prepared.targets].any()
    assert set(prepared.cell[prepared.targets].tolist()) == set(range(6))  # every cell has a target
    cells = torch.zeros(6).index_add(0, prepared.cell[~prefix], prepared.values[~prefix])
    shown = torch.zeros(6).index_add(0, prepared.cell, (~prefix & ~prepared.value_hidden).float())
    torch.testing.assert_close(prepared.center, cells / shown.clamp(min=1))
    assert len(plain.genes) == int((~prefix).sum())


def test_training_hides_some_levels_by_step() -> None:
    model = _model(covariate_unknown_frac=0.25).train()
    batch = _cells(4000)
    batch = replace(batch, levels=torch.ones_like(batch.levels))  # type: ignore[arg-type]
    rows = [model.view(batch, seed=3, step=step).covariate_rows for step in (4, 4, 5)]
    assert torch.equal(rows[0], rows[1])
    unknown = rows[0][rows[0] > 0].view(-1, 2) != torch.tensor([2, 6])
    assert unknown.float().mean(0).tolist() == pytest.approx([0.25, 0.25], abs=0.03)
    # each by itself
    assert (unknown[:, 0] & unknown[:, 1]).float().mean() == pytest.approx(0.0625, abs=0.02)
    assert not torch.equal(rows[0][rows[0] > 0], rows[2][rows[2] > 0])
    known = model.eval().view(batch, seed=3, step=4).covariate_rows
    assert (known[known > 0].view(-1, 2) == torch.tensor([2, 6])).all()


def test_a_family_without_tokens_of_cells_refuses_them() -> None:
    given = train_options(tokens={"covariates": ["donor"]}, model={"family": "profile"})
    assert given.obs_columns() == {"donor": "tokens.covariates"}
    with refused(
        "tokens.covariates: family profile has no tokens of obs columns; leave them out, or use encoder"
    ):
        check_together(given)


def _encoder(pooling: str, **options: Any) -> Any:
    model = decoding_model("encoder", pooling=pooling, **options)
    if pooling == "attention":
        torch.nn.init.normal_(model.pool_query, generator=torch.Generator().manual_seed(0))
    return model


def test_the_cls_vector_is_the_last_state_before_the_cell() -> None:
    model = _encoder("cls").eval()
    batch = cells_of((5,))
    genes = model.objective.prepare(model.objective.view(batch, **KEYS), **KEYS)
    x = torch.cat([model.cell_token[None], model.inputs(genes)])
    n = len(x)
    for block in model.blocks:
        x = block(x, torch.tensor([0, n], dtype=torch.int32), [n], torch.arange(n))
    prepared = prepare(model, batch)
    torch.testing.assert_close(
        model.cell_vectors(model.states(prepared), prepared), model.norm(x)[:1]
    )


def test_attention_is_a_softmax_over_each_cell() -> None:
    model = _encoder("attention").eval()
    prepared = prepare(model, cells_of((7, 1, 20)))
    # a softmax that is not shifted would overflow
    states = 100 * torch.randn(sum(prepared.lengths), 16)
    expected = [
        (part @ model.pool_query / 4).softmax(0) @ part if len(part) else torch.zeros(16)
        for part in states.split(prepared.lengths)
    ]
    torch.testing.assert_close(
        model.cell_vectors(states, prepared), torch.stack(expected), rtol=1e-4, atol=1e-4
    )
    mean = decoding_model("encoder").cell_vectors(states, prepared)
    torch.testing.assert_close(
        attended_state(states, prepared, torch.zeros(16)), mean, rtol=1e-5, atol=1e-4
    )


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
RANKS, BINS = (
    Tokens.model_validate({"max_tokens": 30, "tokenizer": name}) for name in ("rank", "binned")
)


def _post_norm(family: str, **options: Any) -> Any:
    tokens = RANKS if family == "bert" else BINS
    return initialized(spec(N_GENES, tokens, **SIZES | options | {"family": family})).eval()


def _whole_cells(family: str) -> Batch:
    return to_tensors(random_cells((20, 1, 25, 3), RANKS if family == "bert" else BINS, N_GENES))


@pytest.mark.parametrize("n_ends", [1, 2])
def test_end_tokens_surround_each_unchanged_cell(n_ends: int) -> None:
    batch = _whole_cells("scgpt")
    ended = with_ends(batch, n_ends)
    for name, before, behind in (
        ("genes", [CLS], [EOS]),
        ("values", [0], [0]),
        ("counts", [0], [0]),
    ):
        cells = [cell.tolist() for cell in getattr(batch, name).split(batch.lengths)]
        found = [cell.tolist() for cell in getattr(ended, name).split(ended.lengths)]
        assert found == [[*before, *cell, *behind[: n_ends - 1]] for cell in cells]
    assert ended.cu_seqlens.diff().tolist() == ended.lengths


@pytest.mark.parametrize(
    ("family", "objective"), [("bert", "masked_gene"), ("scgpt", "masked_value")]
)
def test_only_genes_are_masked(family: str, objective: str) -> None:
    model = _post_norm(family, ends="cls", objective=objective, mask_frac=0.01)
    prepared = prepare(model, _whole_cells(family), 100)
    assert (prepared.answers > (1 if objective == "masked_gene" else 0)).all(), "of genes"
    assert set(prepared.cell[prepared.targets].tolist()) == {0, 1, 2, 3}


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
    before = {"ends": "none" if family == "bert" else "cls", "objective": "masked_gene"}
    with torch.inference_mode():
        vectors = [
            _post_norm(family, **options).embed(_whole_cells(family))
            for options in (before, before | option)
        ]
    assert not torch.allclose(*vectors, atol=1e-4)
