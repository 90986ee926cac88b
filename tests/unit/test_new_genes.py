"""Genes that the model of `init_from` lacks: coverage, its threshold, and rows of vectors that files give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cellmill.config.options import TrainOptions
from cellmill.config.parts.tokens import Tokens
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import ConfigError
from cellmill.models.build import build
from cellmill.models.export import initial_tensors, mean_gene_row
from cellmill.models.gene_vectors import TABLE
from cellmill.planner.inputs import check_genes
from cellmill.runs.identity import changed_keys, identity
from tests.models import spec
from tests.unit.exported import export_model


def _vocabulary(rows: range, cells: int = 0) -> Vocabulary:
    ids = [f"ENSG{row:011d}" for row in rows]
    return Vocabulary(ids, ids, np.full(len(ids), cells, np.int64), np.ones(len(ids), np.float32))


def _options(**finetune: object) -> TrainOptions:
    sections = {key: {} for key in ("tokens", "stream", "model", "objective", "parallel")}
    return TrainOptions.model_validate(sections | {"train": {"steps": 1}, "finetune": finetune})


def test_a_model_that_knows_too_few_of_what_cells_express_is_refused(tmp_path: Path) -> None:
    ours, folder = _vocabulary(range(10)), tmp_path / "model"
    ours.n_cells[:] = [90, *[1] * 8, 2]
    ours.write(tmp_path / "ours.tsv")
    _vocabulary(range(1, 30)).write(folder / "vocabulary.tsv")
    check_genes(_options(min_known_frac=0.1), folder, tmp_path / "ours.tsv")
    message = (
        r"model: it has 9 of 10 genes, 10\.0% of those that a cell of the corpus expresses; finetune\.min_known_frac "
        r"is 0\.11; start from a model of these genes, or lower it$"
    )
    with pytest.raises(ConfigError, match=message):
        check_genes(_options(min_known_frac=0.11), folder, tmp_path / "ours.tsv")
    _vocabulary(range(20, 30)).write(folder / "vocabulary.tsv")
    with pytest.raises(ConfigError, match=r"it has 0 of 10 genes"):
        check_genes(_options(), folder, tmp_path / "ours.tsv")


def test_the_threshold_is_no_part_of_a_run_and_the_rows_are() -> None:
    stored = {"options": _options().model_dump(mode="json"), "identity": identity(_options(), None)}
    assert changed_keys(stored, identity(_options(min_known_frac=0.5), None), "run.json") == {}
    del stored["options"]["finetune"]["new_genes"]  # of a version without the option
    changed = changed_keys(stored, identity(_options(new_genes="mean"), None), "run.json")
    assert changed == {"finetune.new_genes": "random -> mean"}


def test_new_genes_have_the_mean_row_and_their_own_given_vector(tmp_path: Path) -> None:
    tokens, options = Tokens.model_validate({"max_tokens": 32}), {"hidden": 8, "layers": 1, "gene_vector_dim": 3}
    _vocabulary(range(20)).write(tmp_path / "theirs.tsv")
    folder = export_model(tmp_path / "model", tmp_path / "theirs.tsv", {"max_tokens": 32}, **options)
    ours = _vocabulary(range(5, 30))
    model, given = build(spec(25, tokens, **(options | {"heads": 2}))), {TABLE: torch.randn(27, 3)}
    name = "gene_embedding.weight"
    means = {name: mean_gene_row(folder / "model.safetensors", name)}
    made = dict(initial_tensors(model, 0, folder, ours, given=given, new_genes=means))
    theirs = dict(initial_tensors(build(spec(20, tokens, **(options | {"heads": 2}))), 0, None, _vocabulary(range(20))))
    assert torch.equal(made[name][:2], theirs[name][:2])
    assert torch.equal(made[name][2:17], theirs[name][7:])
    torch.testing.assert_close(made[name][17:], theirs[name][2:].mean(0).expand(10, 8))
    assert torch.equal(made[TABLE][17:], given[TABLE][17:])
    assert not made[TABLE][:17].any()  # the model's own table, which is of zeros
