"""Cells of other tools: Geneformer's token datasets as ranks without counts, scModelForge's shards
as counts.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest

from cellmill.cli import main
from cellmill.config.checks import check_rows
from cellmill.config.corpus import Preprocess, Shard
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.config.run import Embed, Stream
from cellmill.data.genes.build import build_vocabulary
from cellmill.data.inputs.formats import open_counts
from cellmill.data.prepare.preprocess import preprocess_sequences
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.writer import write_shards
from cellmill.data.stream.cell_stream import CellStream, SplitSource
from cellmill.data.stream.micro_batches import MicroBatchRule
from cellmill.data.stream.order import OrderOptions
from cellmill.errors import ConfigError
from cellmill.evaluate.inference.embed import embed_cells, load_for_inference
from cellmill.models.published import import_geneformer
from tests.unit.published import geneformer_folder, geneformer_medians, geneformer_tokens

GENES = [f"ENSG{i:011d}" for i in range(1, 41)]
NUMBERS = geneformer_tokens(GENES, "V2")

Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The one line of a conversion that is refused."""

    def run(*words: str | Path) -> str:
        assert main(["convert", *map(str, words), "--out", str(tmp_path / "refused.h5ad")]) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        assert not (tmp_path / "refused.h5ad").exists()
        return text

    return run


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return geneformer_folder(tmp_path / "published", GENES, "V2")


def saved(folder: Path, cells: list[list[int]], **columns: Any) -> Path:
    """A dataset as `datasets.Dataset.save_to_disk` writes it, in two files."""
    arrow = pytest.importorskip("pyarrow", reason="the extra arrow is not installed")
    folder.mkdir(parents=True)
    table = arrow.table({"input_ids": arrow.array(cells, arrow.list_(arrow.int64())), **columns})
    table = table.append_column("length", arrow.array([len(cell) for cell in cells]))
    names = []
    for number, part in enumerate((table.slice(0, 2), table.slice(2))):
        names.append(f"data-{number:05d}-of-00002.arrow")
        with (
            arrow.OSFile(str(folder / names[-1]), "wb") as sink,
            arrow.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(part)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )
    return folder


def test_ranks_keep_their_order_into_the_batch(tmp_path: Path, published: Path) -> None:
    rng = np.random.RandomState(4)
    cells = []
    tokens = []
    for _ in range(12):
        rows = rng.permutation(len(GENES))[: rng.randint(5, 30)]
        cell = [GENES[row] for row in rows]
        cells.append(cell)
        tokens.append([NUMBERS[token] for token in ("<cls>", *cell, "<eos>")])
    types = [f"type{i % 2}" for i in range(11)] + [None]
    folder = saved(tmp_path / "cells.dataset", tokens, cell_type=types, nested=[[1]] * 12)
    out = tmp_path / "raw.h5ad"
    assert (
        main(
            [
                "convert",
                "geneformer",
                str(folder),
                "--dictionaries",
                str(published),
                "--out",
                str(out),
            ]
        )
        == 0
    )
    made = tmp_path / "cells" / "cells.h5ad"
    made.parent.mkdir()
    with open_counts(out) as reader:
        assert list(reader.obs) == ["cell_type"]
        assert (
            reader.obs["cell_type"]
            .astype(object)
            .where(reader.obs["cell_type"].notna(), None)
            .tolist()
            == types
        )
        report = preprocess_sequences(reader, Preprocess(min_genes=15), made)
    kept = [cell for cell in cells if len(cell) >= 15]
    assert report["cells"]["dropped"]["min_genes"] == len(cells) - len(kept) > 0
    vocabulary = build_vocabulary([made])
    medians = geneformer_medians(GENES)
    assert vocabulary.gene_ids == sorted(GENES)
    assert vocabulary.medians.tolist() == [
        np.float32(medians[gene]) for gene in vocabulary.gene_ids
    ]
    shard = Shard(val_frac=0, test_frac=0)
    manifest = write_shards([made], vocabulary, shard, tmp_path / "shards" / "manifest.json")
    assert Manifest.read(manifest.path).ranked
    ranked = Tokens.model_validate({"tokenizer": "rank", "max_tokens": 8})
    split = SplitSource(manifest.path, "train")
    order = OrderOptions(Stream(lanes=1), global_batch=4, seed=0, is_training=False)
    stream = CellStream(split, order, ranked, MicroBatchRule(64))
    streamed = []
    for batch in chain.from_iterable(stream):
        for start, end in pairwise(batch.cu_seqlens):
            streamed.append(batch.token_ids[start:end].tolist())
    token_ids = {gene: row + len(SPECIAL) for row, gene in enumerate(vocabulary.gene_ids)}
    expected = []
    for cell in kept:
        expected.append([token_ids[gene] for gene in cell[:8]])
    assert sorted(streamed) == sorted(expected)
    with pytest.raises(
        ConfigError, match=r"it has ranks without counts, which the objective needs; set obj"
    ):
        check_rows(ranked, manifest, "shards", counted=True)
    for other in ("continuous", "binned", "sequence"):
        with pytest.raises(
            ConfigError, match=rf"ranks without counts, tokens\.tokenizer is {other}; set rank"
        ):
            check_rows(Tokens.model_validate({"tokenizer": other}), manifest, "shards")

    import_geneformer(published, tmp_path / "model")
    model = load_for_inference(tmp_path / "model")
    counts = np.zeros((len(cells), len(GENES)), np.float32)
    for row, cell in enumerate(cells):  # counts whose order over the medians is that of the cell
        for place, gene in enumerate(cell):
            counts[row, GENES.index(gene)] = round(1e4 * (40 - place) * medians[gene])
    plain = ad.AnnData(counts)
    plain.var_names = GENES
    plain.write_h5ad(tmp_path / "plain.h5ad")
    vectors = []
    for path in (out, tmp_path / "plain.h5ad"):
        with open_counts(path) as reader:
            vectors.append(embed_cells(reader, model, Embed()).vectors)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            [[2, 5, 6], [5, 999]],
            "token 999 of cell 1 is no gene with a median; give the dictionaries with which the",
        ),
        ([[5, 6], [7], [8, -3]], "token -3 of cell 2 is no gene with a median"),
        ([[5, 6], [7], [8, 9, 8]], "cell 2 has a gene twice; expected ranks"),
    ],
)
def test_tokens_that_are_not_ranks_are_refused(
    cells: list[list[int]], message: str, tmp_path: Path, refused: Refused, published: Path
) -> None:
    assert message in refused(
        "geneformer", saved(tmp_path / "cells.dataset", cells), "--dictionaries", published
    )


