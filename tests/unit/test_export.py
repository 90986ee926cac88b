"""Exported models: standard files and unchanged values; genes and labels that another model has or
lacks; ONNX.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

import cellmill
from cellmill.cli import main
from cellmill.config.parts.tokens import Tokens
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError
from cellmill.models.batch import to_tensors
from cellmill.models.build import build
from cellmill.models.export import (
    check_kept,
    initial_tensors,
    load_model,
    mean_gene_row,
    spec_of,
    write_tensors,
)
from cellmill.models.gene_vectors import TABLE
from cellmill.models.initial import fill_part, normal
from cellmill.runs.identity import changed_keys, identity
from cellmill.stages.training_inputs import check_genes
from tests.checks import refused
from tests.models import genes_of, initialized, random_cells, spec, train_options
from tests.unit.exported import SMALL, export_model, save_model
from tests.unit.limits import full_after

LEVELS = {"kind": ("a", "b")}


AUTOENCODER = {"family": "autoencoder", "objective": "cell_decoding"}


CLASSIFY = {"objective": "classification", "label_column": "kind"}


def _vocabulary(rows: Iterable[int]) -> Vocabulary:
    ids = [f"ENSG{row:011d}" for row in rows]
    return Vocabulary(
        ids, [f"g{i}" for i in ids], np.ones(len(ids), np.int64), np.ones(len(ids), np.float32)
    )


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    genes = tmp_path / "genes.tsv"
    _vocabulary(range(30)).write(genes)
    return export_model(tmp_path / "model", genes, seed=3)


def _first(
    seed: int,
    init_from: Path | None,
    vocabulary: Vocabulary,
    tokenizer: str = "continuous",
    **model: Any,
) -> dict[str, torch.Tensor]:
    tokens = Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": 64})
    network = build(spec(vocabulary.n_genes, tokens, LEVELS, **SMALL | model))
    return dict(initial_tensors(network, seed, init_from, vocabulary))


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with (
        full_after(1000),
        pytest.raises(DataError, match=rf"{path}: could not be written: .*File too large"),
    ):
        write_tensors(path, {"matrix": torch.zeros(1000)})
    assert list(tmp_path.iterdir()) == []


def test_an_exported_model_comes_back_bit_for_bit(exported: Path) -> None:
    model, vocabulary, config = load_model(exported)
    expected = _first(3, None, vocabulary)
    assert not model.training
    assert vocabulary.digest == config["vocabulary_digest"]
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(parameter.device.type == "cpu" for parameter in found.values())


def test_initial_values_depend_only_on_their_name_and_seed() -> None:
    first, again, other = (_first(seed, None, _vocabulary(range(30))) for seed in (0, 0, 1))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    random = [name for name, tensor in first.items() if tensor.unique().numel() > 1]
    assert "gene_embedding.weight" in random
    assert not any(torch.equal(first[name], other[name]) for name in random)
    matrices = [first[name].flatten()[:64] for name in random if first[name].numel() >= 64]
    assert not any(torch.equal(a, b) for i, a in enumerate(matrices) for b in matrices[:i])


@pytest.mark.parametrize(
    "rows",
    [range(30), range(10, 20), range(40), range(29, -1, -1), [35, 3, 50, 0, 29]],
    ids=["same", "subset", "superset", "permuted", "mixed"],
)
def test_rows_of_genes_follow_their_ensembl_ids(exported: Path, rows: Iterable[int]) -> None:
    theirs = load_file(exported / "model.safetensors")
    found, fresh = (_first(8, init_from, _vocabulary(rows)) for init_from in (exported, None))
    name = "gene_embedding.weight"
    expected = [
        theirs[name][row + 2] if row < 30 else fresh[name][at]
        for at, row in enumerate(rows, start=2)
    ]
    assert torch.equal(found.pop(name), torch.stack([*theirs[name][:2], *expected]))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (CLASSIFY, ["label_head.out.weight", "label_head.out.bias"]),
        (
            {"objective": "cell_decoding", "batch_column": "kind", "batch_adversary": 1.0},
            ["batch_terms.weight", "batch_adversary.out.weight", "batch_adversary.out.bias"],
        ),
    ],
)
def test_rows_of_levels_follow_their_names(
    tmp_path: Path, options: dict[str, Any], names: list[str]
) -> None:
    theirs, ours = (
        spec(12, levels={"kind": levels}, **SMALL | options)
        for levels in (("x", "y", "z"), ("new", "z", "x"))
    )
    source = initialized(theirs)
    for name in names:
        torch.nn.init.normal_(
            source.get_parameter(name), generator=torch.Generator().manual_seed(1)
        )
    save_model(tmp_path, theirs, genes_of(12), source.state_dict())
    found, fresh = (initialized(ours, init_from) for init_from in (tmp_path, None))
    for name in names:
        assert torch.equal(found.get_parameter(name)[1:], source.get_parameter(name)[[2, 0]])
        assert torch.equal(found.get_parameter(name)[0], fresh.get_parameter(name)[0])


def test_tensors_that_the_source_lacks_keep_their_initial_values(exported: Path) -> None:
    theirs = load_file(exported / "model.safetensors")
    vocabulary = _vocabulary(range(30))
    found, fresh = (
        _first(8, init_from, vocabulary, objective="masked_gene") for init_from in (exported, None)
    )
    assert "gene_bias" not in theirs
    assert torch.equal(found["gene_bias"], fresh["gene_bias"])
    assert torch.equal(found["blocks.1.qkv.weight"], theirs["blocks.1.qkv.weight"])


@pytest.mark.parametrize(
    ("source", "covariates", "own", "lost", "remedy"),
    [
        ({"pooling": "attention"}, (), (), "pool_query", "model.pooling to attention"),
        ({"pooling": "cls"}, (), (), "cell_token", "model.pooling to cls"),
        (
            {"gene_vector_dim": 3, "dropout": 0.1},
            *((), ()),
            *("gene_vectors.project.weight", "model.gene_vector_dim to 3"),
        ),
        (
            {},
            ("kind", "donor"),
            ("kind",),
            "covariates.donor",
            "tokens.covariates to ['kind', 'donor']",
        ),
        ({}, ("kind",), ("donor",), "covariates.kind", "tokens.covariates to ['kind']"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_loses_trained_tensors_is_refused(
    tmp_path: Path,
    source: dict[str, Any],
    covariates: tuple[str, ...],
    own: tuple[str, ...],
    lost: str,
    remedy: str,
) -> None:
    _vocabulary(range(30)).write(tmp_path / "genes.tsv")
    levels = LEVELS | {"donor": ("x", "y")}
    theirs = {name: levels[name] for name in covariates}
    folder = export_model(
        *(tmp_path / "source", tmp_path / "genes.tsv", {"covariates": covariates}),
        levels=theirs,
        **source,
    )
    tokens = Tokens.model_validate({"max_tokens": 32, "covariates": own})
    ours = spec(12, tokens, {name: levels[name] for name in own}, **SMALL)
    module = lost.split(".")[0]
    with pytest.raises(ConfigError) as error:
        check_kept(ours, folder)
    n_lost = 2 if module == "gene_vectors" else 1
    assert str(error.value) == (
        f"init_from: this run's model has no place for {lost} of {folder} (tensors without a place: {n_lost}); set "
        f"{remedy}, or leave it out with finetune.leave_out: [{module}]"
    )
    check_kept(ours, folder, train_options(finetune={"leave_out": [module]}).finetune.leave_out)
    check_kept(
        replace(ours, model=spec(1, **SMALL | source).model), folder, covariates and [module]
    )


def test_heads_of_another_objective_may_be_lost(exported: Path) -> None:
    assert "hidden_value" in load_file(exported / "model.safetensors")
    check_kept(spec(12, levels=LEVELS, **SMALL | CLASSIFY, dropout=0.2), exported)


def test_tables_of_covariates_follow_their_columns(tmp_path: Path) -> None:
    levels = {"kind": ("a", "b"), "donor": ("x", "y", "z")}
    columns = (["kind", "donor"], ["donor", "kind"], ["donor"])
    theirs, ours, less = (
        spec(12, Tokens.model_validate({"covariates": names}), levels, **SMALL) for names in columns
    )
    source = initialized(theirs)
    save_model(tmp_path, theirs, genes_of(12), source.state_dict())
    found = initialized(ours, tmp_path)
    tables = [f"covariates.tables.{index}.weight" for index in (0, 1)]
    for name, other in zip(tables, reversed(tables)):
        assert torch.equal(found.get_parameter(name), source.get_parameter(other))
    alone = initialized(less, tmp_path).get_parameter(tables[0])
    assert torch.equal(alone, source.get_parameter(tables[1]))


@pytest.mark.parametrize(
    ("tokens", "own", "message", "section"),
    [
        ({}, {"hidden": 8}, "hidden_value of shape (8,), got (16,)", "tokens"),
        (
            {"tokenizer": "binned", "bins": 9},
            {"tokenizer": "rank", "objective": "masked_gene"},
            "value_embedding.weight of shape (64, 16), got (10, 16)",
            "tokens",
        ),
        (
            {},
            CLASSIFY | {"head_hidden": 4},
            "label_head.out.weight of shape (4,), got (16,)",
            "objective",
        ),
    ],
)
def test_a_model_of_another_width_is_refused(
    tmp_path: Path, tokens: dict[str, Any], own: dict[str, Any], message: str, section: str
) -> None:
    _vocabulary(range(30)).write(tmp_path / "genes.tsv")
    model = CLASSIFY if section == "objective" else {}
    source = export_model(
        tmp_path / "source", tmp_path / "genes.tsv", tokens, levels=LEVELS, **model
    )
    with refused(
        f"init_from: expected {message} in {source}; give this run the same model and {section} sections"
    ):
        _first(0, source, _vocabulary(range(30)), **own)


@pytest.mark.parametrize(
    "shape", [(100, 16), (101, 7), (1000,), (33, 1), (17, 2, 3), (5, 3), (0, 4)]
)
def test_random_values_of_a_part_are_made_a_piece_at_a_time(shape: tuple[int, ...]) -> None:
    fill = normal(0.02)
    n = shape[0]
    whole = torch.empty(shape)
    fill(whole, torch.Generator().manual_seed(3))
    for rows in (slice(n // 3, n), slice(0, 0), [0, n - 1] if n else slice(0, 0)):
        for columns in ((), (slice(None),), (slice(1, 2),))[: len(shape) or 1]:
            part = ((rows, *columns) + (slice(None),) * len(shape))[: len(shape)]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("cellmill.models.initial.PIECE", 64)
                own = fill_part(
                    fill, torch.empty(shape, device="meta"), part, torch.Generator().manual_seed(3)
                )
            assert torch.equal(own, whole[part])


@pytest.mark.full
@pytest.mark.parametrize(
    ("tokens", "model"),
    [
        ({}, {"family": "profile", "heads": None}),
        ({}, {"pooling": "attention", "gene_vector_dim": 5}),
        ({"tokenizer": "binned"}, {"pooling": "cls"}),
        ({"tokenizer": "rank"}, {}),
        ({"tokenizer": "rank", "max_tokens": 3}, {}),
        ({}, AUTOENCODER | {"latent": 6, "pooling": "cls"}),
        ({}, AUTOENCODER | {"latent": None}),
    ],
    ids=[
        "profile",
        "encoder, continuous, attention",
        "encoder, binned, cls",
        "encoder, rank, mean",
        "short cells",
        "autoencoder",
        "autoencoder without a bottleneck",
    ],
)
def test_onnx_gives_the_models_vectors(tmp_path: Path, tokens: Any, model: Any) -> None:
    """At other numbers of cells and genes than those of the trace."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    _vocabulary(range(40)).write(tmp_path / "genes.tsv")
    folder = export_model(tmp_path / "model", tmp_path / "genes.tsv", tokens, **model)
    out = tmp_path / "model.onnx"
    assert main(["export", "--format", "onnx", "--model", str(folder), "--out", str(out)]) == 0
    network, vocabulary, config = load_model(folder)
    batch = to_tensors(random_cells((9, 1, 30, 17), spec_of(config, 40).tokens, 40))
    with torch.no_grad():
        expected = network.embed(batch).numpy()
    parts = {
        "genes": batch.token_ids.split(batch.lengths),
        "values": batch.values.split(batch.lengths),
    }
    given = {name: pad_sequence(cells, batch_first=True).numpy() for name, cells in parts.items()}
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    (found,) = session.run(["cell_vector"], given)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    about = session.get_modelmeta().custom_metadata_map
    assert about["vocabulary"].split("\n") == vocabulary.gene_ids
    assert json.loads(about["tokens"])["tokenizer"] == config["tokens"]["tokenizer"]


