"""Votes on terms of the Cell Ontology. The winner is the most specific term with enough of the votes.

A vote for a term is also a vote for each of its superclasses. The information content of a term says how
specific the term is (Seco, Veale & Hayes 2004, ECAI). It goes from 0 for `cell` to 1 for a term without
terms below it.
"""

from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np
import scipy.sparse as sp

from cellmill.data.genes.tables import cell_ontology
from cellmill.evaluate.atlas.votes import NO_LABEL

_ROUNDING = 1e-6  # a share of votes that is below the bound by at most this is enough


class Terms:
    """Terms of the Cell Ontology that the labels of an atlas stand for, and their superclasses.

    Terms and superclasses together are called classes.
    """

    def __init__(self, labels: Sequence[str], terms: Sequence[str], are_ids: bool) -> None:
        """`terms` has the id of each label's term. `are_ids` is True if all labels are such ids."""
        self._label_of_term = dict(zip(terms, labels))
        self._terms = terms
        self._are_ids = are_ids

    @cached_property
    def _classes(self) -> list[str]:
        """Ids of all classes, the most specific first."""
        ontology = cell_ontology()
        ids = set[str]().union(*(ontology.ancestors(term) for term in self._terms))
        return sorted(ids, key=lambda term: (-ontology.information(term), term))

    @cached_property
    def names(self) -> list[str]:
        """Names of all classes. A class that is a label's term has the label as its name.

        Other classes have their id if all labels are ids, otherwise their name in the ontology.
        """
        names = cell_ontology().names
        known = self._label_of_term
        return [known.get(term, term if self._are_ids else names[term]) for term in self._classes]

    @cached_property
    def _is_above(self) -> np.ndarray:
        """Matrix (labels, classes) float64: 1 if the class is the label's term or a superclass of it."""
        number = {term: index for index, term in enumerate(self._classes)}
        is_above = np.zeros((len(self._terms), len(number)))
        for label, term in enumerate(self._terms):
            is_above[label, [number[above] for above in cell_ontology().ancestors(term)]] = 1
        return is_above

    def climb(self, shares: sp.csr_matrix, certainty: float) -> tuple[np.ndarray, np.ndarray]:
        """Find the most specific class that has at least `certainty` of a cell's votes.

        `shares`, `(cells, labels)`, are the shares of the votes. Returns the index of the class in `names`,
        (cells,) int64, and the share of the votes for the class, (cells,) float64. A cell without votes has
        NO_LABEL and NaN.
        """
        votes = np.asarray(shares @ self._is_above)
        has_enough = votes >= certainty - _ROUNDING
        chosen = np.where(has_enough.any(axis=1), has_enough.argmax(axis=1), NO_LABEL)
        share = votes[np.arange(len(votes)), chosen]
        return chosen, np.where(chosen == NO_LABEL, np.nan, share)


def find_terms(labels: Sequence[str]) -> Terms | None:
    """Find the terms of `labels`, which are ids, or names in upper or lower case.

    Returns None if a label is no term.
    """
    are_ids = all(label in cell_ontology() for label in labels)
    known = [term for term in map(_find_term, labels) if term is not None]
    return Terms(labels, known, are_ids) if labels and len(known) == len(labels) else None


@cache
def _find_term(label: str) -> str | None:
    """Find the id of the term that a label stands for; None if the label is no term."""
    ontology = cell_ontology()
    return label if label in ontology else _ids_by_name().get(label.casefold())


@cache
def _ids_by_name() -> dict[str, str]:
    return {name.casefold(): term for term, name in cell_ontology().names.items()}


def credit_labels(labels: Sequence[str]) -> np.ndarray:
    """Compute the credit of each predicted label (row) for each true label (column).

    Returns (labels, labels) float64. The credit is 1 for the same term. A superclass of the true term has
    its information content divided by the information content of the true term. Other terms have 0.
    """
    ontology = cell_ontology()
    terms = [_find_term(label) for label in labels]
    credit = np.zeros((len(terms), len(terms)))
    for column, true in enumerate(terms):
        for row, predicted in enumerate(terms):
            if true is None or predicted not in ontology.ancestors(true):
                continue
            # equal terms are compared first, because the root has an information content of 0
            is_same = predicted == true
            credit[row, column] = is_same or ontology.information(predicted) / ontology.information(
                true
            )
    return credit
