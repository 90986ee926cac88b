"""Genes of a corpus as tokens.

They are a file, whose digest is recorded in shards, checkpoints and exported models. Token 0 is
`<pad>`, 1 is `<mask>`, and the gene in row g of the vocabulary is token g + 2. Genes are sorted by id.
Each has the median of its counts per 10,000 over the cells in which it is detected: the scale of rank
values (Geneformer, Theodoris et al. 2023).

Up to three lines may follow the genes. `#training_cells`, if only training cells were read: their
number, the number of all cells, and the obs column of the split (empty: by content). `#variability`,
if the corpus asks for it: the position of each gene by variability. `#quantiles`, likewise: quantiles
of all nonzero values at equal steps of probability.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from cellmill.config.parts.tokens import SPECIAL
from cellmill.errors import DataError
from cellmill.files import require_file, write_text

COLUMNS = ("token_id", "gene_id", "symbol", "n_cells", "median")
QUANTILES = "#quantiles"  # first field of the line
VARIABILITY = "#variability"
TRAINING = "#training_cells"


@dataclass(frozen=True)
class VocabularyCells:
    """The training cells of a split, from which the genes and medians of a vocabulary come."""

    n_training: int
    n_all: int
    # obs column, or empty for a split by the content of cells over all genes of their files
    split_by: str

    def __str__(self) -> str:
        how = "split by their content over all genes"
        if self.split_by:
            how = f"shard.split_by {self.split_by}"
        return f"{self.n_training:,} training cells of {self.n_all:,} cells ({how})"


@dataclass(frozen=True)
class KnownGenes:
    """Genes of a corpus that a model has."""

    n_known: int
    n_genes: int
    expressed_frac: float
    """Share of expressed genes that the model has: genes are weighted by the cells that express them."""

    def __str__(self) -> str:
        return (
            f"{self.n_known:,} of {self.n_genes:,} genes, {self.expressed_frac:.1%} of those that a cell of the corpus "
            "expresses"
        )


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Genes in token order; row g is token g + len(SPECIAL). Equal vocabularies have equal digests."""

    gene_ids: list[str]
    symbols: list[str]
    n_cells: np.ndarray  # number of cells of the corpus in which each gene is detected; int64
    # median counts per 10,000 over the cells in which a gene is detected; float32
    medians: np.ndarray
    # quantiles of all nonzero log(1 + counts per 10,000), ascending; float32
    quantiles: np.ndarray | None = None
    # position of each gene by variability, from 0 for the most variable one; int32
    variability: np.ndarray | None = None
    # cells that were read; None for all cells of the corpus
    training: VocabularyCells | None = None

    @property
    def n_genes(self) -> int:
        return len(self.gene_ids)

    @property
    def n_tokens(self) -> int:
        return len(self.gene_ids) + len(SPECIAL)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the file's text."""
        return hashlib.sha256(self._text.encode()).hexdigest()

    def rows_of(self, gene_ids: Sequence[str]) -> np.ndarray:
        """Row of each gene, int32; -1 for genes not in the vocabulary."""
        return np.array([self._rows.get(gene, -1) for gene in gene_ids], dtype=np.int32)

    def known_by(self, other: "Vocabulary") -> KnownGenes:
        """Return which of these genes another vocabulary has, found by Ensembl id."""
        known = other.rows_of(self.gene_ids) >= 0
        cells = self.n_cells.astype(np.float64) if self.n_cells.any() else np.ones(self.n_genes)
        return KnownGenes(int(known.sum()), self.n_genes, float(cells[known].sum() / cells.sum()))

    def write(self, path: Path) -> None:
        """Write the TSV, atomically."""
        write_text(path, self._text)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a TSV of `write`. Raises DataError naming the malformed line."""
        require_file(path)
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError:
            raise DataError(f"{path}: not a vocabulary: not UTF-8 text") from None
        if lines.pop() != "" and lines:
            raise DataError(
                f"{path}: not a complete vocabulary: its last line is cut; copy it again"
            )
        if not lines or tuple(lines[0].split("\t")) != COLUMNS:
            raise DataError(
                f"{path}: not a complete vocabulary: expected columns {', '.join(COLUMNS)}"
            )
        quantiles = None
        variability = None
        training = None
        if lines[-1].startswith(QUANTILES):
            quantiles = _read_quantiles(lines.pop(), f"{path}, last line")
        if lines[-1].startswith(VARIABILITY):
            try:
                variability = as_permutation(lines.pop().split("\t")[1:], _n_genes(lines))
            except ValueError:
                fault = f"expected {VARIABILITY} and a position for each gene"
                raise DataError(f"{path}, line {len(lines) + 1}: {fault}") from None
        if lines[-1].startswith(TRAINING):
            training = _read_training(lines.pop(), f"{path}, line {len(lines) + 1}")
        gene_ids = list[str]()
        symbols = list[str]()
        n_cells = list[int]()
        medians = list[np.float32]()
        for token, line in enumerate(lines[1:]):
            is_special = token < len(SPECIAL)
            try:
                number, gene, symbol, count, median = line.split("\t")
                if int(number) != token or not 0 <= int(count or 0) < 2**63:
                    raise ValueError
                if is_special and gene != SPECIAL[token]:
                    raise ValueError
                if not is_special:
                    n_cells.append(int(count))
                    medians.append(np.float32(median))
                    gene_ids.append(gene)
                    symbols.append(symbol)
            except ValueError:
                fields = SPECIAL[token] if is_special else "gene id, symbol, n_cells, median"
                raise DataError(
                    f"{path}, line {token + 2}: expected token {token}: {fields}"
                ) from None
        vocabulary = cls(
            gene_ids,
            symbols,
            np.array(n_cells, np.int64),
            np.array(medians, np.float32),
            quantiles,
            variability,
            training,
        )
        if not gene_ids or len(vocabulary._rows) != len(gene_ids):
            raise DataError(f"{path}: not a vocabulary: no genes, or a duplicate")
        if not (np.isfinite(vocabulary.medians) & (vocabulary.medians > 0)).all():
            raise DataError(f"{path}: not a vocabulary: a median is not a positive number")
        return vocabulary

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {gene: row for row, gene in enumerate(self.gene_ids)}

    @cached_property
    def _text(self) -> str:
        rows: list[tuple[str, ...]] = [COLUMNS]
        for token, name in enumerate(SPECIAL):
            rows.append((str(token), name, "", "", ""))
        n_cells = map(str, self.n_cells.tolist())
        columns = (self.gene_ids, self.symbols, n_cells, _decimals(self.medians))
        for token, fields in enumerate(zip(*columns), len(SPECIAL)):
            rows.append((str(token), *fields))
        cells = self.training
        if cells is not None:
            rows.append((TRAINING, str(cells.n_training), str(cells.n_all), cells.split_by))
        if self.variability is not None:
            rows.append((VARIABILITY, *map(str, self.variability.tolist())))
        if self.quantiles is not None:
            rows.append((QUANTILES, *_decimals(self.quantiles)))
        return "".join("\t".join(row) + "\n" for row in rows)


def _decimals(numbers: np.ndarray) -> list[str]:
    """The shortest decimals that are `numbers`, float32, without an exponent."""
    return [np.format_float_positional(n, unique=True, trim="-") for n in numbers]


def _read_quantiles(line: str, where: str) -> np.ndarray:
    try:
        quantiles = np.array(line.split("\t")[1:], np.float32)
    except ValueError:
        quantiles = np.empty(0, np.float32)
    is_ascending = np.isfinite(quantiles).all() and (np.diff(quantiles) >= 0).all()
    if len(quantiles) < 2 or not is_ascending:
        raise DataError(f"{where}: expected {QUANTILES} and at least two ascending numbers")
    return quantiles


def _n_genes(lines: list[str]) -> int:
    """Number of lines of genes, after the header and the special tokens."""
    return len(lines) - 1 - len(SPECIAL) - lines[-1].startswith(TRAINING)


def _read_training(line: str, where: str) -> VocabularyCells:
    try:
        _, n_training, n_all, split_by = line.split("\t")
        training = VocabularyCells(int(n_training), int(n_all), split_by)
        if not 0 < training.n_training <= training.n_all < 2**63:
            raise ValueError
    except ValueError:
        raise DataError(
            f"{where}: expected {TRAINING}, two numbers of cells, and the column of the split"
        ) from None
    return training


def as_permutation(numbers: Sequence[str | int], n_genes: int) -> np.ndarray:
    """Return the positions of `n_genes` genes, int32. Raises ValueError unless each occurs once."""
    positions = np.array([int(number) for number in numbers if len(str(number)) < 10], np.int32)
    if len(numbers) != n_genes or not np.array_equal(np.sort(positions), np.arange(n_genes)):
        raise ValueError(f"expected the positions 0 to {n_genes - 1:,}, each once")
    return positions
