"""Votes on terms of the Cell Ontology: the most specific term with enough of the votes.

A vote for a term is also a vote for each of its superclasses. The information content of a term
measures how specific it is (Seco, Veale & Hayes 2004, ECAI): from 0 for `cell` to 1 for a term
without terms below it.
"""

from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np
import scipy.sparse as sp

from cellmill.data.genes.tables import cell_ontology
from cellmill.evaluate.atlas.votes import NO_LABEL

_ROUNDING = 1e-6  # shares of votes are rounded


class Terms:
    """Terms of the Cell Ontology that the labels of an atlas name, and their superclasses."""

    def __init__(self, labels: Sequence[str], terms: Sequence[str], are_ids: bool) -> None:
        self._label_of_term = dict(zip(terms, labels))
        self._terms = terms
        self._are_ids = are_ids

    @cached_property
    def _classes(self) -> list[str]:
        """Ids of the terms and their superclasses, the most specific first."""
        ontology = cell_ontology()
        ids = set[str]().union(*(ontology.ancestors(term) for term in self._terms))
        return sorted(ids, key=lambda term: (-ontology.information(term), term))

    @cached_property
    def names(self) -> list[str]:
        """Names of these classes: the labels; for superclasses ids if all labels are ids, names otherwise."""
        names = cell_ontology().names
        known = self._label_of_term
        return [known.get(term, term if self._are_ids else names[term]) for term in self._classes]

    @cached_property
    def _is_above(self) -> np.ndarray:
        """(labels, classes) float64: 1 where the class is the label's term or a superclass."""
        number = {term: index for index, term in enumerate(self._classes)}
        is_above = np.zeros((len(self._terms), len(number)))
        for label, term in enumerate(self._terms):
            is_above[label, [number[above] for above in cell_ontology().ancestors(term)]] = 1
        return is_above

    def climb(self, shares: sp.csr_matrix, certainty: float) -> tuple[np.ndarray, np.ndarray]:
        """Index in `names` of the most specific class with `certainty` of the votes, (cells,) int64,
        and its share of the votes, (cells,) float64.

        `shares` of the votes are `(cells, labels)`; a cell without votes has NO_LABEL.
        """
        votes = np.asarray(shares @ self._is_above)
        has_enough = votes >= certainty - _ROUNDING
        chosen = np.where(has_enough.any(axis=1), has_enough.argmax(axis=1), NO_LABEL)
        share = votes[np.arange(len(votes)), chosen]
        return chosen, np.where(chosen == NO_LABEL, np.nan, share)


def find_terms(labels: Sequence[str]) -> Terms | None:
    """Terms of `labels`, each an id, or a name in any case; None if one is neither."""
    are_ids = all(label in cell_ontology() for label in labels)
    known = [term for term in map(_find_term, labels) if term is not None]
    return Terms(labels, known, are_ids) if labels and len(known) == len(labels) else None


@cache
def _find_term(label: str) -> str | None:
    """Id of a term by its id or name in any case."""
    ontology = cell_ontology()
    return label if label in ontology else _ids_by_name().get(label.casefold())


@cache
def _ids_by_name() -> dict[str, str]:
    return {name.casefold(): term for term, name in cell_ontology().names.items()}


def credit_labels(labels: Sequence[str]) -> np.ndarray:
    """Credit of each predicted label for each true label, (labels, labels) float64.

    1 for the same term. For a superclass of the true term, its information divided by the information
    of the true term. 0 otherwise.
    """
    ontology = cell_ontology()
    terms = [_find_term(label) for label in labels]
    credit = np.zeros((len(terms), len(terms)))
    for column, true in enumerate(terms):
        for row, predicted in enumerate(terms):
            if true is None or predicted not in ontology.ancestors(true):
                continue
            # the root, as the true term, has no information
            same = predicted == true
            credit[row, column] = same or ontology.information(predicted) / ontology.information(
                true
            )
    return credit
