"""Digests of the cells that a model was trained and validated on, which travel with its folder.

cells.digest is a safetensors file. Corpus N, of the model or of a model before it, has

    N.cells      `(cells,)` uint64, ascending: first half of `split.hash_cells` over the genes of N.genes
    N.barcodes   `(barcodes,)` uint64, ascending within a sample: hashes of the barcodes in the cells' names
    N.samples    `(samples + 1,)` int64: offsets of the samples in N.barcodes
    N.genes      `(bytes,)` uint8: Ensembl ids of the corpus's vocabulary, one a line

A cell's digest is a sum over its pairs of Ensembl id and count. It does not change with the order of
genes or cells, with symbols, or with other genes of a file. It changes with every count, so copies of a
cell at another depth are found by barcode. A barcode alone means nothing: a kit has 737,280 of them or
more, and every sample draws from the same list. It counts only in samples that share far more barcodes
with a training sample than two random draws would.
"""

import json
import re
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cellmill.config.load import unusable
from cellmill.config.plugin import in_one_line
from cellmill.data.keys import hash_text
from cellmill.data.rows import positions_in_rows, row_numbers, row_offsets
from cellmill.data.shards.index import open_index
from cellmill.data.shards.manifest import TRAINING_SPLITS, Manifest
from cellmill.data.shards.reader import read_names
from cellmill.files import atomic_path, sha256_file

FILE = "cells.digest"
ENTRY = "cell_digests"  # entry of config.json
FORMAT = 1
KIT_BARCODES = 737_280  # barcodes of the smallest common kit (10x Genomics v1 and v2)
MAX_CHANCE = 0.1  # largest share of a sample's shared barcodes that chance may explain
MAX_LOG_PROBABILITY = -20.7  # log of 1e-9, for a match of samples by chance, over all pairs
MIN_SAMPLE_BARCODES = 8  # barcodes of a sample; fewer are counted with the rest of the file
BARCODE = re.compile("[ACGT]{12,}")


class CorpusDigests(NamedTuple):
    """Training and validation cells of one corpus; arrays as in the file."""

    gene_ids: list[str]
    cells: np.ndarray
    barcodes: np.ndarray
    samples: np.ndarray

    def has_barcodes(self, names: Iterable[str]) -> np.ndarray:
        """Return for the name of each cell whether its barcode is in a matching training sample, `(n,)` bool.

        A sample of the file and a training sample match if chance explains at most MAX_CHANCE of the
        barcodes that they share, and if the probability of sharing as many by chance is below 1e-9 over
        all pairs (Chernoff's bound).
        """
        cells = _read_barcodes(("", name) for name in names)
        mask = np.zeros(len(cells), bool)
        # barcodes of all training samples in order, and the sample of each
        order = np.argsort(self.barcodes, kind="stable")
        ordered = self.barcodes[order]
        sample_of_barcode = row_numbers(self.samples)[order]
        sizes = np.diff(self.samples)
        in_file = cells[cells["sample"] >= 0]
        n_pairs = max(1, in_file["sample"].nunique() * len(sizes))
        for _, sample in in_file.groupby("sample"):
            # training samples that have each barcode of this sample, barcode after barcode
            hashes = sample["barcode"].to_numpy(np.uint64)
            first = np.searchsorted(ordered, hashes, side="left")
            n_equal = np.searchsorted(ordered, hashes, side="right") - first
            within = positions_in_rows(row_offsets(n_equal))
            matched = sample_of_barcode[np.repeat(first, n_equal) + within]
            # for each training sample: barcodes shared, and as many as chance explains
            n_shared = np.bincount(matched, minlength=len(sizes))
            expected = len(hashes) * sizes / KIT_BARCODES
            with np.errstate(divide="ignore", invalid="ignore"):
                bound = n_shared - expected - n_shared * np.log(n_shared / expected)
            is_same = (expected <= MAX_CHANCE * n_shared) & (n_shared > 0)
            is_same &= bound <= MAX_LOG_PROBABILITY - np.log(n_pairs)
            cell = np.repeat(sample.index.to_numpy(), n_equal)
            mask[cell[is_same[matched]]] = True
        return mask


class CellDigests(NamedTuple):
    """Content of the file: corpora by fingerprint, and models whose training cells are not known."""

    corpora: dict[str, CorpusDigests]
    unknown: list[str]


