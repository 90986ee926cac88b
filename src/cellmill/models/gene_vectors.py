"""Given vectors of genes as part of a gene embedding, and the reader of their files.

A gene's embedding is its learned embedding plus a learned projection of its vector, without a bias:
a gene without a vector has only the learned embedding. Vectors are divided by their root mean
square over all genes that have one, so that the projection starts as large as a learned embedding.
Files are never unpickled.

Legend: T tokens of the batch, C cells, D numbers of a vector, H width of the model, V size of the
vocabulary.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cellmill.config.parts.family import GeneVectorsConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError
from cellmill.files import require_file
from cellmill.models.initial import STD, with_std

NAME = "gene_vectors"
TABLE = f"{NAME}.table.weight"


class GeneVectors(nn.Module):
    """The table (V, D), row-sharded like the learned table, and its projection."""

    def __init__(self, vocab_size: int, dim: int, hidden: int) -> None:
        super().__init__()
        # zeros, unless `initial_tensors` is given a file's
        self.table = with_std(nn.Embedding(vocab_size, dim), 0.0)
        self.project = with_std(nn.Linear(dim, hidden, bias=False), STD / dim**0.5)

    def forward(self, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        """Project the vectors that `look_up` reads from the table: (T, D) -> (T, H), or (C, D) -> (C, H)."""
        projected: Tensor = self.project(look_up(self.table.weight))
        return projected


def attach_gene_vectors(model: Any, config: GeneVectorsConfig, vocab_size: int) -> None:
    """Add `gene_vectors`, or None, to a family's model, its plan and its rows by gene."""
    if config.gene_vector_dim is None:
        model.gene_vectors = None
        return
    model.gene_vectors = GeneVectors(vocab_size, config.gene_vector_dim, model.width)
    plan = model.plan
    model.plan = replace(
        plan,
        begin=(*plan.begin, NAME),
        tensor={**plan.tensor, f"{NAME}.table": "vocabulary"} if plan.tensor else {},
    )
    model.gene_rows = model.gene_rows | {TABLE}
    if not config.train_gene_vectors:
        model.frozen = model.frozen | {TABLE}


def read_gene_vectors(path: Path, vocabulary: Vocabulary, dim: int) -> tuple[Tensor, int]:
    """Return the vectors of a vocabulary's tokens, and the number of genes that have one.

    Genes are found by Ensembl id or symbol. The table, (V, D) float32, has mean square 1 over the
    rows of genes that have a vector, and zeros in the others. Raise DataError, or ConfigError for
    another length.
    """
    vectors = read_vectors(path, [*zip(vocabulary.gene_ids, vocabulary.symbols)])
    width = vectors.shape[1]
    if width != dim:
        raise ConfigError(
            f"model.gene_vector_dim is {dim}, the vectors of {path} have {width} numbers; set it to {width}"
        )
    genes = vectors.isfinite().all(1).nonzero().flatten()
    root_mean_square = vectors[genes].square().mean().sqrt().clamp(min=1e-30)
    table = torch.zeros(vocabulary.n_tokens, dim)
    table[genes + len(SPECIAL)] = vectors[genes] / root_mean_square
    return table, len(genes)


