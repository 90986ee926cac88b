"""Given vectors of genes as part of a gene embedding (a table and a learned projection), and the
reader of their files.

A gene's embedding is its learned one plus the projection of its vector, without a bias: of a gene
without a vector it is the learned one alone. Vectors are divided by their root mean square over all
genes that have one, so that the projection starts as large as a learned embedding. Files are never
unpickled.

Legend: T tokens of the batch, C cells, D numbers of a vector, H hidden.
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
    """The table (V, D), row-sharded as the learned one, and its projection."""

    def __init__(self, n_tokens: int, dim: int, hidden: int) -> None:
        super().__init__()
        # zeros, unless `initial_tensors` is given a file's
        self.table = with_std(nn.Embedding(n_tokens, dim), 0.0)
        self.project = with_std(nn.Linear(dim, hidden, bias=False), STD / dim**0.5)

    def forward(self, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        """(T, H) or (C, H): projections of what `look_up` makes of the table, (T, D) or (C, D)."""
        projected: Tensor = self.project(look_up(self.table.weight))
        return projected


def attach_gene_vectors(model: Any, config: GeneVectorsConfig, n_tokens: int) -> None:
    """Add `gene_vectors` to a family's model, or None, and what layouts and `init_from` have to
    know of it.
    """
    if config.gene_vector_dim is None:
        model.gene_vectors = None
        return
    model.gene_vectors = GeneVectors(n_tokens, config.gene_vector_dim, model.width)
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
    """Return the vectors of a vocabulary's tokens, found by Ensembl id or symbol, and the number of
    genes found.

    The table, (V, D) float32, has mean square 1 over the rows of genes that have a vector, and
    zeros in the others. Raises DataError, or ConfigError for another length.
    """
    found = read_vectors(path, [*zip(vocabulary.gene_ids, vocabulary.symbols)])
    if found.shape[1] != dim:
        raise ConfigError(
            f"model.gene_vector_dim is {dim}, the vectors of {path} have {found.shape[1]} numbers; set it to "
            f"{found.shape[1]}"
        )
    known = found.isfinite().all(1).nonzero().flatten()
    table = torch.zeros(vocabulary.n_tokens, dim)
    table[known + len(SPECIAL)] = found[known] / found[known].square().mean().sqrt().clamp(
        min=1e-30
    )
    return table, len(known)


def read_vectors(path: Path, genes: Sequence[tuple[str, ...]]) -> Tensor:
    """(genes, D) float32: vector of the first of each gene's names that the file has, NaN for a
    gene that it lacks.

    Raises DataError for a file that cannot be used, ConfigError for one of another kind than
    READERS.
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
    row = {name: at for at, name in enumerate(names)}
    if len(row) < len(names):
        twice = next(name for at, name in enumerate(names) if row[name] != at)
        raise DataError(f"{path}: {twice!r} names two vectors; leave one out")
    rows = torch.tensor(
        [next((row[name] for name in of_gene if name in row), -1) for of_gene in genes]
    )
    if not (rows >= 0).any():
        raise DataError(
            f"{path}: none of its {len(names):,} names is an Ensembl id or symbol of the vocabulary; the first is "
            f"{names[0] if names else 'missing'!r}, the vocabulary's {genes[0][0]!r}; name genes as it does"
        )
    found = vectors[rows.clamp(min=0)].float()
    bad = ((rows >= 0) & ~found.isfinite().all(1)).nonzero()
    if len(bad):
        name = names[int(rows[bad[0]])]
        raise DataError(
            f"{path}: the vector of {name} has a value that is not finite; correct it or leave the gene out"
        )
    found[rows < 0] = torch.nan
    return found


def _read_table(path: Path) -> tuple[list[str], Tensor]:
    """A gene and its numbers a line, below a header or not: the first line is one if it has
    anything but numbers.
    """
    names = []
    rows = []
    width = 0
    separator, separated = ("\t", "tabs") if path.suffix == ".tsv" else (",", "commas")
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=separator)
        for fields in filter(None, reader):
            first = not width
            width = width or len(fields)
            line = f"{path}, line {reader.line_num}"
            if len(fields) != width or width < 2:
                expected = (
                    f"{width} columns as in the first line"
                    if width > 1
                    else "a gene and its numbers"
                )
                raise DataError(
                    f"{line}: expected {expected}, separated by {separated}, got {len(fields)}; complete the line"
                )
            try:
                rows.append(np.array(fields[1:], np.float32))
            except ValueError:
                if first:
                    continue
                problem = f"{fields[0]!r} has a value that is not a number; correct it or leave the gene out"
                raise DataError(f"{line}: {problem}") from None
            names.append(fields[0].strip())
    if not names:
        raise DataError(f"{path}: no vectors; expected a line for each gene")
    return names, torch.from_numpy(np.stack(rows))


def _read_npy(path: Path) -> tuple[list[str], Tensor]:
    beside = path.with_suffix(".genes.txt")
    if not beside.is_file():
        raise DataError(
            f"{beside}: no such file; expected the names of the genes of {path.name}, one a line"
        )
    names = beside.read_text(encoding="utf-8").split("\n")
    names = [name.strip() for name in (names[:-1] if names[-1] == "" else names)]
    vectors = np.load(path, allow_pickle=False)
    if vectors.ndim == 2 and len(names) != len(vectors):
        raise DataError(
            f"{beside}: {len(names):,} names for the {len(vectors):,} vectors of {path.name}"
        )
    return names, torch.from_numpy(
        np.ascontiguousarray(vectors.astype(vectors.dtype.newbyteorder("=")))
    )


def _read_safetensors(path: Path) -> tuple[list[str], Tensor]:
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        vectors = [file.get_tensor(name) for name in names]
    shapes = {tuple(vector.shape): name for name, vector in zip(names, vectors)}
    if len(shapes) != 1 or vectors[0].ndim != 1:
        listed = (
            ", ".join(f"{shape} of {name}" for shape, name in list(shapes.items())[:2]) or "none"
        )
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
