"""Hashes and random draws that are pure functions of their keys.

No generator advances: what is drawn for a cell, a window or a shard depends only on a seed and on
its position. So any step is reached without replaying earlier steps, and results do not depend on
the number of processes or on the machine.
"""

import hashlib

import numpy as np

# purposes of random words, the second half of their key
BLOCKS = 1
WINDOW = 2
SHARDS = 3
REPEATS = 4
READS_OF_LEVELS = 5

SECOND_HASH = np.uint64(0x243F6A8885A308D3)  # key of the second of two hashes: digits of pi
SPLITMIX_GAMMA = np.uint64(0x9E3779B97F4A7C15)
# shifts and factors of splitmix64
SPLITMIX_ROUNDS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), np.uint64(1)),
)


def hash_text(text: str, seed: int = 0) -> int:
    """64-bit hash of a text, the same on every machine."""
    key = seed.to_bytes(8, "little")
    hashed = hashlib.blake2b(text.encode(), digest_size=8, key=key)
    return int.from_bytes(hashed.digest(), "little")


def splitmix64(values: np.ndarray, in_place: bool = False) -> np.ndarray:
    """Mix uint64 values, one to one; `in_place` takes half the time.

    Finalizer of SplittableRandom (Steele, Lea and Flood 2014).
    """
    mixed = values if in_place else values.copy()
    shifted = np.empty_like(mixed)
    mixed += SPLITMIX_GAMMA
    for bits, factor in SPLITMIX_ROUNDS:
        np.right_shift(mixed, bits, out=shifted)
        mixed ^= shifted
        if factor > 1:
            mixed *= factor
    return mixed


def random_words(n: int, seed: int, purpose: int, *position: int) -> np.ndarray:
    """Draw `n` uint64, a function only of the arguments; `position` has at most three numbers.

    These are raw words of Philox. numpy keeps them stable between versions, unlike
    Generator.permutation.
    """
    counter = np.zeros(4, np.uint64)  # Philox itself increments the lowest word
    counter[1 : 1 + len(position)] = position
    key = np.array([seed, purpose], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(n)


def permutation(n: int, seed: int, purpose: int, *position: int) -> np.ndarray:
    """Permute `range(n)`, int64, by `random_words` of the same arguments."""
    words = random_words(n, seed, purpose, *position)
    order = np.argsort(words)  # half the time of a stable sort, and equal without ties
    ordered = words[order]
    has_ties = (ordered[1:] == ordered[:-1]).any()
    return np.argsort(words, kind="stable") if has_ties else order
