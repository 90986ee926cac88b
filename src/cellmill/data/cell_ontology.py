"""The packaged Cell Ontology (ontology/README.md): is_a edges of its terms, and how near two terms are."""

import gzip
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

RELEASE = "2026-03-26"
_ID = re.compile(r"CL:\d{7}")


class CellOntology:
    """Terms and their is_a edges.

    Parameters
    ----------
    parents
        Ids of the direct superclasses of each term, by id.
    """

    def __init__(self, parents: Mapping[str, tuple[str, ...]]) -> None:
        self._parents = parents
        self._known: dict[str, dict[str, int]] = {}

    @property
    def terms(self) -> list[str]:
        return [*self._parents]

    def __contains__(self, term: str) -> bool:
        return term in self._parents

    def ancestors(self, term: str) -> dict[str, int]:
        """Least number of is_a edges from `term` up to each of its superclasses and, 0, to itself."""
        if term not in self._known:
            steps, waiting = {term: 0}, [term]
            for below in waiting:  # breadth first
                for above in self._parents[below]:
                    if above not in steps:
                        steps[above] = steps[below] + 1
                        waiting.append(above)
            self._known[term] = steps
        return self._known[term]

    def nearness(self, one: str, other: str) -> float:
        """Shared part of the superclasses of two terms, each with itself: intersection by union, 1 for the same term.

        The similarity simUI of Gentleman's package GOstats (2005). Every cell is a `cell`, so it is above 0.
        """
        a, b = self.ancestors(one).keys(), self.ancestors(other).keys()
        return len(a & b) / len(a | b)

    def steps(self, one: str, other: str) -> int:
        """is_a edges on the shortest way from both terms up to a common superclass (Rada et al. 1989)."""
        a, b = self.ancestors(one), self.ancestors(other)
        return min(a[term] + b[term] for term in a.keys() & b.keys())


def is_term_id(text: str) -> bool:
    """True for text of the form CL:0000084, known or not."""
    return _ID.fullmatch(text) is not None


@cache
def cell_ontology() -> CellOntology:
    with gzip.open(Path(__file__).parent / "ontology" / "cell_ontology.tsv.gz", "rt", encoding="utf-8") as file:
        next(file)
        rows = [line.rstrip("\n").split("\t") for line in file]
    return CellOntology({term: tuple(parents.split("|")) if parents else () for term, _, parents in rows})
