"""Exported models: standard files, unchanged values, an error that names what is damaged, and genes that one lacks."""

import json
import re
import resource
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cellmill.cli import main
from cellmill.config.parts.tokens import Tokens
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.stream.tokenizers import CellTokenizer
from cellmill.errors import ConfigError, DataError
from cellmill.models.batch import to_tensors
from cellmill.models.build import build
from cellmill.models.export import initial_tensors, load_model, mean_gene_row, spec_of, write_tensors
from cellmill.models.family import Model
from cellmill.models.gene_vectors import TABLE
from cellmill.models.initial import fill_part, normal
from cellmill.planner.inputs import check_genes
from cellmill.runs.identity import changed_keys, identity
from tests.checks import refused
from tests.models import spec, train_options
from tests.unit.exported import export_model

HIDDEN = 16
REMEDY = "export the model again (consolidate)"


def _vocabulary(rows: Iterable[int]) -> Vocabulary:
    ids = [f"ENSG{row:011d}" for row in rows]
    return Vocabulary(ids, [f"g{i}" for i in ids], np.ones(len(ids), np.int64), np.ones(len(ids), np.float32))


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    genes = tmp_path / "genes.tsv"
    _vocabulary(range(30)).write(genes)
    return export_model(tmp_path / "model", genes, seed=3)


def _model(n_genes: int, hidden: int = HIDDEN, objective: str = "masked_value", tokenizer: str = "continuous") -> Model:
    tokens = Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": 64})
    return build(spec(n_genes, tokens, hidden=hidden, layers=2, heads=2, objective=objective))


def _first(
    n_genes: int, seed: int, init_from: Path | None, vocabulary: Vocabulary, **model: object
) -> dict[str, torch.Tensor]:
    return dict(initial_tensors(_model(n_genes, **model), seed, init_from, vocabulary))  # type: ignore[arg-type]


def test_a_full_disk_is_one_error_and_leaves_no_file(tmp_path: Path) -> None:
    path, limits = tmp_path / "model.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(DataError, match=rf"{path}: could not be written: .*File too large"):
            write_tensors(path, {"matrix": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_an_exported_model_comes_back_bit_for_bit(exported: Path) -> None:
    model, vocabulary, config = load_model(exported)
    expected = _first(30, 3, None, vocabulary)
    assert not model.training
    assert vocabulary.digest == config["vocabulary_digest"]
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(parameter.device.type == "cpu" for parameter in found.values())


def _error(folder: Path) -> str:
    with pytest.raises((DataError, ConfigError)) as error:
        load_model(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("norm.weight", None, "expected (16,) as in config.json, got none"),
        ("norm.weight", torch.ones(8), "expected (16,) as in config.json, got (8,)"),
        ("extra", torch.ones(2), "expected no such tensor as in config.json, got (2,)"),
    ],
)
def test_a_tensor_that_differs_is_named(exported: Path, name: str, tensor: torch.Tensor | None, problem: str) -> None:
    weights = exported / "model.safetensors"
    tensors = load_file(weights) | {name: tensor}
    save_file({key: value for key, value in tensors.items() if value is not None}, weights)
    assert _error(exported) == f"{weights}: {name}: {problem} (tensors that differ: 1); {REMEDY}"


def test_a_vocabulary_of_other_genes_or_medians_is_refused_with_both_digests(exported: Path) -> None:
    ours = Vocabulary.read(exported / "vocabulary.tsv")
    for theirs in (_vocabulary(range(1, 31)), replace(ours, medians=ours.medians * 2)):
        theirs.write(exported / "vocabulary.tsv")
        assert _error(exported) == (
            f"{exported}/vocabulary.tsv: its digest is {theirs.digest[:12]}, the model was trained with "
            f"{ours.digest[:12]}; {REMEDY}"
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "no such file; export the model first (consolidate)"),
        ("vocabulary.tsv", "no such file"),
        ("config.json", "no such file"),
    ],
)
def test_a_missing_file_is_named(exported: Path, name: str, message: str) -> None:
    (exported / name).unlink()
    assert _error(exported) == f"{exported / name}: {message}"


def test_initial_values_depend_on_name_and_seed_and_on_no_order() -> None:
    vocabulary = _vocabulary(range(30))
    first, again, other = (_first(30, seed, None, vocabulary) for seed in (0, 0, 1))
    backwards = _model(30)
    names = [name for name, _ in backwards.named_parameters()]
    backwards.named_parameters = lambda: iter([(n, backwards.get_parameter(n)) for n in reversed(names)])  # type: ignore
    reversed_order = dict(initial_tensors(backwards, 0, None, vocabulary))
    assert list(reversed_order) == list(reversed(first))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, reversed_order[name])
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
    rows = list(rows)
    vocabulary = _vocabulary(rows)
    theirs = load_file(exported / "model.safetensors")
    found, fresh = _first(len(rows), 8, exported, vocabulary), _first(len(rows), 8, None, vocabulary)
    embedding = found["gene_embedding.weight"]
    assert torch.equal(embedding[:2], theirs["gene_embedding.weight"][:2])
    for place, row in enumerate(rows):
        expected = theirs["gene_embedding.weight"][row + 2] if row < 30 else fresh["gene_embedding.weight"][place + 2]
        assert torch.equal(embedding[place + 2], expected)
    others = [name for name in found if name != "gene_embedding.weight"]
    assert all(torch.equal(found[name], theirs[name]) for name in others)