@pytest.mark.parametrize("tokenizer", ["continuous", "rank"])
def test_inputs_of_onnx_made_as_documented_embed_alike(tmp_path: Path, tokenizer: str) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    n_genes, max_tokens = 40, 16
    rng = np.random.default_rng(0)
    genes = replace(_vocabulary(range(n_genes)), medians=rng.uniform(0.5, 5, n_genes).astype("f4"))
    genes.write(tmp_path / "genes.tsv")
    tokens = {"tokenizer": tokenizer, "max_tokens": max_tokens}
    folder = export_model(tmp_path / "model", tmp_path / "genes.tsv", tokens)
    out = tmp_path / "model.onnx"
    assert main(["export", "--format", "onnx", "--model", str(folder), "--out", str(out)]) == 0
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    names = about["vocabulary"].split("\n")
    medians = np.array(about["medians"].split("\n"), float)
    counts = rng.poisson(3, (5, n_genes))
    kept = np.argsort(-counts / medians, axis=1, kind="stable")[:, :max_tokens]
    values = np.log1p(1e4 * counts / counts.sum(1, keepdims=True)).astype("f4")
    values = np.take_along_axis(values, kept, 1)
    if tokenizer == "rank":
        values = np.tile(np.arange(max_tokens), (5, 1))
    (found,) = session.run(["cell_vector"], {"genes": kept + 2, "values": values})
    adata = ad.AnnData(counts.astype("f4"), var=pd.DataFrame(index=names))
    np.testing.assert_allclose(found, cellmill.load(folder).embed(adata), atol=1e-5)


