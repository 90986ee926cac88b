"""Protein sequences: a FASTA file to shards and embeddings, with residues in their order all the
way.
"""

import gzip
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from cellmill import open_cells
from cellmill.config.checks import check_rows
from cellmill.config.options import EmbedOptions, PreprocessOptions
from cellmill.config.parts.tokens import RESIDUES, SPECIAL, Tokens
from cellmill.config.run import Stream
from cellmill.data.genes.build import build_vocabulary
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.prepare.proteins import HYDROPATHY, write_sequences
from cellmill.data.rows import positions_in_rows
from cellmill.data.shards.index import CellColumns
from cellmill.data.shards.manifest import Manifest
from cellmill.data.split import hash_cells, hash_genes
from cellmill.data.stream.cell_stream import CellStream, SplitSource
from cellmill.data.stream.micro_batches import MicroBatchRule
from cellmill.data.stream.order import OrderOptions
from cellmill.errors import ConfigError, DataError
from cellmill.files import read_json
from cellmill.stages import cells as embed
from cellmill.stages import data as preprocess
from tests.unit.exported import export_model, make_corpus
from tests.unit.small_corpus import genes_named, random_counts, read_obs, write_dataset

UBIQUITIN = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"
INSULIN_A = "GIVEQCCTSICSLYQLENYCN"
INSULIN_B = "FVNQHLCGSHLVEALYLVCGERGFFYTPKT"
TOKENS = {"tokenizer": "sequence", "max_tokens": 40}
FASTA = f"""
>sp|P0CG47|UBB_HUMAN Polyubiquitin-B OS=Homo sapiens OX=9606 GN=UBB PE=1
{UBIQUITIN[:60]}
{UBIQUITIN[60:].lower()}

>insulin_a chain=A
{INSULIN_A}*
>again Ubiquitin of another organism OS=Mus musculus
{UBIQUITIN}
>empty
>insulin_b chain=B
{INSULIN_B}
>short
MJU
"""


def decoded(reader_rows: object) -> list[str]:
    """Sequences of CSR blocks."""
    sequences = []
    for block in reader_rows:  # type: ignore[attr-defined]
        for row in np.split(block.indices, block.indptr[1:-1]):
            sequences.append("".join([RESIDUES[column] for column in row]))
    return sequences


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "few.fasta.gz"
    path.write_bytes(gzip.compress(FASTA.encode()))
    return path


def test_records_are_read_in_order(fasta: Path, tmp_path: Path) -> None:
    with open_dataset(fasta) as reader:
        assert decoded(reader.rows(2)) == [UBIQUITIN, INSULIN_A, UBIQUITIN, "", INSULIN_B, "MXU"]
        obs = reader.obs
    assert list(obs.index) == [
        "sp|P0CG47|UBB_HUMAN",
        "insulin_a",
        "again",
        "empty",
        "insulin_b",
        "short",
    ]
    assert list(obs["OS"].dropna()) == ["Homo sapiens", "Mus musculus"]
    assert list(obs["chain"].dropna()) == ["A", "B"]
    assert obs["description"].iloc[0] == "Polyubiquitin-B"
    # a name ends at a tab, and `_index` is reserved in .h5ad
    (tmp_path / "tabs.fa").write_text(
        ">a\tOS=Homo sapiens\tchain=A\nMKV\n>b _index=3 chain=B\nMKL\n"
    )
    with open_dataset(tmp_path / "tabs.fa") as reader:
        obs = reader.obs
    assert (list(obs.index), list(obs["chain"])) == (["a", "b"], ["A", "B"])
    assert obs["OS"].iloc[0] == "Homo sapiens"
    assert "_index" not in obs


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b">a\nMKV-L\n",
            "record 'a': expected a residue (ABCDEFGHIKLMNOPQRSTUVWXYZ) at 4, got '-'; remove gaps, and",
        ),
        (b"MKV\n>a\n", "not a FASTA file: expected a line that begins with '>', got b'MKV'"),
        (b">a\nM\n>a\nK\n", "record names are not unique: 'a' occurs 2 times; rename one of them"),
        (b"\n", "empty: no record"),
        (
            b">a\n" + b"ACGT" * 26,
            "has no other letter than A, C, G, T, U and N; expected proteins: translate it",
        ),
        (
            b">a\rMKV\r>b\rMKL\r",
            "expected lines that end with \\n or \\r\\n, got \\r alone; convert it",
        ),
        (gzip.compress(FASTA.encode(), mtime=0)[:-20], "damaged: Compressed file ended before"),
    ],
)
def test_a_file_that_is_not_fasta_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / ("bad.fa.gz" if content.startswith(b"\x1f\x8b") else "bad.fa")
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(open_dataset(path).rows())
    assert f"{path}: {message}" in str(caught.value)


