"""The Cell Ontology: distances by hand, and a packaged table that is whole."""

from __future__ import annotations

import pytest

from cellmill.data.genes.tables import CellOntology, cell_ontology

#     cell
#    /    \
#  blood  nerve
#   |   \  /
#   T   both
#   |
#   CD4
SMALL = CellOntology(
    {"cell": (), "blood": ("cell",), "nerve": ("cell",), "T": ("blood",), "both": ("blood", "nerve"), "CD4": ("T",)}
)


@pytest.mark.parametrize(
    ("one", "other", "nearness", "steps"),
    [
        ("T", "T", 1, 0),
        ("CD4", "T", 3 / 4, 1),
        ("T", "nerve", 1 / 4, 3),
        ("T", "both", 2 / 5, 2),
        ("CD4", "nerve", 1 / 5, 4),
        ("both", "nerve", 2 / 4, 1),
        ("cell", "CD4", 1 / 4, 3),
    ],
)
def test_nearness_and_steps_are_those_counted_by_hand(one: str, other: str, nearness: float, steps: int) -> None:
    for a, b in ((one, other), (other, one)):
        assert SMALL.nearness(a, b) == pytest.approx(nearness)
        assert SMALL.steps(a, b) == steps


def test_terms_of_the_packaged_table_lead_to_cell_and_known_types_are_where_they_belong() -> None:
    ontology = cell_ontology()
    t_cell, b_cell, lymphocyte, neuron = "CL:0000084", "CL:0000236", "CL:0000542", "CL:0000540"
    assert ontology.ancestors(t_cell)[lymphocyte] == 1
    assert ontology.steps(t_cell, b_cell) == 3  # a B cell is a lymphocyte of B lineage, which is a lymphocyte
    assert ontology.nearness(t_cell, b_cell) > ontology.nearness(t_cell, neuron) > 0
    assert "CL:0000003" not in ontology  # obsolete
    assert len(ontology.terms) == 3316
    assert all("CL:0000000" in ontology.ancestors(term) for term in ontology.terms)
