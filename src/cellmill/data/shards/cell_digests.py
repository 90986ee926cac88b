"""Digests of the cells that a model was trained and validated on. They are a file in the model's folder.

The file cells.digest is a safetensors file. It has the cells of the model's own corpus, and of the corpora of
the models that it started from. Corpus number N has four arrays:

    N.cells      `(cells,)` uint64, ascending: for each cell the first half of `split.hash_cells`, over the
                 genes of N.genes
    N.barcodes   `(barcodes,)` uint64: hashes of the barcodes in the names of cells, sample after sample. The
                 hashes of a sample ascend
    N.samples    `(samples + 1,)` int64: index of the first barcode of each sample in N.barcodes, and the
                 number of barcodes
    N.genes      `(bytes,)` uint8: Ensembl ids of the corpus's vocabulary, one per line

The digest of a cell is computed from its pairs of Ensembl id and count. It does not depend on the order of
genes or cells, on symbols, or on other genes of a file. It changes with every count. So a copy of a cell at
another sequencing depth has another digest, and is found by its barcode.

A barcode alone means nothing: all samples take their barcodes from the list of a kit, which has 737,280
barcodes or more. A barcode counts only if its sample shares far more barcodes with a training sample than two
random draws from the list would share.
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
ENTRY = "cell_digests"  # the key of config.json with facts about the file
FORMAT = 1
KIT_BARCODES = 737_280  # number of barcodes in the smallest common kit (10x Genomics v1 and v2)
# two samples match only if chance explains at most this fraction of the barcodes that they share
MAX_CHANCE = 0.1
# log of 1e-9: the probability that any two samples match by chance is at most 1e-9
MAX_LOG_PROBABILITY = -20.7
MIN_SAMPLE_BARCODES = 8  # samples with fewer barcodes are joined into one sample per file
BARCODE = re.compile("[ACGT]{12,}")


class CorpusDigests(NamedTuple):
    """Digests of the training and validation cells of one corpus. The arrays are those in the file."""

    gene_ids: list[str]
    cells: np.ndarray
    barcodes: np.ndarray
    samples: np.ndarray

    def find_known_barcodes(self, names: Iterable[str]) -> np.ndarray:
        """Return True for each cell with a barcode of a matching training sample, `(cells,)` bool.

        `names` are the names of the cells of a file. A sample of the file and a training sample match on two
        conditions. First, chance explains at most the fraction `MAX_CHANCE` of the barcodes that they share.
        Second, the probability that any two samples share so many barcodes by chance is at most 1e-9
        (Chernoff's bound).
        """
        cells = _read_barcodes(("", name) for name in names)
        is_known = np.zeros(len(cells), bool)

        # sort the barcodes of all training samples, and keep the sample of each barcode
        order = np.argsort(self.barcodes, kind="stable")
        sorted_barcodes = self.barcodes[order]
        sample_of_barcode = row_numbers(self.samples)[order]
        sizes = np.diff(self.samples)

        in_file = cells[cells["sample"] >= 0]
        n_pairs = max(1, in_file["sample"].nunique() * len(sizes))
        for _, sample in in_file.groupby("sample"):
            # find the training samples with each barcode of this sample: `matched`, barcode after barcode
            hashes = sample["barcode"].to_numpy(np.uint64)
            first = np.searchsorted(sorted_barcodes, hashes, side="left")
            n_equal = np.searchsorted(sorted_barcodes, hashes, side="right") - first
            within = positions_in_rows(row_offsets(n_equal))
            matched = sample_of_barcode[np.repeat(first, n_equal) + within]

            # for each training sample, the number of shared barcodes, and the number expected by chance
            n_shared = np.bincount(matched, minlength=len(sizes))
            n_expected = len(hashes) * sizes / KIT_BARCODES

            # Chernoff's bound of the log probability that chance shares at least `n_shared` barcodes
            with np.errstate(divide="ignore", invalid="ignore"):
                bound = n_shared - n_expected - n_shared * np.log(n_shared / n_expected)
            is_match = (n_expected <= MAX_CHANCE * n_shared) & (n_shared > 0)
            is_match &= bound <= MAX_LOG_PROBABILITY - np.log(n_pairs)

            cell_of_matched = np.repeat(sample.index.to_numpy(), n_equal)
            is_known[cell_of_matched[is_match[matched]]] = True
        return is_known


class CellDigests(NamedTuple):
    """Content of the file cells.digest."""

    corpora: dict[str, CorpusDigests]  # by fingerprint of the corpus
    # names of the models that this model started from, but only those with unknown training cells
    unknown: list[str]


def digest_corpus(manifest: Manifest) -> CorpusDigests:
    """Read the digests of the training and validation cells of shards.

    Raises DataError if the shards or their index are damaged.
    """
    splits = [split for split in TRAINING_SPLITS if manifest.splits[split].n_obs]
    hashes = [open_index(manifest, split, "hashes")[0] for split in splits]
    shards = [shard for split in splits for shard in manifest.splits[split].shards]
    names = (name for s in shards for name in read_names(manifest.shard_path(s), "obs"))
    gene_ids = read_names(manifest.shard_path(shards[0]), "var").tolist()
    # a name in shards is `dataset:name`
    cells = _read_barcodes(name.partition(":")[::2] for name in names)
    cells = cells[cells["sample"] >= 0].drop_duplicates().sort_values(["sample", "barcode"])
    samples = row_offsets(np.bincount(cells["sample"]))
    barcodes = cells["barcode"].to_numpy(np.uint64)
    return CorpusDigests(gene_ids, np.unique(np.concatenate(hashes)), barcodes, samples)


def _read_barcodes(cells: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """Read the barcodes in the names of cells. Returns a data frame with a row per cell.

    Column `barcode` is the hash of the barcode, uint64. Column `sample` is the number of the cell's sample, or
    -1 if the name has no barcode.

    `cells` are pairs of file and name. Cells of one file are one sample if their names are equal apart from
    the barcode. Samples with few cells are joined into one sample per file. Only one name at a time is in
    memory.
    """
    barcodes = array("Q")
    samples = array("q")
    numbers: dict[tuple[str, str], int] = {}  # number of the sample, by file and rest of the name
    for file, name in cells:
        found = BARCODE.search(name)
        if found is None:
            barcodes.append(0)
            samples.append(-1)
            continue
        rest = f"\n{name[: found.start()]}\n{name[found.end() :]}"
        barcodes.append(hash_text(found[0]))
        samples.append(numbers.setdefault((file, rest), len(numbers)))

    # number the samples anew, in the order of their texts. Small samples of a file have the same text
    sample = np.array(samples, np.int64)
    n_cells = np.bincount(sample[sample >= 0], minlength=len(numbers))
    texts = []
    for (file, rest), n in zip(numbers, n_cells.tolist()):
        texts.append(file if n < MIN_SAMPLE_BARCODES else file + rest)
    new_numbers, _ = pd.factorize(np.array(texts, object), sort=True)
    sample = np.append(new_numbers, -1)[sample]
    return pd.DataFrame({"barcode": np.array(barcodes, np.uint64), "sample": sample})


def write_digests(folder: Path, digests: CellDigests) -> dict[str, Any]:
    """Write cells.digest to a model folder, atomically. Returns the entry `cell_digests` of config.json."""
    tensors = {}
    for number, corpus in enumerate(digests.corpora.values()):
        for name in ("cells", "barcodes", "samples"):
            tensors[f"{number}.{name}"] = getattr(corpus, name)
        genes = "\n".join(corpus.gene_ids).encode()
        tensors[f"{number}.genes"] = np.frombuffer(genes, np.uint8)
    about = {"format": FORMAT, "corpora": [*digests.corpora], "unknown": digests.unknown}
    with atomic_path(folder / FILE) as temporary:
        # metadata has only one key, because safetensors writes several keys in random order
        save_file(tensors, temporary, metadata={"cellmill": json.dumps(about)})
    corpora = digests.corpora.values()
    return {
        "n_cells": sum(len(corpus.cells) for corpus in corpora),
        "n_barcodes": sum(len(corpus.barcodes) for corpus in corpora),
        "unknown": digests.unknown,
        "sha256": sha256_file(folder / FILE),
    }


def read_digests(folder: Path, config: Mapping[str, Any]) -> CellDigests | None:
    """Read cells.digest of a model folder. Returns None for a model that has no such file.

    `config` is the content of the folder's config.json. Raises DataError if config.json names the file, but
    the file is missing, damaged or of another model.
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
    """Read the digests of corpus `number`.

    Raises ValueError if an array is not as `write_digests` would have written it.
    """
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
    has_right_ends = len(samples) and samples[0] == 0 and samples[-1] == len(arrays["barcodes"])
    if not has_right_ends or (np.diff(samples) < 0).any():
        raise ValueError(f"{number}.samples: expected offsets of its barcodes")
    if (arrays["cells"][1:] <= arrays["cells"][:-1]).any():
        raise ValueError(f"{number}.cells: expected ascending digests")
    gene_ids = arrays.pop("genes").tobytes().decode().split("\n")
    return CorpusDigests(gene_ids, **arrays)
