"""Cells that a digest list finds in copies of training files, and what the list costs.

    python benchmarks/seen.py FOLDER [--million 1000000]

FOLDER has count files (.h5ad), or is one. Each is made into a corpus whose test split is 30 %; its list is then
looked up in copies of the file. *Found* is the share of training and validation cells that are
marked, *false* the share of test cells. Row `sketch` is what the list leaves out: 64 bits of the
expression of a cell (simhash) at a threshold that marks 1 % of the test cells.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice, product
from pathlib import Path

import anndata as ad
import numpy as np
import scipy.sparse as sp
from origin import commit, machine

from cellmill.cli import main as cellmill
from cellmill.data.genes.names import map_genes
from cellmill.data.genes.tables import gene_table
from cellmill.data.inputs.anndata_files import open_memory
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.keys import hash_text
from cellmill.data.shards.cell_digests import (
    FILE,
    KIT_BARCODES,
    CellDigests,
    CorpusDigests,
    digest_corpus,
    read_digests,
    write_digests,
)
from cellmill.data.shards.manifest import TRAINING_SPLITS, Manifest
from cellmill.data.shards.reader import read_names
from cellmill.evaluate.seen.copies import find_barcodes, find_equal_cells
from cellmill.evaluate.seen.corpus_hashes import HashedCorpus

Copy = Callable[[ad.AnnData, np.random.Generator], ad.AnnData]
SHARD = {"shard": {"test_frac": 0.3, "val_frac": 0.1, "duplicates": "keep"}}


def organism_of(names: Sequence[str]) -> str:
    return "mouse" if names[0].startswith("ENSMUSG") else "human"


def renamed(cells: ad.AnnData) -> ad.AnnData:
    """The cells without barcodes."""
    return ad.AnnData(cells.X, var=cells.var, obs={"name": [f"c{i}" for i in range(cells.n_obs)]})


def shuffled(cells: ad.AnnData, rng: np.random.Generator) -> ad.AnnData:
    return cells[:, rng.permutation(cells.n_vars)].copy()


def other_names(cells: ad.AnnData, _: np.random.Generator) -> ad.AnnData:
    """Symbols for Ensembl ids, or ids for symbols; genes without the other name stay."""
    organism = organism_of(cells.var_names)
    names = list(map(str, cells.var_names))
    if names[0].startswith("ENS"):
        symbols = gene_table(organism).symbols
        others = [symbols.get(gene) or gene for gene in names]
    else:
        gene_ids = map_genes(names, cells.var, organism).gene_ids
        others = [gene or f"no id {name}" for gene, name in zip(gene_ids, names)]
    copy = cells.copy()
    copy.var = copy.var[[]]
    copy.var_names = others
    return copy


def detected_in(cells: ad.AnnData) -> np.ndarray:
    return np.asarray((cells.X > 0).sum(0)).ravel()


def without_a_gene(cells: ad.AnnData, rng: np.random.Generator) -> ad.AnnData:
    expressed = np.flatnonzero(detected_in(cells) > 0)
    lost = rng.choice(expressed)
    return cells[:, np.arange(cells.n_vars) != lost].copy()


def common_genes(cells: ad.AnnData, _: np.random.Generator) -> ad.AnnData:
    return cells[:, detected_in(cells) >= 10].copy()


def variable_genes(cells: ad.AnnData, _: np.random.Generator) -> ad.AnnData:
    mean = np.asarray(cells.X.mean(0)).ravel()
    square = np.asarray(cells.X.power(2).mean(0)).ravel()
    dispersion = (square - mean**2) / np.maximum(mean, 1e-9)
    return cells[:, np.sort(np.argsort(-dispersion)[: cells.n_vars // 5])].copy()


def thinned(cells: ad.AnnData, rng: np.random.Generator, frac: float = 0.5) -> ad.AnnData:
    copy = cells.copy()
    copy.X = copy.X.astype(np.int64)
    copy.X.data = rng.binomial(copy.X.data, frac)
    copy.X.eliminate_zeros()
    return copy


COPIES: dict[str, tuple[Copy, bool]] = {
    "genes in another order": (shuffled, True),
    "symbols for Ensembl ids, or ids for symbols": (other_names, True),
    "without one expressed gene": (without_a_gene, True),
    "genes of 10 cells or more": (common_genes, True),
    "half of the counts": (thinned, True),
    "genes of 10 cells or more, own names": (common_genes, False),
    "most variable fifth of the genes, own names": (variable_genes, False),
    "half of the counts, own names": (thinned, False),
    "a tenth of the counts, own names": (lambda cells, rng: thinned(cells, rng, 0.1), False),
}
"""Copy, and whether its cells get other names."""


def make_corpus(folder: Path, source: Path) -> Manifest:
    cells = folder / "cells" / source.name
    organism = organism_of(ad.read_h5ad(source, backed="r").var_names)
    filters = {"preprocess": {"min_genes": 0, "max_mito_frac": 1, "organism": organism}}
    for words, options in (
        (
            f"preprocess --input {source} --dataset {source.stem} --out {cells} --report {folder}/qc.json",
            filters,
        ),
        (f"vocabulary --cells {cells} --out {folder}/genes.tsv", {"vocabulary": {}}),
        (
            f"shard --cells {cells} --vocabulary {folder}/genes.tsv --out {folder}/shards/manifest.json",
            SHARD,
        ),
    ):
        assert cellmill([*words.split(), "--options", json.dumps(options)]) == 0
    return Manifest.read(folder / "shards" / "manifest.json")


def find(cells: ad.AnnData, listed: CorpusDigests) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the cells of equal counts, and of those with a barcode of a training sample."""
    with CountsReader(open_memory(cells, "X", "copy")) as reader:
        equal = find_equal_cells(
            reader, [HashedCorpus.from_digests(listed)], np.ones(cells.n_obs, bool)
        )
        return equal, find_barcodes(reader, [listed])