def read_vectors(path: Path, genes: Sequence[tuple[str, ...]]) -> Tensor:
    """Return the vector of each gene by the first of its names that the file has, (genes, D) float32.

    A gene that the file lacks has NaN. Raise DataError if the file cannot be used, ConfigError if
    READERS have no reader for it.
    """
    if path.suffix not in READERS:
        raise ConfigError(
            f"{path}: expected a file of gene vectors, {' or '.join(READERS)}; convert it to one of them"
        )
    require_file(path)
    try:
        names, vectors = READERS[path.suffix](path)
    except (ValueError, OSError, EOFError, SafetensorError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from None
    if vectors.ndim != 2 or not vectors.is_floating_point():
        raise DataError(
            f"{path}: expected an array of (genes, numbers) of floats, got {tuple(vectors.shape)} of {vectors.dtype}"
        )
    row_of: dict[str, int] = {}
    for row, name in enumerate(names):
        if name in row_of:
            raise DataError(f"{path}: {name!r} names two vectors; leave one out")
        row_of[name] = row
    gene_rows = []
    for gene_names in genes:
        found_rows = [row_of[name] for name in gene_names if name in row_of]
        gene_rows.append(found_rows[0] if found_rows else -1)
    rows = torch.tensor(gene_rows)
    has_vector = rows >= 0
    if not has_vector.any():
        raise DataError(
            f"{path}: none of its {len(names):,} names is an Ensembl id or symbol of the vocabulary; the first is "
            f"{names[0] if names else 'missing'!r}, the vocabulary's {genes[0][0]!r}; name genes as it does"
        )
    found = vectors[rows.clamp(min=0)].float()
    bad = (has_vector & ~found.isfinite().all(1)).nonzero()
    if len(bad):
        name = names[int(rows[bad[0]])]
        raise DataError(
            f"{path}: the vector of {name} has a value that is not finite; correct it or leave the gene out"
        )
    found[~has_vector] = torch.nan
    return found


def _read_table(path: Path) -> tuple[list[str], Tensor]:
    """Read a gene and its numbers per line; a first line without numbers is a header.

    A header may lack the name of the first column.
    """
    names: list[str] = []
    rows = []
    width = 0
    has_header = False
    separator, separated = ("\t", "tabs") if path.suffix == ".tsv" else (",", "commas")
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=separator)
        for fields in filter(None, reader):
            is_first = not width
            if len(fields) == width + 1 and not names and has_header:
                width += 1  # the header has no name of the first column, as R writes it
            width = width or len(fields)
            line = f"{path}, line {reader.line_num}"
            if len(fields) != width or width < 2:
                expected = "a gene and its numbers"
                if width > 1:
                    expected = f"{width} columns as in the first line"
                raise DataError(
                    f"{line}: expected {expected}, separated by {separated}, got {len(fields)}; complete the line"
                )
            try:
                rows.append(np.array(fields[1:], np.float32))
            except ValueError:
                if is_first:
                    has_header = True
                    continue
                problem = f"{fields[0]!r} has a value that is not a number; correct it or leave the gene out"
                raise DataError(f"{line}: {problem}") from None
            names.append(fields[0].strip())
    if not names:
        raise DataError(f"{path}: no vectors; expected a line for each gene")
    return names, torch.from_numpy(np.stack(rows))


def _read_npy(path: Path) -> tuple[list[str], Tensor]:
    names_path = path.with_suffix(".genes.txt")
    if not names_path.is_file():
        raise DataError(
            f"{names_path}: no such file; expected the names of the genes of {path.name}, one a line"
        )
    names = [name.strip() for name in names_path.read_text(encoding="utf-8").split("\n")]
    if names[-1] == "":
        names.pop()
    vectors = np.load(path, allow_pickle=False)
    if vectors.ndim == 2 and len(names) != len(vectors):
        raise DataError(
            f"{names_path}: {len(names):,} names for the {len(vectors):,} vectors of {path.name}"
        )
    native = vectors.astype(vectors.dtype.newbyteorder("="))
    return names, torch.from_numpy(np.ascontiguousarray(native))


def _read_safetensors(path: Path) -> tuple[list[str], Tensor]:
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        vectors = [file.get_tensor(name) for name in names]
    shapes = {tuple(vector.shape): name for name, vector in zip(names, vectors)}
    if len(shapes) != 1 or vectors[0].ndim != 1:
        first_shapes = list(shapes.items())[:2]
        listed = ", ".join(f"{shape} of {name}" for shape, name in first_shapes) or "none"
        raise DataError(
            f"{path}: expected a vector per gene, all of one length, got shapes {listed}"
        )
    return names, torch.stack(vectors)


READERS = {
    ".npy": _read_npy,
    ".safetensors": _read_safetensors,
    ".tsv": _read_table,
    ".csv": _read_table,
}
