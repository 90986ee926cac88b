"""Simulated protein families, for examples and tests of sequences.

A family has a random ancestor; a member is the ancestor with substitutions, mostly inside a class
of similar residues, and a deletion. Frequencies are from Swiss-Prot (release statistics, amino acid
composition). A header has the mean hydropathy of the residues (Kyte & Doolittle 1982), a number
that a model can learn.
"""

import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cellmill.data.prepare.simulate import (
    LEVELS,
    MAX_SEED,
    MAX_TYPES,
    require_between,
    seeded,
)
from cellmill.files import atomic_path

FREQUENCY = {
    "A": 8.25, "Q": 3.93, "L": 9.65, "S": 6.65, "R": 5.53, "E": 6.71, "K": 5.79, "T": 5.36, "N": 4.06, "G": 7.07,
    "M": 2.41, "W": 1.1, "D": 5.46, "H": 2.27, "F": 3.86, "Y": 2.92, "C": 1.38, "I": 5.9, "P": 4.74, "V": 6.85,
}  # fmt: skip
HYDROPATHY = {
    "A": 1.8, "R": -4.5, "N": -3.5, "D": -3.5, "C": 2.5, "Q": -3.5, "E": -3.5, "G": -0.4, "H": -3.2, "I": 4.5,
    "L": 3.8, "K": -3.9, "M": 1.9, "F": 2.8, "P": -1.6, "S": -0.8, "T": -0.7, "W": -0.9, "Y": -1.3, "V": 4.2,
}  # fmt: skip
CLASSES = ("AGST", "ILMV", "FWY", "DENQ", "HKR", "C", "P")  # similar residues
LENGTH = (60, 120)  # residues of an ancestor
SUBSTITUTED_FRAC = 0.2
SIMILAR_FRAC = 0.7
MAX_DELETION = 10


def write_sequences(out: Path, sequences: int, families: int, seed: int) -> None:
    """Write a FASTA file, gzip if `out` ends in .gz; a header has its family and its hydropathy.

    Raises ConfigError when a number is out of range.
    """
    require_between("cells", sequences, 1, 10**7)
    require_between("types", families, 1, MAX_TYPES)
    require_between("seed", seed, 0, MAX_SEED)
    text = "".join(_draw_records(sequences, families, seed)).encode()
    with atomic_path(out) as temporary:
        temporary.write_bytes(gzip.compress(text, mtime=0) if out.suffix == ".gz" else text)


def _draw_records(sequences: int, families: int, seed: int) -> Iterator[str]:
    random = seeded(seed, LEVELS)
    letters = np.array(list(FREQUENCY))
    weights = np.array(list(FREQUENCY.values()))
    frequency = weights / weights.sum()
    ancestors = []
    for _ in range(families):
        length = random.integers(*LENGTH)
        ancestors.append(random.choice(letters, length, p=frequency))
    for number in range(sequences):
        family = int(random.integers(families))
        member = ancestors[family].copy()
        is_substituted = random.random(len(member)) < SUBSTITUTED_FRAC
        for position in np.flatnonzero(is_substituted):
            if random.random() < SIMILAR_FRAC:
                similar = next(residues for residues in CLASSES if member[position] in residues)
                member[position] = random.choice(list(similar))
            else:
                member[position] = random.choice(letters, p=frequency)
        start = random.integers(len(member))
        stop = start + random.integers(MAX_DELETION + 1)
        member = np.delete(member, slice(start, stop))
        hydropathy = sum(HYDROPATHY[residue] for residue in member) / len(member)
        header = f"protein_{number} family=family_{family} hydropathy={hydropathy:.3f}"
        yield f">{header}\n{''.join(member)}\n"