def sketch_recall(cells: ad.AnnData, trained: np.ndarray, rng: np.random.Generator) -> float:
    """Share of training cells whose copy at half depth is nearer to the original, in 64 bits, than 99
    % of the test cells are to any training cell.
    """
    planes = rng.standard_normal((cells.n_vars, 64))

    def bits(counts: sp.csr_matrix) -> np.ndarray:
        logs = counts.astype(float)
        logs = sp.diags(1e4 / np.maximum(np.asarray(logs.sum(1)).ravel(), 1)) @ logs
        projected = logs.log1p() @ planes
        return np.where(projected > np.median(projected, axis=0), 1.0, -1.0)

    originals = bits(cells.X)
    copies = bits(thinned(cells, rng).X)
    nearest = (copies[~trained] @ originals[trained].T).max(axis=1)
    own = (copies[trained] * originals[trained]).sum(axis=1)
    return float((own > np.quantile(nearest, 0.99)).mean())


def measure_copies(folder: Path) -> None:
    files = [folder] if folder.is_file() else sorted(folder.glob("*.h5ad"))
    lists = {}
    found: dict[str, list[str]] = {name: [] for name in (*COPIES, "sketch", "cells of other files")}
    sizes = []
    for source in files:
        rng = np.random.default_rng(0)
        with tempfile.TemporaryDirectory() as temporary:
            manifest = make_corpus(Path(temporary), source)
            listed = lists[source.stem] = digest_corpus(manifest)
            entry = write_digests(Path(temporary), CellDigests({"": listed}, []))
            genes = len("\n".join(listed.gene_ids))
            n_bytes = (Path(temporary) / FILE).stat().st_size - genes
            sizes.append(f"{n_bytes / entry['n_cells']:.1f}, {genes / 1000:.0f} kB")
            shards = [shard for split in TRAINING_SPLITS for shard in manifest.splits[split].shards]
            names = np.concatenate(
                [read_names(manifest.shard_path(shard), "obs") for shard in shards]
            )
        cells = ad.read_h5ad(source)
        cells.X = sp.csr_matrix(cells.X)
        trained = cells.obs_names.isin([name.partition(":")[2] for name in names])
        for name, (copy, is_renamed) in COPIES.items():
            made = copy(cells, rng)
            equal, near = find(renamed(made) if is_renamed else made, listed)
            marked = equal | near
            found[name].append(f"{marked[trained].mean():.3f} / {marked[~trained].mean():.3f}")
        found["sketch"].append(f"{sketch_recall(cells, trained, rng):.3f} / 0.010")
    for source in files:
        cells = ad.read_h5ad(source)
        n_marked = 0
        for name, listed in lists.items():
            if name != source.stem:
                equal, near = find(cells, listed)
                n_marked += int((equal | near).sum())
        found["cells of other files"].append(f"{n_marked} of {cells.n_obs * (len(files) - 1):,}")
    print(f"| found / false | {' | '.join(lists)} |")
    print("|---" * (len(files) + 1) + "|")
    for name, texts in found.items():
        print(f"| {name} | {' | '.join(texts)} |")
    print(f"| bytes per cell, gene ids | {' | '.join(sizes)} |")


def measure_cost(n: int) -> None:
    """Seconds for a list of `n` cells in samples of 5,000, and barcodes found by chance."""
    rng = np.random.default_rng(0)
    kit = np.array(
        [f"ACGTAC{''.join(word)}" for word in islice(product("ACGT", repeat=10), KIT_BARCODES)],
        object,
    )
    hashes = np.array([hash_text(barcode) for barcode in kit], np.uint64)
    n_samples = n // 5000
    drawn = [
        np.sort(hashes[rng.choice(KIT_BARCODES, 5000, replace=False)]) for _ in range(n_samples)
    ]
    ids = [f"ENSG{i:011d}" for i in range(20_000)]
    cells = np.unique(rng.integers(0, 2**64, n, np.uint64))
    listed = CorpusDigests(ids, cells, np.concatenate(drawn), np.arange(n_samples + 1) * 5000)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        started = time.process_time()
        entry = write_digests(folder, CellDigests({"": listed}, []))
        rows.append(("write", f"{time.process_time() - started:.1f} s"))
        started = time.process_time()
        read_digests(folder, {"cell_digests": entry})
        rows.append(("read and check", f"{time.process_time() - started:.1f} s"))
        rows.append(("size", f"{(folder / FILE).stat().st_size / 1e6:.1f} MB"))
    others = [
        f"{barcode}-{i}"
        for i in range(n_samples)
        for barcode in rng.choice(kit, 5000, replace=False)
    ]
    started = time.process_time()
    n_near = int(listed.find_known_barcodes(others).sum())
    rows.append(
        (f"look up the barcodes of {len(others):,} cells", f"{time.process_time() - started:.1f} s")
    )
    known = set(listed.barcodes.tolist())
    n_known = sum(hash_text(name.partition("-")[0]) in known for name in others)
    rows.append(("of them, with a barcode that the list has in some sample", f"{n_known:,}"))
    rows.append(("of them, taken for near copies", f"{n_near:,}"))
    print(f"\n| {n:,} digests | |\n|---|---|")
    for name, text in rows:
        print(f"| {name} | {text} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--million", type=int, default=1_000_000)
    given = parser.parse_args()
    print(f"commit {commit()}, {machine()}\n")
    measure_copies(given.folder)
    measure_cost(given.million)


if __name__ == "__main__":
    main()