def _read_barcodes(cells: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """Read the barcodes of cells: columns `barcode` (uint64 hash) and `sample` (number, -1 without one).

    `cells` are pairs of file and name. Cells of a file whose names are equal without the barcode are one
    sample. Samples of few cells are joined into one sample per file. Only the text of one cell at a time
    is in memory.
    """
    barcodes = array("Q")
    samples = array("q")
    numbers: dict[tuple[str, str], int] = {}  # by file, and rest of the name
    for file, name in cells:
        found = BARCODE.search(name)
        if found is None:
            barcodes.append(0)
            samples.append(-1)
            continue
        rest = f"\n{name[: found.start()]}\n{name[found.end() :]}"
        barcodes.append(hash_text(found[0]))
        samples.append(numbers.setdefault((file, rest), len(numbers)))
    sample = np.array(samples, np.int64)
    n_cells = np.bincount(sample[sample >= 0], minlength=len(numbers))
    texts = []
    for (file, rest), n in zip(numbers, n_cells.tolist()):
        texts.append(file if n < MIN_SAMPLE_BARCODES else file + rest)
    in_order, _ = pd.factorize(np.array(texts, object), sort=True)
    sample = np.append(in_order, -1)[sample]
    return pd.DataFrame({"barcode": np.array(barcodes, np.uint64), "sample": sample})


def digest_corpus(manifest: Manifest) -> CorpusDigests:
    """Read the training and validation cells of shards. Raise DataError for damage."""
    splits = [split for split in TRAINING_SPLITS if manifest.splits[split].n_obs]
    hashes = [open_index(manifest, split, "hashes")[0] for split in splits]
    shards = [shard for split in splits for shard in manifest.splits[split].shards]
    names = (name for s in shards for name in read_names(manifest.shard_path(s), "obs"))
    ids = read_names(manifest.shard_path(shards[0]), "var").tolist()
    cells = _read_barcodes(name.partition(":")[::2] for name in names)
    cells = cells[cells["sample"] >= 0].drop_duplicates().sort_values(["sample", "barcode"])
    samples = row_offsets(np.bincount(cells["sample"]))
    barcodes = cells["barcode"].to_numpy(np.uint64)
    return CorpusDigests(ids, np.unique(np.concatenate(hashes)), barcodes, samples)


def write_digests(folder: Path, digests: CellDigests) -> dict[str, Any]:
    """Write the file of a model folder, atomically, and return its entry of config.json."""
    tensors = {}
    for number, corpus in enumerate(digests.corpora.values()):
        for name in ("cells", "barcodes", "samples"):
            tensors[f"{number}.{name}"] = getattr(corpus, name)
        genes = "\n".join(corpus.gene_ids).encode()
        tensors[f"{number}.genes"] = np.frombuffer(genes, np.uint8)
    about = {"format": FORMAT, "corpora": [*digests.corpora], "unknown": digests.unknown}
    with atomic_path(folder / FILE) as temporary:
        # one key: safetensors writes several in any order
        save_file(tensors, temporary, metadata={"cellmill": json.dumps(about)})
    corpora = digests.corpora.values()
    return {
        "n_cells": sum(len(corpus.cells) for corpus in corpora),
        "n_barcodes": sum(len(corpus.barcodes) for corpus in corpora),
        "unknown": digests.unknown,
        "sha256": sha256_file(folder / FILE),
    }


def read_digests(folder: Path, config: Mapping[str, Any]) -> CellDigests | None:
    """Read the file of a model folder with this config.json; None for a model without one.

    Raise DataError if the file is missing, damaged or of another model.
    """
    entry = config.get(ENTRY)
    if entry is None:
        return None
    path = folder / FILE
    if not path.exists():
        raise unusable(path, "no such file, though config.json has its SHA-256")
    sha256 = sha256_file(path)
    if sha256 != entry["sha256"]:
        raise unusable(
            path,
            f"its SHA-256 is {sha256[:12]}, config.json has {entry['sha256'][:12]}: damaged, or another model's cells",
        )
    try:
        with safe_open(path, framework="np") as file:
            about = json.loads(file.metadata()["cellmill"])
            if about["format"] != FORMAT:
                raise ValueError(f"expected format {FORMAT}, got {about['format']}")
            corpora = {}
            for number, fingerprint in enumerate(about["corpora"]):
                corpora[fingerprint] = _read_corpus(file, number)
        return CellDigests(corpora, [str(name) for name in about["unknown"]])
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise unusable(path, f"not a list of cells: {in_one_line(error)}") from None


def _read_corpus(file: Any, number: int) -> CorpusDigests:
    """Read corpus `number`. Raise ValueError unless its arrays are as `write_digests` writes them."""
    arrays = {}
    for name, dtype in (
        ("cells", np.uint64),
        ("barcodes", np.uint64),
        ("samples", np.int64),
        ("genes", np.uint8),
    ):
        array = file.get_tensor(f"{number}.{name}")
        if array.dtype != dtype or array.ndim != 1:
            raise ValueError(f"{number}.{name}: expected one row of {np.dtype(dtype)}")
        arrays[name] = array
    samples = arrays["samples"]
    is_divided = len(samples) and samples[0] == 0 and samples[-1] == len(arrays["barcodes"])
    if not is_divided or (np.diff(samples) < 0).any():
        raise ValueError(f"{number}.samples: expected offsets of its barcodes")
    if (arrays["cells"][1:] <= arrays["cells"][:-1]).any():
        raise ValueError(f"{number}.cells: expected ascending digests")
    ids = arrays.pop("genes").tobytes().decode().split("\n")
    return CorpusDigests(ids, **arrays)
