"""Names to Ensembl ids, never by a guess; the Cell Ontology: distances by hand, and a packaged table that is whole."""

from __future__ import annotations

import gzip
from pathlib import Path

import pandas as pd
import pytest

from cellmill.data.genes import names as genes
from cellmill.data.genes.names import ID_COLUMNS, map_genes
from cellmill.data.genes.tables import ORGANISMS, CellOntology, cell_ontology, gene_id, gene_table


def ids(names: list[str], organism: str | None = "human", **columns: list[str]) -> list[str]:
    return map_genes(names, pd.DataFrame(columns, index=names), organism).gene_ids


def test_ids_are_taken_without_their_version() -> None:
    assert ids(["ENSG00000139618", "ENSG00000139618.12", "ENSG00000182378.14_PAR_Y"]) == [
        "ENSG00000139618",
        "ENSG00000139618",
        "ENSG00000182378",
    ]
    assert ids(["ENSMUSG00000041147.8"], "mouse") == ["ENSMUSG00000041147"]
    assert ids(["ENSMUSG00000041147", "xENSG00000139618", "ENSG1", "ENSG00000139618-1"]) == [""] * 4


@pytest.mark.parametrize("column", ID_COLUMNS)
def test_an_id_in_a_column_takes_precedence_over_the_name(column: str) -> None:
    names = ["TP53", "whatever", "BRCA2"]
    got = ids(names, **{column: ["ENSG00000000003", "ENSG00000000419.9", ""]})
    assert got == ["ENSG00000000003", "ENSG00000000419", "ENSG00000139618"]


def test_current_symbols_take_precedence_over_previous_ones_and_those_over_aliases() -> None:
    mapped = map_genes(["BRCA2", "C10orf11", "FANCD1", "SEP15", "C10ORF11"], pd.DataFrame(index=range(5)), "human")
    assert mapped.gene_ids[0] == mapped.gene_ids[2] == "ENSG00000139618"
    assert mapped.gene_ids[1] == mapped.gene_ids[4] == "ENSG00000148655"
    assert mapped.symbols == ["BRCA2", "LRMDA", "BRCA2", "SELENOF", "LRMDA"]
    assert mapped.coverage.as_json() == {
        "organism": "human",
        "n_genes": 5,
        "id": 0,
        "symbol": 1,
        "previous": 1 + (gene_table("human").ids["previous"].get("FANCD1") is not None),
        "alias": 3 - (gene_table("human").ids["previous"].get("FANCD1") is not None),
        "ambiguous": 0,
        "unmapped": 0,
        "examples": [],
        "frac": 1.0,
    }


def test_an_ambiguous_name_maps_to_no_gene() -> None:
    mapped = map_genes(["QARS", "no-such-gene", "TP53"], pd.DataFrame(index=range(3)), "human")
    assert mapped.gene_ids[:2] == ["", ""]
    assert (mapped.coverage.ambiguous, mapped.coverage.unmapped, mapped.coverage.symbol) == (1, 1, 1)
    assert mapped.coverage.examples == ("QARS", "no-such-gene")
    assert mapped.coverage.frac == pytest.approx(1 / 3)


def test_an_approved_symbol_is_never_an_alias_of_another_gene() -> None:
    for organism in ORGANISMS:
        table = gene_table(organism)
        for kind in ("previous", "alias"):
            wrong = {n for n, gene in table.ids[kind].items() if gene and n in table.ids["symbol"]}
            assert not {n for n in wrong if table.ids["symbol"][n] not in ("", table.ids[kind][n])}


def test_names_of_the_other_organism_do_not_map() -> None:
    human = [symbol for symbol in list(gene_table("human").symbols.values())[:2000] if not symbol.startswith("ENSG")]
    mouse = [symbol for symbol in list(gene_table("mouse").symbols.values())[:2000] if not symbol.startswith("ENSMUSG")]
    assert map_genes(human, pd.DataFrame(index=human), "mouse").coverage.frac < 0.05
    assert map_genes(mouse, pd.DataFrame(index=mouse), "human").coverage.frac < 0.05


def test_mitochondrial_genes_are_recognised_by_symbol_when_named_by_id() -> None:
    names = ["ENSG00000198804", "MT-CO1", "ENSG00000139618", "MT1X"]
    assert map_genes(names, pd.DataFrame(index=names), "human").is_mito.tolist() == [True, True, False, False]
    assert map_genes(["mt-Co1", "Mtor"], pd.DataFrame(index=range(2)), "mouse").is_mito.tolist() == [True, False]
    assert sum(symbol.startswith("MT-") for symbol in gene_table("human").symbols.values()) == 37
    assert sum(symbol.startswith("mt-") for symbol in gene_table("mouse").symbols.values()) == 37


def test_without_an_organism_names_are_used_as_ids() -> None:
    mapped = map_genes(["a", "b"], pd.DataFrame({"symbol": ["MT-X", None]}, index=["a", "b"]), None)
    assert (mapped.gene_ids, mapped.symbols, mapped.is_mito.tolist()) == (["a", "b"], ["MT-X", "b"], [True, False])
    assert mapped.coverage.frac == 1.0


def test_the_tables_are_sorted_complete_and_without_a_timestamp() -> None:
    for organism, n_genes, coding in (("human", 79_012, 20_120), ("mouse", 78_317, 21_807)):
        path = Path(genes.__file__).parent / f"{organism}.tsv.gz"
        assert path.read_bytes()[4:8] == bytes(4)
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [line.rstrip("\n").split("\t") for line in file]
        assert rows[0] == ["gene_id", "symbol", "previous", "aliases", "biotype"]
        assert {len(row) for row in rows} == {5}
        found = [row[0] for row in rows[1:]]
        assert found == sorted(set(found))
        assert len(found) == n_genes
        assert sum(row[4] == "protein_coding" for row in rows) == coding
        assert all(gene_id(gene, organism) for gene in found)


def test_an_id_beside_a_symbol_is_taken_on_either_side_with_or_without_a_version() -> None:
    names = [
        "HLA-DRA_ENSG00000204287",
        "HLA-DRA_ENSG00000204287.12",
        "ENSG00000204287.12_HLA-DRA",
        "7SK|ENSG00000204287",
    ]
    assert ids([*names, "GRCh38_ENSG00000204287"]) == ["ENSG00000204287"] * 5
    assert ids(["Actb_ENSMUSG00000029580"], "mouse") == ["ENSMUSG00000029580"]
    others = ["HLADRAENSG00000204287", "A_ENSG000002042871", "ENSG00000204287_1", "ENSG00000204287_ENSG00000139618"]
    assert ids(others) == [""] * 4
    assert ids(["HLA-DRA_ENSG00000204287"], "mouse") == [""]


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