def test_a_damaged_dataset_is_named(
    tmp_path: Path, refused: Refused, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "cells.dataset", [[5, 6], [7], [8, 9]])
    given = ("geneformer", folder, "--dictionaries", published)
    data = folder / "data-00001-of-00002.arrow"
    state = folder / "state.json"
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    assert "data-00001-of-00002.arrow: damaged: " in refused(*given)
    data.write_bytes(whole)
    state.write_text(json.dumps({"_data_files": [{"filename": "../other.arrow"}]}))
    assert "state.json: '../other.arrow' is outside the folder" in refused(*given)
    state.write_text(
        json.dumps({"_data_files": [], "_indices_files": [{"filename": "indices.arrow"}]})
    )
    assert "a selection of another dataset; call flatten_indices() and save it again" in refused(
        *given
    )
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert (
        "this input requires pyarrow, which is missing: pip install 'cellmill[arrow]'"
        in refused(*given)
    )


def shards_of_scmodelforge(
    folder: Path, counts: np.ndarray, dtype: type = np.float32
) -> tuple[Path, Path]:
    """Shards as `convert_to_shards` of scModelForge 0.1 writes them, five cells each, and their
    gene vocabulary.
    """
    arrow = pytest.importorskip("pyarrow", reason="the extra arrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    index = {f"G{number}": number + 4 for number in range(counts.shape[1])}
    sizes = []
    for number, first in enumerate(range(0, len(counts), 5)):
        part = counts[first : first + 5]
        detected = [np.flatnonzero(row) for row in part]
        widest = max(map(len, detected))
        values = np.zeros((len(part), widest), dtype)
        genes = np.zeros((len(part), widest), np.int64)
        for row, own in enumerate(detected):
            values[row, : len(own)], genes[row, : len(own)] = part[row, own], own + 4
        shard = folder / f"shard_{number:03d}"
        shard.mkdir(parents=True)
        np.save(shard / "X.npy", values)
        np.save(shard / "gene_indices.npy", genes)
        np.save(shard / "n_genes.npy", np.array([len(own) for own in detected]))
        labels = {"cell_type": [f"type{first + row}" for row in range(len(part))]}
        parquet.write_table(arrow.table(labels), shard / "obs.parquet")
        sizes.append(len(part))
    hashed = hashlib.md5(json.dumps(index, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"shard_sizes": sizes, "vocab_hash": hashed}))
    (folder.parent / "genes.json").write_text(json.dumps(index))
    return folder, folder.parent / "genes.json"


def test_shards_of_scmodelforge_are_the_counts_they_were_made_of(
    tmp_path: Path, refused: Refused
) -> None:
    counts = np.random.default_rng(0).poisson(0.6, (13, 30))
    counts[3] = 0
    folder, genes = shards_of_scmodelforge(tmp_path / "shards", counts)
    out = tmp_path / "cells.h5ad"
    assert (
        main(["convert", "scmodelforge", str(folder), "--genes", str(genes), "--out", str(out)])
        == 0
    )
    made = ad.read_h5ad(out)
    assert made.X.toarray().tolist() == counts.tolist()
    assert list(made.var_names) == [f"G{number}" for number in range(30)]
    assert list(made.obs["cell_type"]) == [f"type{row}" for row in range(13)]

    (tmp_path / "other.json").write_text(json.dumps([f"G{number}" for number in range(29)]))
    given = ("scmodelforge", folder, "--genes")
    assert "the shards were made with" in refused(*given, tmp_path / "other.json")
    normalised, genes = shards_of_scmodelforge(tmp_path / "logs" / "shards", np.log1p(counts))
    assert "does not hold counts: 0.693147 (cell '000_0', gene" in refused(
        "scmodelforge", normalised, "--genes", genes
    )
    found = np.load(folder / "shard_001" / "gene_indices.npy")
    found[0, 0] = 2
    np.save(folder / "shard_001" / "gene_indices.npy", found)
    assert "shard_001: gene index 2 is not in the gene vocabulary: damaged" in refused(
        *given, tmp_path / "genes.json"
    )
    np.save(folder / "shard_000" / "X.npy", np.array([[{}]] * 5), allow_pickle=True)
    assert "shard_000/X.npy: damaged: " in refused(*given, tmp_path / "genes.json")
