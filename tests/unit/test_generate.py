"""Generated cells are those of full forward passes, whatever is generated beside them, in a valid .h5ad."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch

from cellmill.cli import main
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import EncoderBatch
from cellmill.models.families.autoregressive import (
    GeneratedCell,
    Sampling,
    ends_before,
    generate_cells,
    next_genes,
    next_values,
)
from tests.unit.exported import export_model
from tests.unit.small_corpus import vocabulary_of
from tests.unit.test_autoregressive import MAX_TOKENS, N_GENES, model_of

CELLS = range(40, 52)


def generator(tokenizer: str = "continuous") -> Any:
    return model_of(tokenizer, hidden=32).double().eval()


def state_after(model: Any, genes: list[int], values: torch.Tensor) -> torch.Tensor:
    """(1, H): the last state of a full forward pass over vocabulary rows `genes`."""
    if not genes:
        return model.start[None]  # type: ignore[no-any-return]
    n = len(genes)
    batch = Batch(torch.tensor(genes) + 2, values, torch.tensor([0, n]).int(), torch.tensor([0]))
    return model.states(EncoderBatch.prepared(batch))[-1:]  # type: ignore[no-any-return]


@torch.no_grad()
def uncached(model: Any, sampling: Sampling, number: int) -> GeneratedCell:
    """One cell, by a full forward pass for each of its genes."""
    cell, genes, objective = torch.tensor([number]), [], model.objective
    values = torch.zeros(0, dtype=torch.int64 if objective.tokens.value_kind != "scalar" else torch.float32)
    while True:
        state, place = state_after(model, genes, values), len(genes)
        ends = bool(ends_before(model, state, cell, sampling, place))
        if ends or place == sampling.max_genes:
            return GeneratedCell(genes, values.tolist() if objective.predicts_values else None, ends)
        listed = torch.tensor([genes], dtype=torch.int64) + 2
        gene = next_genes(model, state, listed, cell, sampling)
        values = torch.cat([values, next_values(model, state, gene, cell, sampling, place)])
        genes = [*genes, int(gene) - 2]


@pytest.mark.parametrize(
    ("tokenizer", "sampling"),
    [
        pytest.param("continuous", Sampling(MAX_TOKENS, seed=1), marks=pytest.mark.full),
        ("continuous", Sampling(20, temperature=0.5, top_k=5, seed=2, prompt=(7, 3))),
        pytest.param("binned", Sampling(MAX_TOKENS, seed=3), marks=pytest.mark.full),
        pytest.param("rank", Sampling(MAX_TOKENS, temperature=0), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_cells_are_those_of_full_forward_passes(tokenizer: str, sampling: Sampling) -> None:
    model = generator(tokenizer)
    found = generate_cells(model, sampling, CELLS)
    expected = [uncached(model, sampling, number) for number in CELLS]
    for own, reference in zip(found, expected):
        assert (own.genes, own.ended) == (reference.genes, reference.ended)
        assert (own.values is None) == (tokenizer == "rank")
        np.testing.assert_allclose(own.values or 0, reference.values or 0, rtol=1e-6)
        assert len(set(own.genes)) == len(own.genes)
        assert tuple(own.genes[: len(sampling.prompt)]) == sampling.prompt
    lengths = {len(cell.genes) for cell in found}
    assert len(lengths) > 2 or sampling.temperature == 0, "cells of one length test no leaving"


def test_greedy_genes_are_the_likeliest_of_one_full_forward_pass() -> None:
    model = generator()
    [cell] = generate_cells(model, Sampling(25, temperature=0), range(1))
    values = torch.tensor(cell.values)
    n = len(cell.genes)
    assert n == 25
    genes = torch.tensor(cell.genes) + 2
    batch = Batch(genes, values, torch.tensor([0, n]).int(), torch.tensor([0]))
    with torch.no_grad():
        before = torch.cat([model.start[None], model.states(EncoderBatch.prepared(batch))[:-1]])
        logits = before @ model.gene_embedding.weight.T + model.gene_bias
        predicted = model.objective.values(model, before, genes)
    logits[:, :2] = -torch.inf
    for place in range(n):
        assert int(logits[place].argmax()) == int(genes[place])
        logits[place + 1 :, genes[place]] = -torch.inf
    torch.testing.assert_close(predicted, values, rtol=1e-5, atol=1e-5)


def test_a_cell_depends_on_its_number_and_the_seed_alone() -> None:
    model, sampling = generator(), Sampling(MAX_TOKENS, seed=5)
    together = generate_cells(model, sampling, range(9))
    assert [generate_cells(model, sampling, range(i, i + 1))[0] for i in range(9)] == together
    assert generate_cells(model, replace(sampling, seed=6), range(9)) != together
    assert len({tuple(cell.genes) for cell in together}) == 9


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (1.0, 5)])
def test_genes_are_drawn_from_the_softmax(temperature: float, top_k: int | None) -> None:
    model, n = generator(), 4000
    with torch.no_grad():
        model.start.mul_(4)
        logits = (model.gene_embedding.weight @ model.start + model.gene_bias)[2:] / temperature
    cells = generate_cells(model, Sampling(1, temperature, top_k, seed=1), range(n))
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    expected = n * logits.softmax(0).detach().numpy()
    found = np.bincount([cell.genes[0] for cell in cells], minlength=N_GENES)
    assert (found[expected == 0] == 0).all()
    likely = expected > 0
    chi2 = (np.square(found - expected)[likely] / expected[likely]).sum()
    assert chi2 < likely.sum() + 5 * np.sqrt(2 * likely.sum())


def exported(folder: Path, **options: Any) -> Path:
    genes = folder / "genes.tsv"
    vocabulary_of([f"ENSG{i:011d}" for i in range(40)]).write(genes)
    family = {"family": "autoregressive", "objective": "next_gene"}
    return export_model(folder / "model", genes, {"max_tokens": 16}, **(family | options))


def test_the_file_has_genes_in_generated_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = exported(tmp_path)
    command = f"generate --model {model} --cells 10 --prompt g7,ENSG00000000003 --seed 4"
    for out, batch in (("a", 64), ("b", 3)):
        assert main(f"{command} --out {tmp_path / out}.h5ad --batch-cells {batch}".split()) == 0
    a, b = (ad.read_h5ad(tmp_path / f"{name}.h5ad") for name in "ab")
    for own, other in ((a.X, b.X), (a.layers["rank"], b.layers["rank"])):
        for part in ("data", "indices", "indptr"):
            assert (getattr(own, part) == getattr(other, part)).all()
    assert (a.n_obs, a.n_vars) == (10, 40)
    assert list(a.var["symbol"].iloc[[7, 3]]) == ["g7", "g3"]
    for cell in range(10):
        genes = a.X.indices[a.X.indptr[cell] : a.X.indptr[cell + 1]]
        assert genes[:2].tolist() == [7, 3]
        assert len(set(genes)) == len(genes) == a.obs["n_genes"].iloc[cell] <= 16
        rank = a.layers["rank"][cell].toarray()[0]
        assert (rank[genes] == np.arange(1, len(genes) + 1)).all()
    assert a.obs["ended"][a.obs["n_genes"] < 16].all()
    assert a.uns["cellmill"]["prompt"].tolist() == ["ENSG00000000007", "ENSG00000000003"]
    assert "10 cells, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "options", "text"),
    [
        ("--prompt g7,g99", {}, "--prompt: 'g99' is not in the model's vocabulary; did you mean 'g9'?"),
        ("--prompt g7,g7", {}, "--prompt: 'g7' is there twice"),
        ("--max-genes 17", {}, "--max-genes: expected 1 (genes of --prompt) to 16 (tokens.max_tokens of the model)"),
        (f"--prompt {','.join(f'g{i}' for i in range(17))}", {}, "--prompt: expected at most 16 genes (tokens.max_tok"),
        ("--seed -1", {}, "--seed: expected 0 to 2147483647, got -1"),
        ("--temperature -1", {}, "--temperature: expected 0 or more, got -1"),
        ("", {"family": "encoder", "objective": "masked_gene"}, "train one of model.family autoregressive"),
    ],
)
def test_what_cannot_be_generated_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, options: dict[str, Any], text: str
) -> None:
    model = exported(tmp_path, **options)
    assert main(f"generate --model {model} --out {tmp_path / 'a.h5ad'} {flags}".split()) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "a.h5ad").exists()
