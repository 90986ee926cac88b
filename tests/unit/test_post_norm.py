"""Families `bert` and `scgpt`: ends of cells are no genes, and each option has its effect."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch, tokenized
from cellmill.models.batch import CLS, EOS, padded, to_tensors, with_ends
from tests.models import KEYS, initialized, spec

N_GENES = 50
SIZES = {"hidden": 16, "layers": 2, "heads": 2}


def _tokens(family: str) -> Tokens:
    return Tokens.model_validate({"max_tokens": 30, "tokenizer": "rank" if family == "bert" else "binned"})


def _model(family: str, **options: Any) -> Any:
    return initialized(spec(N_GENES, _tokens(family), **(SIZES | options | {"family": family}))).eval()


def _batch(family: str) -> Batch:
    rng, lengths = np.random.default_rng(0), (20, 1, 25, 3)
    genes = np.concatenate([rng.permutation(N_GENES)[:n] for n in lengths]).astype(np.int32)
    counts = rng.integers(2, 90, len(genes)).astype(np.uint8)
    tokens, starts = _tokens(family), np.concatenate([[0], np.cumsum(lengths)])
    return to_tensors(tokenized(tokens.load()(tokens), genes, counts, starts, np.arange(len(lengths)) + 5, 30))


@pytest.mark.parametrize("n_ends", [1, 2])
def test_ends_stand_around_each_cell_whose_tokens_stay_as_they_are(n_ends: int) -> None:
    batch = _batch("scgpt")
    ended = with_ends(batch, n_ends)
    cells, before = ([part.split(b.lengths) for part in (b.genes, b.values, b.counts)] for b in (ended, batch))
    for genes, values, counts, *own in zip(*cells, *before):
        assert genes[0] == CLS
        assert n_ends == 1 or genes[-1] == EOS
        inner = slice(1, None if n_ends == 1 else -1)
        for found, expected in zip((genes, values, counts), own):
            torch.testing.assert_close(found[inner], expected, rtol=0, atol=0)
        assert values[0] == counts[0] == 0
    assert ended.cu_seqlens.diff().tolist() == ended.lengths


@pytest.mark.parametrize("family", ["bert", "scgpt"])
def test_only_genes_are_masked_and_each_cell_has_a_target(family: str) -> None:
    objective = "masked_gene" if family == "bert" else "masked_value"
    model = _model(family, ends="cls", objective=objective, mask_frac=0.01)
    view = model.view(_batch(family), **KEYS)
    longer = padded(view, len(view.genes) + 20)
    prepared = model.prepare(longer, **KEYS)
    assert (longer.genes[prepared.targets] > 1).all()
    assert set(prepared.cell[prepared.targets].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"pooling": "cls"}, "pooling: cls needs the token <cls>; set ends to cls or cls_eos, or pooling to mean"),
        ({"embed_layer": -3}, "embed_layer: expected at least -2 with layers = 2, got -3"),
        ({"heads": 3}, "hidden: 16 is not a multiple of heads = 3"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_together_are_refused(options: dict[str, Any], problem: str) -> None:
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
        vectors = [_model(family, **options).embed(_batch(family)) for options in (before, before | option)]
    assert not torch.allclose(*vectors, atol=1e-4)
