"""Names to Ensembl ids, never by a guess; one-to-one orthologs, to a corpus of both organisms; the
Cell Ontology.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellmill.data.genes.build import build_vocabulary
from cellmill.data.genes.names import map_genes, match_columns
from cellmill.data.genes.tables import (
    CellOntology,
    cell_ontology,
    gene_table,
    organism_of,
    orthologs,
)
from cellmill.data.inputs.formats import open_counts
from cellmill.errors import ConfigError, DataError
from tests.unit.test_preprocess import run as preprocessed


def ids(names: list[str], organism: str | None = "human", **columns: list[str]) -> list[str]:
    return map_genes(names, pd.DataFrame(columns, index=names), organism).gene_ids


HLA_DRA = "ENSG00000204287"
BRCA2 = "ENSG00000139618"


@pytest.mark.parametrize(
    ("organism", "gene", "names"),
    [
        ("human", BRCA2, [BRCA2, f"{BRCA2}.12"]),
        (
            "human",
            "ENSG00000182378",
            ["ENSG00000182378.14_PAR_Y", "ENSGR0000182378", "ENSGR0000182378.10"],
        ),
        ("human", "ENSG00000223972", ["ENSG00000223972.5_2", "DDX11L1_ENSG00000223972.5_2"]),
        ("mouse", "ENSMUSG00000041147", ["ENSMUSG00000041147.8"]),
        (
            "human",
            HLA_DRA,
            [
                f"HLA-DRA_{HLA_DRA}",
                f"HLA-DRA_{HLA_DRA}.12",
                f"{HLA_DRA}.12_HLA-DRA",
                f"7SK|{HLA_DRA}",
            ],
        ),
        ("human", HLA_DRA, [f"GRCh38_{HLA_DRA}"]),
        ("mouse", "ENSMUSG00000029580", ["Actb_ENSMUSG00000029580"]),
        (
            "human",
            "",
            [
                "ENSMUSG00000041147",
                f"x{BRCA2}",
                "ENSG1",
                f"{BRCA2}-1",
                f"HLADRA{HLA_DRA}",
                f"A_{HLA_DRA}1",
            ],
        ),
        ("human", "", [f"{HLA_DRA}_1", f"{HLA_DRA}_{BRCA2}"]),
        ("mouse", "", [f"HLA-DRA_{HLA_DRA}"]),
    ],
)
def test_an_id_is_read_without_its_version(organism: str, gene: str, names: list[str]) -> None:
    assert ids(names, organism) == [gene] * len(names)


@pytest.mark.parametrize("column", ["gene_ids", "featureid", "Accession", "anything"])
def test_an_id_in_a_column_takes_precedence_over_the_name(column: str) -> None:
    names = ["TP53", "whatever", "BRCA2"]
    got = ids(names, **{column: ["ENSG00000000003", "ENSG00000000419.9", ""]})
    assert got == ["ENSG00000000003", "ENSG00000000419", "ENSG00000139618"]


def test_current_symbols_precede_previous_symbols() -> None:
    mapped = map_genes(
        ["BRCA2", "C10orf11", "FANCD1", "SEP15", "C10ORF11"], pd.DataFrame(index=range(5)), "human"
    )
    assert mapped.gene_ids[0] == mapped.gene_ids[2] == "ENSG00000139618"
    assert mapped.gene_ids[1] == mapped.gene_ids[4] == "ENSG00000148655"
    assert mapped.symbols == ["BRCA2", "LRMDA", "BRCA2", "SELENOF", "LRMDA"]
    previous = "FANCD1" in gene_table("human").ids["previous"]
    found = {
        "id": 0,
        "symbol": 1,
        "previous": 1 + previous,
        "alias": 3 - previous,
        "ambiguous": 0,
        "unmapped": 0,
    }
    assert mapped.coverage.as_json() == {
        "organism": "human",
        "n_genes": 5,
        **found,
        "examples": [],
        "frac": 1.0,
    }


def test_an_ambiguous_name_maps_to_no_gene() -> None:
    mapped = map_genes(["QARS", "no-such-gene", "TP53"], pd.DataFrame(index=range(3)), "human")
    assert mapped.gene_ids[:2] == ["", ""]
    assert (mapped.coverage.ambiguous, mapped.coverage.unmapped, mapped.coverage.symbol) == (
        1,
        1,
        1,
    )
    assert mapped.coverage.examples == ("QARS", "no-such-gene")
    assert mapped.coverage.frac == pytest.approx(1 / 3)


def test_mitochondrial_genes_are_recognised_among_ids() -> None:
    names = ["ENSG00000198804", "MT-CO1", "ENSG00000139618", "MT1X"]
    assert map_genes(names, pd.DataFrame(index=names), "human").is_mito.tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert map_genes(
        ["mt-Co1", "Mtor"], pd.DataFrame(index=range(2)), "mouse"
    ).is_mito.tolist() == [True, False]
    # rats, flies, and names of R
    names = ["Mt-nd1", "mt:ND1", "MT.ND1", "Mtor", "ND1"]
    assert map_genes(names, pd.DataFrame(index=names), None).is_mito.tolist() == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_mitochondrial_names_without_an_id_are_warned_of(
    make_h5ad: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_h5ad(sp.csr_matrix(np.ones((2, 2))), genes=["TP53", "mt:ND1"])
    options = {"organism": "human", "min_coverage_frac": 0.0, "max_mito_frac": 0.5}
    _, report = preprocessed(path, tmp_path / "a.h5ad", **options)
    assert report["coverage"]["notes"][-1] == (
        "warning: none of 1 mitochondrial names is a gene with an Ensembl id, so no gene counts as mitochondrial and "
        "max_mito_frac drops no cell; set max_mito_frac to 1"
    )


def test_a_limit_without_mitochondrial_genes_is_warned_of(
    make_h5ad: Callable[..., Path], tmp_path: Path
) -> None:
    told = {}
    for names, limit in ((["a", "b"], 0.5), (["a", "b"], 1.0), (["a", "Mt-nd1"], 0.5)):
        path = make_h5ad(sp.csr_matrix(np.ones((2, 2))), genes=names)
        _, report = preprocessed(path, tmp_path / "a.h5ad", organism=None, max_mito_frac=limit)
        told[names[1], limit] = report["coverage"]["notes"]
    assert told == {
        ("b", 0.5): [
            "warning: no symbol begins with MT-, mt: or MT., so no gene counts as mitochondrial and max_mito_frac "
            "drops no cell; rename these genes, or set max_mito_frac to 1"
        ],
        ("b", 1.0): [],
        ("Mt-nd1", 0.5): [],
    }


def test_without_an_organism_names_are_used_as_ids() -> None:
    mapped = map_genes(["a", "b"], pd.DataFrame({"symbol": ["MT-X", None]}, index=["a", "b"]), None)
    assert (mapped.gene_ids, mapped.symbols, mapped.is_mito.tolist()) == (
        ["a", "b"],
        ["MT-X", "b"],
        [True, False],
    )
    assert mapped.coverage.frac == 1.0


#     cell
#    /    \
#  blood  nerve
#   |   \  /
#   T   both
#   |
#   CD4
SMALL = CellOntology(
    {
        "cell": (),
        "blood": ("cell",),
        "nerve": ("cell",),
        "T": ("blood",),
        "both": ("blood", "nerve"),
        "CD4": ("T",),
    },
    {},
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
def test_nearness_equals_the_count_by_hand(
    one: str, other: str, nearness: float, steps: int
) -> None:
    for a, b in ((one, other), (other, one)):
        assert SMALL.nearness(a, b) == pytest.approx(nearness)
        assert SMALL.steps(a, b) == steps


def test_terms_of_the_packaged_table_lead_to_cell() -> None:
    ontology = cell_ontology()
    t_cell = "CL:0000084"
    b_cell = "CL:0000236"
    lymphocyte = "CL:0000542"
    neuron = "CL:0000540"
    assert ontology.ancestors(t_cell)[lymphocyte] == 1
    # a B cell is a lymphocyte of B lineage, which is a lymphocyte
    assert ontology.steps(t_cell, b_cell) == 3
    assert ontology.nearness(t_cell, b_cell) > ontology.nearness(t_cell, neuron) > 0
    assert "CL:0000003" not in ontology  # obsolete
    assert len(ontology.parents) == 3316
    assert all("CL:0000000" in ontology.ancestors(term) for term in ontology.parents)


Make = Callable[..., Path]
TRP53 = "ENSMUSG00000059552"
TP53 = "ENSG00000141510"
H2_OA = "ENSMUSG00000024334"
HLA_DOA = "ENSG00000204252"
# and CD8B2, so not one to one
CD8B1 = "ENSMUSG00000053044"
CD8B = "ENSG00000172116"
MT_CO1_MOUSE = "ENSMUSG00000064351"
MT_CO1 = "ENSG00000198804"


run = partial(preprocessed, min_coverage_frac=0.0)


def test_the_packaged_table_of_orthologs_is_one_to_one() -> None:
    to_human = orthologs("mouse", "human")
    to_mouse = orthologs("human", "mouse")
    assert len(to_human) == 17_120
    assert {human: mouse for mouse, human in to_human.items()} == to_mouse
    # names that differ by more than their case
    assert (to_human[TRP53], to_human[H2_OA], to_human[MT_CO1_MOUSE]) == (TP53, HLA_DOA, MT_CO1)
    assert CD8B1 not in to_human


def test_genes_without_an_ortholog_are_counted(make_h5ad: Make, tmp_path: Path) -> None:
    genes = ["Trp53", "mt-Co1", "H2-Oa", "Cd8b1", "nothing"]
    path = make_h5ad(sp.csr_matrix(np.arange(1.0, 16).reshape(3, 5)), genes=genes)
    got, report = run(path, tmp_path / "m.h5ad", organism="mouse", reference_organism="human")
    assert list(got.var_names) == [TP53, MT_CO1, HLA_DOA]
    assert got.var["symbol"].tolist() == ["TP53", "MT-CO1", "HLA-DOA"]
    assert got.X.toarray().tolist() == [[1, 2, 3], [6, 7, 8], [11, 12, 13]]
    coverage = report["coverage"]
    dropped = report["genes"]["dropped"]
    assert (coverage["frac"], coverage["reference"], coverage["orthologs"]) == (4 / 5, "human", 3)
    assert coverage["ortholog_frac"] == 3 / 4
    assert (dropped["no Ensembl id"], dropped["no ortholog"]) == (1, 1)
    assert report["genes"]["in"] - sum(dropped.values()) == report["genes"]["out"]
    with open_counts(path) as raw:
        assert match_columns(raw, build_vocabulary([tmp_path / "m.h5ad"])).target.tolist() == [
            0,
            1,
            2,
            -1,
            -1,
        ]
    # mitochondrial genes are those of the mouse
    assert report["quantiles"]["mito_frac"]["after"][0] == pytest.approx(1 / 3)


def test_genes_of_the_reference_organism_stay_as_they_are(make_h5ad: Make, tmp_path: Path) -> None:
    path = make_h5ad(sp.csr_matrix(np.ones((2, 2))), genes=["TP53", "FANCD1"])
    run(path, tmp_path / "a.h5ad", reference_organism="human")
    run(path, tmp_path / "b.h5ad")
    assert (tmp_path / "a.h5ad").read_bytes() == (tmp_path / "b.h5ad").read_bytes()


def test_only_one_to_one_pairs_of_a_user_table_are_used(make_h5ad: Make, tmp_path: Path) -> None:
    table = tmp_path / "pairs.tsv"
    rows = [
        f"{TP53}.18\tx\t{TRP53}",
        f"{TP53}\tx\t{TRP53}.2",  # the same pair
        f"{CD8B}\tx\t{CD8B1}",
        f"{CD8B}\tx\tENSMUSG00000053977",  # and so two mouse genes
        f"{MT_CO1}\tx\t",
    ]
    table.write_text("\ufeffHuman\tname\tmouse\r\n" + "\r\n".join(rows) + "\r\n", encoding="utf-8")
    assert orthologs("mouse", "human", table) == {TRP53: TP53}
    path = make_h5ad(sp.csr_matrix(np.ones((2, 3))), genes=["Trp53", "Cd8b1", "mt-Co1"])
    options = {"organism": "mouse", "reference_organism": "human", "orthologs": str(table)}
    got, report = run(path, tmp_path / "m.h5ad", **options)
    assert (report["coverage"]["orthologs"], list(got.var_names)) == (1, [TP53])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "human\trat\n",
            "expected a header with the columns mouse and human, of Ensembl ids; mouse is not there",
        ),
        (
            "human\tmouse\nTP53\tTrp53\n",
            r"line 2: expected an Ensembl id of mouse \(ENSMUSG...\), got 'Trp53'",
        ),
        (
            f"human\tmouse\n{TRP53}\t{TRP53}\n",
            r"line 2: expected an Ensembl id of human \(ENSG...\), got 'ENSMUSG",
        ),
        ("human\tmouse\n", "has no pair of genes that occur in no other pair"),
        (None, "no such file"),
    ],
)
def test_a_wrong_table_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / f"{len(text or '')}.tsv"
    if text is not None:
        path.write_text(text)
    with pytest.raises((ConfigError, DataError), match=message):
        orthologs("mouse", "human", path)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(DataError, match=r"expected a file, got a FIFO"):
        orthologs("mouse", "human", path)


def test_human_and_mouse_share_one_file(make_h5ad: Make, tmp_path: Path) -> None:
    cells = {}
    for name, genes in {
        "human": ["TP53", "MYC", "CD3E"],
        "mouse": ["Trp53", "Myc"],
        "mice": ["Cd3e", "Cd4"],
    }.items():
        organism = "human" if name == "human" else "mouse"
        path = make_h5ad(np.ones((9, len(genes))), genes=genes)
        cells[name] = tmp_path / f"{name}.cells.h5ad"
        made, _ = run(path, cells[name], organism=organism, organism_column=True)
        assert set(made.obs["organism"]) == {organism}
    both = [cells["human"], cells["mouse"]]
    vocabulary = build_vocabulary(both)
    assert [organism_of(gene) for gene in vocabulary.gene_ids].count("mouse") == 2
    assert vocabulary.n_genes == 5
    with pytest.raises(DataError, match="no genes in common with the other datasets"):
        build_vocabulary([*both, cells["mice"]])  # mice share an organism, and no gene
    for option, value in (("organism_column", True), ("reference_organism", "human")):
        with pytest.raises(
            ConfigError, match=f"preprocess.{option} requires the organism of each dataset"
        ):
            run(path, tmp_path / "none.h5ad", organism=None, **{option: value})