def test_genes_drawn_by_counts_are_not_exported_to_onnx(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("onnxscript")
    _vocabulary(range(30)).write(tmp_path / "genes.tsv")
    for max_tokens, code in ((29, 2), (30, 0)):
        tokens = {"truncation": "random", "max_tokens": max_tokens}
        folder = export_model(tmp_path / f"{max_tokens}", tmp_path / "genes.tsv", tokens)
        words = ["--model", str(folder), "--out", str(tmp_path / "m.onnx")]
        assert main(["export", "--format", "onnx", *words]) == code
    told = (
        "tokens.truncation random with fewer max_tokens than genes (30) cannot be exported to ONNX"
    )
    assert told in capsys.readouterr().err


@pytest.mark.full
def test_genes_without_counts_are_not_exported_to_onnx(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("onnxscript")
    _vocabulary(range(30)).write(tmp_path / "genes.tsv")
    folder = export_model(tmp_path / "model", tmp_path / "genes.tsv", {"zero_frac": 0.2})
    out = tmp_path / "m.onnx"
    assert main(["export", "--format", "onnx", "--model", str(folder), "--out", str(out)]) == 2
    assert "tokens.zero_frac cannot be exported to ONNX" in capsys.readouterr().err


@pytest.mark.full
def test_a_family_without_a_padded_form_is_refused(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("onnxscript")
    _vocabulary(range(30)).write(tmp_path / "genes.tsv")
    folder = export_model(tmp_path / "model", tmp_path / "genes.tsv", family="autoregressive")
    assert (
        main(
            [
                "export",
                "--format",
                "onnx",
                "--model",
                str(folder),
                "--out",
                str(tmp_path / "m.onnx"),
            ]
        )
        == 2
    )
    expected = "family autoregressive cannot be exported to ONNX; families encoder, autoencoder and profile can"
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "m.onnx").exists()


def test_a_model_that_lacks_most_expressed_genes_is_refused(tmp_path: Path) -> None:
    ours = _vocabulary(range(10))
    folder = tmp_path / "model"
    ours.n_cells[:] = [90, *[1] * 8, 2]
    ours.write(tmp_path / "ours.tsv")
    _vocabulary(range(1, 30)).write(folder / "vocabulary.tsv")
    check_genes(train_options(finetune={"min_known_frac": 0.1}), folder, tmp_path / "ours.tsv")
    message = (
        r"model: it has 9 of 10 genes, 10\.0% of those that a cell of the corpus expresses; finetune\.min_known_frac "
        r"is 0\.11; start from a model of these genes, or lower it$"
    )
    with pytest.raises(ConfigError, match=message):
        check_genes(train_options(finetune={"min_known_frac": 0.11}), folder, tmp_path / "ours.tsv")
    _vocabulary(range(20, 30)).write(folder / "vocabulary.tsv")
    with pytest.raises(ConfigError, match=r"it has 0 of 10 genes"):
        check_genes(train_options(), folder, tmp_path / "ours.tsv")


def test_what_only_refuses_does_not_change_a_run() -> None:
    stored = {
        "options": train_options().model_dump(mode="json"),
        "identity": identity(train_options(), None),
    }
    assert (
        changed_keys(
            stored,
            identity(
                train_options(finetune={"min_known_frac": 0.5, "leave_out": ["covariates"]}), None
            ),
            "run.json",
        )
        == {}
    )
    del stored["options"]["finetune"]["new_genes"]  # of a version without the option
    changed = changed_keys(
        stored, identity(train_options(finetune={"new_genes": "mean"}), None), "run.json"
    )
    assert changed == {"finetune.new_genes": "random -> mean"}


def test_new_genes_have_the_mean_row(tmp_path: Path) -> None:
    _vocabulary(range(20)).write(tmp_path / "theirs.tsv")
    folder = export_model(
        tmp_path / "model", tmp_path / "theirs.tsv", {"max_tokens": 32}, gene_vector_dim=3
    )
    tokens = Tokens.model_validate({"max_tokens": 32})
    ours = _vocabulary(range(5, 30))
    model = build(spec(25, tokens, **SMALL, gene_vector_dim=3))
    given = {TABLE: torch.randn(27, 3)}
    name = "gene_embedding.weight"
    means = {name: mean_gene_row(folder / "model.safetensors", name)}
    made = dict(initial_tensors(model, 0, folder, ours, fixed=given, new_genes=means))
    theirs = load_file(folder / "model.safetensors")
    assert torch.equal(made[name][:2], theirs[name][:2])
    assert torch.equal(made[name][2:17], theirs[name][7:])
    torch.testing.assert_close(made[name][17:], theirs[name][2:].mean(0).expand(10, 16))
    assert torch.equal(made[TABLE][17:], given[TABLE][17:])
    assert not made[TABLE][:17].any()  # the model's own table, which is of zeros