def test_tensors_that_the_source_lacks_keep_their_initial_values(exported: Path) -> None:
    vocabulary = _vocabulary(range(30))
    theirs = load_file(exported / "model.safetensors")
    found = _first(30, 8, exported, vocabulary, objective="masked_gene")
    assert "gene_bias" not in theirs
    assert torch.equal(found["gene_bias"], _first(30, 8, None, vocabulary, objective="masked_gene")["gene_bias"])
    assert torch.equal(found["blocks.1.qkv.weight"], theirs["blocks.1.qkv.weight"])


@pytest.mark.parametrize(
    ("tokens", "own", "message"),
    [
        ({}, {"hidden": 8}, "expected hidden_value of shape (8,), got (16,)"),
        (
            {"tokenizer": "binned", "bins": 9},
            {"tokenizer": "rank", "objective": "masked_gene"},
            "expected value_embedding.weight of shape (64, 16), got (10, 16)",
        ),
    ],
)
def test_a_model_of_another_width_or_other_values_is_refused(
    tmp_path: Path, tokens: dict[str, Any], own: dict[str, Any], message: str
) -> None:
    _vocabulary(range(30)).write(tmp_path / "genes.tsv")
    source = export_model(tmp_path / "source", tmp_path / "genes.tsv", tokens)
    with refused(f"init_from: {message} in {source}; give this run the same model and tokens sections"):
        _first(30, 0, source, _vocabulary(range(30)), **own)


def test_a_changed_byte_of_the_weights_is_detected(exported: Path) -> None:
    weights = exported / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    pattern = r"model\.safetensors: its SHA-256 is \w{12}, config\.json has \w{12}: damaged"
    assert re.search(pattern, _error(exported))


@pytest.mark.parametrize("shape", [(100, 16), (101, 7), (1000,), (33, 1), (17, 2, 3), (5, 3), (0, 4)])
def test_random_values_of_a_part_are_made_a_piece_at_a_time(shape: tuple[int, ...]) -> None:
    fill, n = normal(0.02), shape[0]
    whole = torch.empty(shape)
    fill(whole, torch.Generator().manual_seed(3))
    for rows in (slice(n // 3, n), slice(0, 0), [0, n - 1] if n else slice(0, 0)):
        for columns in ((), (slice(None),), (slice(1, 2),))[: len(shape) or 1]:
            part = ((rows, *columns) + (slice(None),) * len(shape))[: len(shape)]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("cellmill.models.initial.PIECE", 64)
                own = fill_part(fill, torch.empty(shape, device="meta"), part, torch.Generator().manual_seed(3))
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
    ],
    ids=["profile", "encoder, continuous, attention", "encoder, binned, cls", "encoder, rank, mean", "short cells"],
)
def test_onnx_gives_the_models_vectors(tmp_path: Path, tokens: Any, model: Any) -> None:
    """At other numbers of cells and genes than those of the trace."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    _vocabulary(range(40)).write(tmp_path / "genes.tsv")
    folder, out = export_model(tmp_path / "model", tmp_path / "genes.tsv", tokens, **model), tmp_path / "model.onnx"
    assert main(["export", "--format", "onnx", "--model", str(folder), "--out", str(out)]) == 0
    network, vocabulary, config = load_model(folder)
    tokenizer, draw = spec_of(config, 40).tokens, np.random.default_rng(1)
    lengths = [min(n, tokenizer.max_tokens) for n in (9, 1, 30, 17)]
    rows = np.concatenate([draw.permutation(40)[:n] for n in lengths]).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    made = CellTokenizer(tokenizer, 40).batch(rows, draw.integers(1, 50, len(rows)), starts, np.arange(4))
    with torch.no_grad():
        expected = network.embed(to_tensors(made)).numpy()
    given = {name: np.zeros((4, max(lengths)), np.int64) for name in ("genes", "values")}
    given["values"] = given["values"].astype(np.float32 if made.values.dtype == np.float32 else np.int64)
    for cell, (start, n) in enumerate(zip(starts.tolist(), lengths)):
        given["genes"][cell, :n] = made.genes[start : start + n]
        given["values"][cell, :n] = made.values[start : start + n]
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    (found,) = session.run(["cell_vector"], given)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    about = session.get_modelmeta().custom_metadata_map
    assert about["vocabulary"].split("\n") == vocabulary.gene_ids
    assert json.loads(about["tokens"])["tokenizer"] == config["tokens"]["tokenizer"]


@pytest.mark.full
def test_a_family_without_a_padded_form_is_refused(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("onnxscript")
    _vocabulary(range(30)).write(tmp_path / "genes.tsv")
    folder = export_model(tmp_path / "model", tmp_path / "genes.tsv", family="autoregressive")
    assert main(["export", "--format", "onnx", "--model", str(folder), "--out", str(tmp_path / "m.onnx")]) == 2
    expected = "family autoregressive cannot be exported to ONNX; families encoder and profile can"
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "m.onnx").exists()


def test_a_model_that_knows_too_few_of_what_cells_express_is_refused(tmp_path: Path) -> None:
    ours, folder = _vocabulary(range(10)), tmp_path / "model"
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


def test_the_threshold_is_no_part_of_a_run_and_the_rows_are() -> None:
    stored = {"options": train_options().model_dump(mode="json"), "identity": identity(train_options(), None)}
    assert changed_keys(stored, identity(train_options(finetune={"min_known_frac": 0.5}), None), "run.json") == {}
    del stored["options"]["finetune"]["new_genes"]  # of a version without the option
    changed = changed_keys(stored, identity(train_options(finetune={"new_genes": "mean"}), None), "run.json")
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