def test_short_sequences_are_dropped(fasta: Path, tmp_path: Path) -> None:
    options = PreprocessOptions.model_validate(
        {"preprocess": {"min_counts": 4, "keep_obs": ["chain"], "row_block": 2}}
    )
    proteins = tmp_path / "proteins.h5ad"
    report = tmp_path / "qc.json"
    preprocess.preprocess(
        options=options, input=fasta, counts="X", dataset="few", out=proteins, report=report
    )
    dropped = {"filter": 0, "no residues": 1, "min_counts": 1, "duplicate": 1}
    assert read_json(report)["cells"]["dropped"] == dropped
    with open_dataset(proteins) as reader:
        assert decoded(reader.rows()) == [UBIQUITIN, INSULIN_A, INSULIN_B]
        assert list(reader.obs) == ["chain"]
    vocabulary = build_vocabulary([proteins])
    assert "".join(vocabulary.gene_ids) == RESIDUES
    assert vocabulary.n_cells[RESIDUES.index("C")] == 2
    assert vocabulary.n_cells[RESIDUES.index("Z")] == 0
    # any tool reads X as the composition
    assert open_cells(proteins).X.toarray()[1, RESIDUES.index("C")] == INSULIN_A.count("C")
    cells = write_dataset(tmp_path / "cells.h5ad", random_counts(5, 10), genes_named(10))
    with pytest.raises(
        DataError, match=r"proteins.h5ad has sequences, .*cells.h5ad cells; put them in corpora of"
    ):
        build_vocabulary([cells, proteins])


def test_the_hash_of_a_sequence_depends_on_its_order() -> None:
    starts = np.array([0, 3, 6, 9])
    genes = np.array([1, 2, 2, 2, 1, 2, 1, 2, 2])
    hashes = hash_cells(
        starts, genes, positions_in_rows(starts), hash_genes(list(RESIDUES))
    ).tolist()
    assert hashes[0] == hashes[2] != hashes[1]


def test_batches_have_the_sequences_in_their_order(tmp_path: Path) -> None:
    for name in ("sim.fa", "again.fa"):
        write_sequences(tmp_path / name, 200, 4, seed=1)
    assert (tmp_path / "sim.fa").read_text() == (tmp_path / "again.fa").read_text()
    corpus = make_corpus(tmp_path, tmp_path / "sim.fa", split_by="family", val_frac=0)
    with open_dataset(tmp_path / "sim.fa") as reader:
        expected = dict(zip(reader.obs_names, decoded(reader.rows())))
    shards = [open_cells(path) for path in sorted((tmp_path / "shards").glob("*.h5ad"))]
    sequences: dict[str, str] = {}
    for data in shards:
        sequences |= zip(data.obs_names, decoded([data.X]))
    assert {name.removeprefix("sim:"): row for name, row in sequences.items()} == expected
    families = [set(data.obs["family"]) for data in shards]
    assert len(families) == 2
    assert not families[0] & families[1]
    manifest = Manifest.read(corpus["manifest"])
    expected = []
    for name in read_obs(manifest, "train").index:
        expected.append(np.mean([HYDROPATHY[residue] for residue in sequences[name]]))
    numbers = CellColumns(manifest, "train", "numbers", ["hydropathy"])[:][:, 0]
    np.testing.assert_allclose(numbers, expected, atol=5.1e-4)
    with pytest.raises(DataError, match=r"'family' \(a\) is text; choose one of: .*hydropathy"):
        manifest.fingerprint_with([], {"family": "a"})

    tokens = Tokens.model_validate(TOKENS)
    split = SplitSource(corpus["manifest"], "test")
    order = OrderOptions(Stream(lanes=1), global_batch=8, seed=0, is_training=False)
    stream = CellStream(split, order, tokens, MicroBatchRule(400))
    batch = next(iter(stream))[0]
    stream.close()
    first = "".join(
        RESIDUES[token - len(SPECIAL)] for token in batch.token_ids[: batch.cu_seqlens[1]]
    )
    assert first == decoded([shards[0].X])[0][:40]
    assert list(batch.values[:40]) == list(range(40))
    cells = Tokens.model_validate({"tokenizer": "rank"})
    with pytest.raises(
        ConfigError, match=r"it has sequences, tokens\.tokenizer is rank; set sequence"
    ):
        check_rows(cells, manifest, "shards")
    assert manifest.ordered
    assert manifest.splits["test"].shards[0].dtype == "uint16"


def test_a_fasta_file_is_embedded_by_record_name(fasta: Path, tmp_path: Path) -> None:
    residues = Vocabulary(
        list(RESIDUES), list(RESIDUES), np.ones(len(RESIDUES), np.int64), np.ones(len(RESIDUES))
    )
    residues.write(tmp_path / "vocabulary.tsv")
    masked = {"objective": "masked_gene"}
    model = export_model(
        tmp_path / "model", tmp_path / "vocabulary.tsv", TOKENS | {"max_tokens": 100}, **masked
    )
    reverse = tmp_path / "reverse.faa"
    reverse.write_text(f">u\n{UBIQUITIN}\n>r\n{UBIQUITIN[::-1]}\n")
    options = EmbedOptions.model_validate({"embed": {"token_budget": 128}})
    vectors = {}
    for path in (fasta, reverse):
        out = tmp_path / f"{path.name}.h5ad"
        embed.embed(options=options, model=model, input=path, counts="X", out=out)
        vectors[path.name] = ad.read_h5ad(out)
    few = vectors[fasta.name]
    two = vectors[reverse.name]
    assert list(two.obs_names) == ["u", "r"]
    assert np.isnan(few.obsm["X_cellmill"]).any(axis=1).tolist() == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    np.testing.assert_allclose(
        two["u"].obsm["X_cellmill"], few["again"].obsm["X_cellmill"], atol=1e-6
    )
    assert np.abs(two["u"].obsm["X_cellmill"] - two["r"].obsm["X_cellmill"]).max() > 1e-3
