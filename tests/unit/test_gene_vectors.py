"""Given gene vectors: what is read of a file, what a model makes of them, and what an export
carries.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError
from cellmill.finetune.method import load_method, make_is_trained
from cellmill.models.batch import to_tensors
from cellmill.models.build import ModelSpec, build
from cellmill.models.export import initial_tensors, load_model, scale_vectors
from cellmill.models.gene_vectors import TABLE, read_gene_vectors, read_vectors
from cellmill.parallel.apply import freeze
from cellmill.parallel.materialize import materialize
from cellmill.planner.measure.size import measure_size
from cellmill.runs.identity import changed_keys, identity
from cellmill.stages.training_inputs import digest_vectors
from tests.models import config_json, prepare, random_cells, spec, train_options
from tests.unit.exported import save_model

N_GENES = 60
DIM = 5
TOKENS = Tokens.model_validate({"max_tokens": 32})
GENES = [f"ENSG{i:011d}" for i in range(N_GENES)]
SYMBOLS = [f"g{i}" for i in range(N_GENES)]
SIZES: dict[str, Any] = {"hidden": 16, "layers": 1, "gene_vector_dim": DIM}
MODELS = {
    "encoder": {"family": "encoder", "heads": 2},
    "profile": {"family": "profile", "objective": "cell_decoding"},
}


def vocabulary(genes: list[str], symbols: list[str]) -> Vocabulary:
    return Vocabulary(
        genes, symbols, np.ones(len(genes), np.int64), np.ones(len(genes), np.float32)
    )


VOCABULARY = vocabulary(GENES, SYMBOLS)


def vectors_of(n: int = 45, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(0).normal(3, 2, (n, dim)).astype(np.float32)


def write_npy(path: Path, names: list[str], vectors: Any) -> Path:
    np.save(path, vectors, allow_pickle=True)
    path.with_suffix(".genes.txt").write_text("".join(f"{name}\n" for name in names))
    return path


def write_safetensors(path: Path, names: list[str], vectors: np.ndarray) -> Path:
    save_file({name: torch.from_numpy(vector.copy()) for name, vector in zip(names, vectors)}, path)
    return path


def write_table(path: Path, names: list[str], vectors: Any) -> Path:
    """With a header in a .csv, without one in a .tsv."""
    pd.DataFrame(vectors, index=names).rename(columns="x{}".format).to_csv(
        path,
        sep="\t" if path.suffix == ".tsv" else ",",
        header=path.suffix == ".csv",
        quoting=csv.QUOTE_NONNUMERIC,
    )
    return path


WRITERS = {
    ".npy": write_npy,
    ".safetensors": write_safetensors,
    ".tsv": write_table,
    ".csv": write_table,
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_vectors_are_matched_by_id_or_symbol(suffix: str, tmp_path: Path) -> None:
    names = [
        *GENES[30:],
        *SYMBOLS[5:15],
        "unknown",
        "ENSG99",
        *["other" + str(i) for i in range(3)],
    ]
    given = vectors_of(len(names))
    path = WRITERS[suffix](tmp_path / f"vectors{suffix}", names, given)
    table, n_found = read_gene_vectors(path, VOCABULARY, DIM)
    assert (n_found, table.shape, table.dtype) == (40, (N_GENES + 2, DIM), torch.float32)
    assert not table[:7].any()
    assert not table[17:32].any()
    expected = given[:40] / np.sqrt(np.square(given[:40].astype(np.float64)).mean())
    np.testing.assert_allclose(table[32:], expected[:30], rtol=1e-5)
    np.testing.assert_allclose(table[7:17], expected[30:], rtol=1e-5)


FIRST = GENES[:45]
NAN = vectors_of()
NAN[3, 2] = np.nan
WRONG: dict[str, tuple[list[str], Any, str]] = {
    "another length": (
        FIRST,
        vectors_of(45, 6),
        r"dim is 5, the vectors of \S+ have 6 numbers; set it to 6$",
    ),
    "a pickle": (
        FIRST,
        np.array([{"harm": 1}] * 45),
        "Object arrays cannot be loaded when allow_pickle=False$",
    ),
    "one number a gene": (
        FIRST,
        vectors_of()[:, 0],
        r"\(genes, numbers\) of floats, got \(45,\) of torch.float32$",
    ),
    "whole numbers": (
        FIRST,
        vectors_of().astype(int),
        r"\(genes, numbers\) of floats, got \(45, 5\) of torch.int64$",
    ),
    "names of others": (
        [f"x{i}" for i in range(45)],
        vectors_of(),
        "none of its 45 names is an Ensembl id or symbol",
    ),
    "fewer names": (
        FIRST[:44],
        vectors_of(),
        r"a.genes.txt: 44 names for the 45 vectors of a.npy$",
    ),
    "a name twice": (
        [*FIRST[:44], FIRST[0]],
        vectors_of(),
        "'ENSG00000000000' names two vectors; leave one out$",
    ),
    "not finite": (
        FIRST,
        NAN,
        "the vector of ENSG00000000003 has a value that is not finite; correct it or leave",
    ),
    "cut": (FIRST, vectors_of(), r"a.npy: cannot be read: "),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_unusable_file_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    names, vectors, message = WRONG[case]
    path = write_npy(tmp_path / "a.npy", names, vectors)
    if case == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        read_gene_vectors(path, VOCABULARY, DIM)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "a.safetensors",
            r": expected a vector per gene, all of one length, got shapes \(3,\) of a, ",
        ),
        ("a.pt", r": expected a file of gene vectors, \.npy or \.safetensors or \.tsv or"),
        ("b.npy", r"b\.genes\.txt: no such file; expected the names of the genes of b\.npy"),
        ("c.tsv", r": no such file$"),
        ("d.csv", r": expected a file, got a folder$"),
    ],
)
def test_other_kinds_of_files_are_refused(name: str, message: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3), "b": torch.zeros(4)}, tmp_path / "a.safetensors")
    np.save(tmp_path / "b.npy", vectors_of())
    (tmp_path / "d.csv").mkdir()
    with pytest.raises((ConfigError, DataError), match=message):
        read_vectors(tmp_path / name, [("STAT1",)])


WRONG_TABLES = {
    "a short line": (
        "STAT1\t1\t2\nJAK2\t1\n",
        ", line 2: expected 3 columns as in the first line, separated by tabs",
    ),
    "another separator": (
        "STAT1,1,2\n",
        ", line 1: expected a gene and its numbers, separated by tabs, got 1; compl",
    ),
    "a word": (
        "gene\ta\tb\n\nSTAT1\t1\thigh\n",
        ", line 3: 'STAT1' has a value that is not a number; correct it",
    ),
    "no value": (
        "STAT1\t1\t2\nJAK2\t\t2\n",
        ", line 2: 'JAK2' has a value that is not a number; correct it",
    ),
    "a gene twice": ("STAT1\t1\t2\nSTAT1\t1\t2\n", ": 'STAT1' names two vectors; leave one out$"),
    "no line": ("gene\ta\tb\n", ": no vectors; expected a line for each gene$"),
    "nothing": ("", ": no vectors; expected a line for each gene$"),
    "names of others": (
        "Q9Y6K9\t1\t2\n",
        ": none of its 1 names is an Ensembl id or symbol of the vocabulary;",
    ),
    "not finite": (
        "STAT1\t1\tnan\n",
        ": the vector of STAT1 has a value that is not finite; correct it or leave",
    ),
    "no text": ("STAT1\t\xff", ": cannot be read: 'utf-8' codec can't decode byte 0xff"),
}


@pytest.mark.parametrize("case", WRONG_TABLES)
def test_an_unusable_table_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    text, message = WRONG_TABLES[case]
    path = tmp_path / "a.tsv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.tsv" + message) as caught:
        read_vectors(path, [("ENSG00000115415", "STAT1"), ("ENSG00000096968", "JAK2")])
    assert "\n" not in str(caught.value)


def test_a_header_of_r_lacks_the_first_name(tmp_path: Path) -> None:
    path = tmp_path / "v.tsv"
    path.write_text('"V1"\t"V2"\n"TP53"\t0.5\t0.25\n"CD4"\t1\t2\n')  # of write.table
    found = read_vectors(path, [("x", "CD4"), ("y", "TP53")])
    assert found.tolist() == [[1, 2], [0.5, 0.25]]
    path.write_text("gene\tV1\nTP53\t1\nCD4\t1\t2\n")
    with pytest.raises(DataError, match="line 3: expected 2 columns as in the first line"):
        read_vectors(path, [("x", "CD4")])


def test_a_gene_without_a_vector_has_nan(tmp_path: Path) -> None:
    path = write_table(
        tmp_path / "a.csv",
        ["STAT1", "JAK2", "ENSG00000096968"],
        [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
    )
    found = read_vectors(
        path, [("MYC",), ("JAK2", "ENSG00000096968"), ("ENSG00000115415", "STAT1")]
    )
    np.testing.assert_array_equal(found, [[np.nan, np.nan], [3, 4], [1, 2]])


def spec_of(family: str, n_genes: int = N_GENES, **options: Any) -> ModelSpec:
    return spec(n_genes, TOKENS, **(SIZES | MODELS[family] | options))


def model_of(family: str, tmp_path: Path, **options: Any) -> tuple[Any, torch.Tensor]:
    """A model with vectors of the first 45 genes, laid out as a training lays it out; its table."""
    model = build(spec_of(family, **options))
    freeze(model, make_is_trained(load_method(train_options().finetune), model))
    path = write_npy(tmp_path / f"{family}.npy", GENES[:45], vectors_of())
    table, _ = read_gene_vectors(path, VOCABULARY, DIM)
    materialize(
        model,
        torch.device("cpu"),
        initial_tensors(model, 0, None, VOCABULARY, fixed={TABLE: table}),
    )
    return model, table


@pytest.mark.parametrize("family", MODELS)
def test_an_embedding_adds_the_projection_of_its_vector(family: str, tmp_path: Path) -> None:
    model, table = model_of(family, tmp_path)
    batch = to_tensors(random_cells((9, 14, 1, 14), TOKENS, N_GENES))
    own = model.gene_embedding.weight
    project = model.gene_vectors.project.weight
    whole = own + table @ project.T
    assert torch.equal(whole[47:], own[47:]), "no vector: the learned one alone"
    assert (table @ project.T)[2:47].std().item() == pytest.approx(0.02, rel=0.2), (
        "as large as a learned embedding"
    )
    with torch.no_grad():
        ours = model.embed(batch)
        model.gene_embedding.weight.copy_(whole)
        model.gene_vectors.project.weight.zero_()
        torch.testing.assert_close(ours, model.embed(batch), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_vectors_train_only_on_request(family: str, trained: bool, tmp_path: Path) -> None:
    model, _ = model_of(family, tmp_path, train_gene_vectors=trained)
    prepared = prepare(model, to_tensors(random_cells((9, 14, 1, 14), TOKENS, N_GENES)))
    model(prepared).backward()
    weight = model.gene_vectors.table.weight
    assert weight.requires_grad == trained
    assert (weight.grad is not None) == trained
    assert model.gene_vectors.project.weight.grad.any()
    if trained:
        assert torch.equal(weight.grad.any(1).nonzero().flatten(), prepared.token_ids.unique())


@pytest.mark.parametrize("trained", [False, True])
def test_the_planner_counts_the_vectors(trained: bool) -> None:
    plain, size = (
        measure_size(spec_of("encoder", **given))
        for given in ({"gene_vector_dim": None}, {"train_gene_vectors": trained})
    )
    assert size.parameters - plain.parameters == 62 * DIM + 16 * DIM
    own = size.begin.trained - size.tied.trained + size.finish.trained
    before = plain.begin.trained - plain.tied.trained + plain.finish.trained
    assert own - before == 16 * DIM + (62 * DIM if trained else 0)


def test_an_export_carries_the_vectors(tmp_path: Path) -> None:
    model, table = model_of("encoder", tmp_path)
    folder = save_model(tmp_path / "model", spec_of("encoder"), VOCABULARY, model.state_dict())
    assert torch.equal(load_model(folder)[0].state_dict()[TABLE], table)
    fewer = vocabulary(["ENSG99", *GENES[10:50]], ["x", *SYMBOLS[10:50]])
    taken = dict(initial_tensors(build(spec_of("encoder", 41)), 0, folder, fewer))
    assert torch.equal(taken[TABLE][3:], table[12:52])
    assert not taken[TABLE][2].any(), "a gene that the source does not know has no vector"


def test_vectors_of_new_genes_are_on_the_scale_of_the_model(tmp_path: Path) -> None:
    vectors = vectors_of()
    vectors[20:] *= 10
    path = write_npy(tmp_path / "a.npy", GENES[:45], vectors)
    few = vocabulary(GENES[:25], SYMBOLS[:25])
    theirs, _ = read_gene_vectors(path, few, DIM)
    given = spec_of("encoder", n_genes=25)
    source = build(given)
    first = initial_tensors(source, 0, None, few, fixed={TABLE: theirs})
    materialize(source, torch.device("cpu"), first)
    save_model(tmp_path / "model", given, few, source.state_dict())
    table, _ = read_gene_vectors(path, VOCABULARY, DIM)
    scaled = scale_vectors(table, tmp_path / "model", VOCABULARY)
    expected = torch.from_numpy(vectors) / np.sqrt(np.square(vectors[:25]).mean())
    torch.testing.assert_close(scaled[2:47], expected.float())
    assert not torch.allclose(table[2:27], theirs[2:])
    torch.testing.assert_close(scaled[2:27], theirs[2:])
    again, _ = read_gene_vectors(path, few, DIM)
    assert torch.equal(scale_vectors(again, tmp_path / "model", few), theirs)
    others = vocabulary([f"ENSG{i:011d}" for i in range(60, 70)], SYMBOLS[35:45])
    table, _ = read_gene_vectors(
        write_npy(tmp_path / "b.npy", SYMBOLS[35:45], vectors[:10]), others, DIM
    )
    assert torch.equal(scale_vectors(table, tmp_path / "model", others), table)


def test_a_run_depends_on_the_vectors_not_their_path(tmp_path: Path) -> None:
    paths = [write_npy(tmp_path / name, GENES[:45], vectors_of()) for name in ("a.npy", "b.npy")]
    runs = [
        train_options(model={"gene_vectors": str(path), "gene_vector_dim": DIM}) for path in paths
    ]
    first, second = (identity(run, None, digest_vectors(run, None)) for run in runs)
    assert first == second
    stored = {"options": runs[0].model_dump(mode="json"), "identity": first}
    assert changed_keys(stored, second, "run.json") == {}
    write_npy(paths[1], GENES[:45], vectors_of() + 1)
    changed = changed_keys(
        stored, identity(runs[1], None, digest_vectors(runs[1], None)), "run.json"
    )
    assert list(changed) == ["model.gene_vectors"]
    with pytest.raises(
        ConfigError, match=r"model\.gene_vector_dim is set, but no vectors; set model\.gene_vectors"
    ):
        digest_vectors(train_options(model={"gene_vector_dim": DIM}), None)
    (tmp_path / "config.json").write_text(config_json())
    with pytest.raises(ConfigError, match="or init_from to a model that has them"):
        digest_vectors(train_options(model={"gene_vector_dim": DIM}), tmp_path)
    (tmp_path / "config.json").write_text(config_json(model={"gene_vector_dim": DIM}))
    assert digest_vectors(train_options(model={"gene_vector_dim": DIM}), tmp_path) is None
    paths[0].unlink()
    with pytest.raises(ConfigError, match=r"model\.gene_vectors: \S+a\.npy: no such file"):
        digest_vectors(runs[0], None)
    with pytest.raises(
        ValueError, match="gene_vectors and train_gene_vectors require gene_vector_dim"
    ):
        FamilyConfig.model_validate({"gene_vectors": "a.npy"})
