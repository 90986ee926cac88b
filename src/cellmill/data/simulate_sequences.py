"""Simulated protein families, for examples and tests that run without a network.

A family has a random ancestor; a member is the ancestor with substitutions, mostly inside a class of similar residues,
and a deletion. So residues can be predicted from their context, and families told apart. The residues' frequencies are
those of Swiss-Prot (UniProtKB/Swiss-Prot release statistics, amino acid composition). A header has the mean hydropathy
of the sequence's residues (Kyte & Doolittle 1982), a number that a model can learn.
"""

import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cellmill.errors import ConfigError
from cellmill.files import atomic_path

FREQUENCY = {
    "A": 8.25,
    "Q": 3.93,
    "L": 9.65,
    "S": 6.65,
    "R": 5.53,
    "E": 6.71,
    "K": 5.79,
    "T": 5.36,
    "N": 4.06,
    "G": 7.07,
    "M": 2.41,
    "W": 1.10,
    "D": 5.46,
    "H": 2.27,
    "F": 3.86,
    "Y": 2.92,
    "C": 1.38,
    "I": 5.90,
    "P": 4.74,
    "V": 6.85,
}
HYDROPATHY = {
    "A": 1.8,
    "R": -4.5,
    "N": -3.5,
    "D": -3.5,
    "C": 2.5,
    "Q": -3.5,
    "E": -3.5,
    "G": -0.4,
    "H": -3.2,
    "I": 4.5,
    "L": 3.8,
    "K": -3.9,
    "M": 1.9,
    "F": 2.8,
    "P": -1.6,
    "S": -0.8,
    "T": -0.7,
    "W": -0.9,
    "Y": -1.3,
    "V": 4.2,
}
SIMILAR = ("AGST", "ILMV", "FWY", "DENQ", "HKR", "C", "P")
LENGTH = (60, 120)  # residues of an ancestor
SUBSTITUTED_FRAC, SIMILAR_FRAC = 0.2, 0.7
LONGEST_DELETION = 10


def write_sequences(out: Path, sequences: int, families: int, seed: int) -> None:
    """Write a FASTA file, gzip if `out` ends in .gz; a header has its family and its hydropathy.

    Raises ConfigError.
    """
    for name, value, high in (("cells", sequences, 10**7), ("types", families, 1000)):
        if not 1 <= value <= high:
            raise ConfigError(f"--{name}: expected 1 to {high:,}, got {value}")
    with atomic_path(out) as temporary:
        text = "".join(_records(sequences, families, seed)).encode()
        temporary.write_bytes(gzip.compress(text, mtime=0) if out.suffix == ".gz" else text)


def _records(sequences: int, families: int, seed: int) -> Iterator[str]:
    random = np.random.Generator(np.random.Philox(key=[seed, 0]))
    letters, weights = np.array(list(FREQUENCY)), np.array(list(FREQUENCY.values()))
    frequency = weights / weights.sum()
    similar = {letter: list(group) for group in SIMILAR for letter in group}
    ancestors = [random.choice(letters, random.integers(*LENGTH), p=frequency) for _ in range(families)]
    for number in range(sequences):
        family = int(random.integers(families))
        member = ancestors[family].copy()
        for at in np.flatnonzero(random.random(len(member)) < SUBSTITUTED_FRAC):
            near = random.random() < SIMILAR_FRAC
            member[at] = random.choice(similar[str(member[at])]) if near else random.choice(letters, p=frequency)
        first, n = random.integers(len(member)), random.integers(LONGEST_DELETION + 1)
        member = np.delete(member, slice(first, first + n))
        hydropathy = sum(HYDROPATHY[residue] for residue in member) / len(member)
        yield f">protein_{number} family=family_{family} hydropathy={hydropathy:.3f}\n{''.join(member)}\n"
