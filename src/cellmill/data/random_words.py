"""Random numbers of the data engine: raw Philox words, a function of seed, purpose and position alone."""

import numpy as np


def random_words(n: int, seed: int, purpose: int, *position: int) -> np.ndarray:
    """Return `n` random uint64, a function of the arguments alone (at most three of `position`).

    They are raw words, which numpy keeps stable between versions, unlike Generator.permutation.
    """
    counter = np.zeros(4, np.uint64)  # Philox itself increments the lowest word
    counter[1 : 1 + len(position)] = position
    return np.random.Philox(key=np.array([seed, purpose], np.uint64), counter=counter).random_raw(n)


def permutation(n: int, seed: int, purpose: int, *position: int) -> np.ndarray:
    """Permutation of `n`, int64, a function of its arguments alone (at most three of `position`)."""
    words = random_words(n, seed, purpose, *position)
    order = np.argsort(words)  # half the time of a stable sort, and equal without ties
    ordered = words[order]
    return np.argsort(words, kind="stable") if (ordered[1:] == ordered[:-1]).any() else order
