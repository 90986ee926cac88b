"""Records of a FASTA file, plain or gzip, read in blocks as rows of residues in sequence order.

A record is a row of a CSR matrix whose columns are residues: indices are in the order of the
sequence and may repeat, values are 1. Read as a matrix, repeats add up to the composition of the
sequence. Fields `key=value` of a header, as UniProt writes them, are columns of obs.
"""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.corpus import is_fasta
from cellmill.config.parts.tokens import RESIDUES
from cellmill.data.arrays import named_frame
from cellmill.data.inputs.h5 import open_bytes, reading
from cellmill.data.inputs.matrices import StoredMatrix
from cellmill.data.inputs.reader import refuse_duplicates
from cellmill.data.inputs.source import CountSource, Format, require_matrix
from cellmill.data.rows import row_offsets
from cellmill.errors import DataError

_FIELD = re.compile(r"(?:^|\s)([^\W_]\w*)=(.*?)(?=\s[^\W_]\w*=|$)")  # `_index` is reserved in .h5ad
_STOP = b"*"
_COLUMN = np.full(256, -1, np.int32)  # -1: no residue
_NUCLEOTIDES = frozenset(b"ACGTUN")
_CHANCE = 100  # residues that may all be letters of nucleotides
for _column, _letter in enumerate(RESIDUES):
    _COLUMN[[ord(_letter), ord(_letter.lower())]] = _column
# leucine or isoleucine, which models have no token for
_COLUMN[[ord("J"), ord("j")]] = RESIDUES.index("X")


def _open_fasta(path: Path, file: Any, counts: str) -> CountSource:
    """Open the sequences of a FASTA file.

    Headers are read once and kept. Each call of `parts` reads the sequences again. Raises DataError
    when the file is missing, damaged, empty, of nucleotides or no FASTA file, or when two records have
    the same name.
    """
    require_matrix(path, counts, ["X"])
    names = []
    headers = []
    letters = set[int]()
    n_letters = 0
    for name, header, sequence in _records(path):
        names.append(name)
        headers.append(header)
        letters.update(sequence.upper())
        n_letters += len(sequence)
    if not names:
        raise DataError(f"{path}: empty: no record")
    if letters <= _NUCLEOTIDES and n_letters > _CHANCE:
        raise DataError(
            f"{path}: has no other letter than A, C, G, T, U and N; expected proteins: translate it"
        )
    obs = _obs(names, headers)
    refuse_duplicates(path, "record", obs.index, "rename one of them")
    var = pd.DataFrame({"symbol": [*RESIDUES]}, index=pd.Index([*RESIDUES], name="gene_id"))
    return CountSource(path, counts, _FastaMatrix(path, len(names)), obs, var, ordered=True)


class _FastaMatrix(StoredMatrix):
    """CSR of ones `(sequences, residues)`, uint32, in sequence order."""

    def __init__(self, path: Path, n_sequences: int):
        self._path = path
        self.shape = (n_sequences, len(RESIDUES))

    def parts(self, block: int) -> Iterator[sp.csr_matrix]:
        """Do the same as `StoredMatrix.parts`.

        Raises DataError at the first letter that is no residue, naming the record.
        """
        records = (self._columns(name, sequence) for name, _, sequence in _records(self._path))
        for rows in iter(lambda: list(islice(records, block)), []):
            offsets = row_offsets(list(map(len, rows)))
            indices = np.concatenate(rows)
            ones = np.ones(len(indices), np.uint32)
            shape = (len(rows), len(RESIDUES))
            yield sp.csr_matrix((ones, indices, offsets), shape=shape)

    def _columns(self, name: str, sequence: bytes) -> np.ndarray:
        columns = _COLUMN[np.frombuffer(sequence.removesuffix(_STOP), np.uint8)]
        wrong = np.flatnonzero(columns < 0)
        if len(wrong):
            raise DataError(
                f"{self._path}: record {name!r}: expected a residue ({RESIDUES}) at {wrong[0] + 1:,}, got "
                f"{chr(sequence[wrong[0]])!r}; remove gaps, and stops inside a sequence"
            )
        return columns


def _records(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Name, rest of the header, and sequence without white space."""
    name: str | None = None
    header = ""
    lines = list[bytes]()
    with open_bytes(path) as file, reading(path):
        for line in map(bytes.strip, file):
            if b"\r" in line:
                raise DataError(
                    f"{path}: expected lines that end with \\n or \\r\\n, got \\r alone; convert it"
                )
            if line.startswith(b">"):
                if name is not None:
                    yield name, header, b"".join(lines)
                words = line[1:].decode("utf-8", "replace").split(maxsplit=1)
                if not words:
                    raise DataError(f"{path}: a record has no name; expected a word after '>'")
                name = words[0]
                header = "".join(words[1:])
                lines = []
            elif name is None and line:
                raise DataError(
                    f"{path}: not a FASTA file: expected a line that begins with '>', got {line[:20]!r}"
                )
            else:
                lines.append(b"".join(line.split()))
    if name is not None:
        yield name, header, b"".join(lines)


def _obs(names: list[str], headers: list[str]) -> pd.DataFrame:
    """Make obs: a column for each field of any header, and `description`, the text before the fields.

    Columns are categories.
    """
    columns: dict[str, list[str | None]] = {}
    for row, header in enumerate(headers):
        fields = dict(_FIELD.findall(header))
        text = _FIELD.sub("", header).strip()
        if text:
            fields["description"] = text
        for key, value in fields.items():
            columns.setdefault(key, [None] * len(names))[row] = value
    categories = {key: pd.Categorical(values) for key, values in columns.items()}
    return named_frame(names, categories)


FORMAT = Format(
    "FASTA of proteins (.fasta, .fa, .faa, also .gz)",
    lambda path, file: file is None and is_fasta(path),
    _open_fasta,
)
