"""Names of genes as other tools write them: in any column of var, made unique, with a prefix, or of
another family.
"""

from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellmill.data.genes.build import build_vocabulary
from cellmill.data.genes.columns import choose_names
from cellmill.data.genes.lookup import look_up, match_names
from cellmill.data.genes.names import is_expression, match_columns
from cellmill.data.genes.tables import gene_table, orthologs
from cellmill.data.inputs.formats import open_counts, open_dataset
from cellmill.errors import DataError
from tests.unit.test_preprocess import run

Make = Callable[..., Path]
N_GENES = 60
N_CELLS = 12
TABLE = gene_table("human")
IDS = [
    gene
    for gene in sorted(TABLE.protein_coding)
    if TABLE.ids["symbol"].get(TABLE.symbols[gene]) == gene
][:N_GENES]
SYMBOLS = [TABLE.symbols[gene] for gene in IDS]
COUNTS = np.random.default_rng(7).poisson(1.5, (N_CELLS, N_GENES)).astype(np.float32)
COUNTS[:, 0] += 1


def written(folder: Path, counts: np.ndarray, var: pd.DataFrame) -> Path:
    """An h5ad file with rows of `var` as they are, repeated names too."""
    path = folder / "input.h5ad"
    obs = pd.DataFrame(index=[f"cell_{row}" for row in range(len(counts))])
    ad.AnnData(sp.csr_matrix(counts), obs, var).write_h5ad(path)
    return path


def assert_truth(path: Path, out: Path, counts: np.ndarray = COUNTS) -> None:
    """Counts per cell and gene equal the truth, whatever the file calls its genes."""
    made, report = run(path, out)
    wanted = pd.DataFrame(counts, index=made.obs_names, columns=IDS)
    wanted = wanted.loc[:, wanted.sum() > 0]
    pd.testing.assert_frame_equal(made.to_df(), wanted, check_dtype=False, check_names=False)
    assert report["coverage"]["counts_frac"] == 1


@pytest.mark.parametrize("suffix", ["-1", ".1", "-12"])
@pytest.mark.parametrize(
    "names", [SYMBOLS, IDS, [f"{gene}.7" for gene in IDS], [f"GRCh38_{name}" for name in SYMBOLS]]
)
def test_counts_of_names_made_unique_are_added_to_their_gene(
    tmp_path: Path, names: list[str], suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = np.hstack([COUNTS, 3 * COUNTS])
    var = pd.DataFrame(index=[*names, *(name + suffix for name in names)])
    assert_truth(written(tmp_path, twice, var), tmp_path / "out.h5ad", 4 * COUNTS)
    printed = capsys.readouterr().out
    # otherwise an id with a version, which needs no second name
    if names[0].count(".") + suffix.count("-"):
        line = f"d: {N_GENES} names repeat another name with a suffix that made them unique, as '{names[0]}{suffix}' "
        assert f"{line}repeats '{names[0]}': their counts are added to its gene\n" in printed
    assert f"d: {2 * N_GENES} names are of {N_GENES} genes: their counts are summed, as " in printed


def test_names_made_unique_by_other_tools_are_one_gene() -> None:
    # anndata's make_index_unique and R's make.unique pass over a name that is taken
    found = match_names(["TBCE", "TBCE-2", "TBCE-1", "TBCE.1", "TBCE.2", "TBCE-1-1"], "human")
    assert {*found.gene_ids} == {"ENSG00000284770"}
    assert {*found.made_unique} == {"TBCE-2", "TBCE-1", "TBCE.1", "TBCE.2", "TBCE-1-1"}


@pytest.mark.parametrize(
    "name", ["HLA-A", "NKX2-1", "AC012345.1", "MT-CO1", "KRTAP4-11", "RP11-34P13.7", "FOO-1"]
)
def test_a_suffix_without_its_stem_stays_in_the_name(name: str) -> None:
    together = match_names([name, "ACTB", "TP53"], "human")
    assert together.gene_ids[0] == match_names([name], "human").gene_ids[0]
    assert together.made_unique == {}


def test_a_symbol_that_ends_like_a_copy_stays_itself() -> None:
    names = ["IGHV1-69", "IGHV1-69-2", "HLA", "HLA-A", "C4A", "C4A_2"]
    found = match_names(names, "human")
    assert found.made_unique == {}
    assert len({*found.gene_ids} - {""}) == 5  # HLA is no gene


COLUMNS = [
    "features",
    "gene_short_name",
    "Symbol",
    "feature_name",
    "gene_name",
    "gene",
    "Gene",
    "my names",
]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(
    "index", [[str(i) for i in range(N_GENES)], [str(7157 + 3 * i) for i in range(N_GENES)]]
)
def test_symbols_are_found_in_any_column_of_text(
    tmp_path: Path, column: str, index: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    var = pd.DataFrame(
        {"chromosome": "1", column: pd.Categorical(SYMBOLS), "mean": 0.5}, index=index
    )
    assert_truth(written(tmp_path, COUNTS, var), tmp_path / "out.h5ad")
    shares = f"the index 0.0%, chromosome 0.0%, {column} 100.0%"
    line = f"d: genes are named by var[{column!r}] (share of names that are genes: {shares})\n"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("column", ["featureid", "Accession", "gene_id", "ENSEMBL"])
def test_ids_in_any_column_come_before_symbols(tmp_path: Path, column: str) -> None:
    names = [*SYMBOLS[:40], *(f"unknown_{i}" for i in range(20))]
    assert_truth(
        written(tmp_path, COUNTS, pd.DataFrame({column: IDS}, index=names)), tmp_path / "out.h5ad"
    )


def test_gaps_in_the_best_column_are_filled_from_the_rest(tmp_path: Path) -> None:
    ids = [*IDS[:45], *[None] * 15]
    symbols = [None, None, *SYMBOLS[2:]]
    for missing in (None, float("nan")):
        var = pd.DataFrame(
            {"a": [missing if gene is None else gene for gene in ids], "b": symbols},
            index=map(str, range(N_GENES)),
        )
        found = choose_names([*var.index], var, "human")
        assert found.gene_ids == IDS
        assert (found.column, found.texts) == ("b", [*IDS[:45], *SYMBOLS[45:]])
        assert found.coverage == {"the index": 0, "a": 45 / 60, "b": 58 / 60}


@pytest.mark.parametrize("organism", ["human", "mouse"])
@pytest.mark.parametrize("prefixes", [("", ""), ("GRCh38_", "mm10___")])
def test_genes_of_another_species_are_not_read_by_symbol(
    organism: str, prefixes: tuple[str, str]
) -> None:
    """As in a mixture of human and mouse cells: 249 human symbols are aliases of mouse genes."""
    ids: list[str] = []
    symbols: list[str] = []
    own: list[str] = []
    for species, prefix in zip(("human", "mouse"), prefixes):
        table = gene_table(species)
        for gene in sorted(table.protein_coding):
            ids.append(prefix + gene)
            symbols.append(table.symbols[gene])
            own.append(gene if species == organism else "")
    var = pd.DataFrame({"symbol": symbols}, index=ids)
    assert choose_names(ids, var, organism).gene_ids == own
    # ids of a species without a table, and of orthologs, leave symbols as they are
    for number in ("ENSRNOG", "ENSMUSG"):
        index = [f"{number}{row:011d}" for row in range(N_GENES)]
        for first in (index[0], IDS[0]):  # and with a transgene
            names = [first, *index[1:]]
            var = pd.DataFrame({"a": SYMBOLS}, index=names)
            assert choose_names(names, var, "human").gene_ids == IDS
        var = pd.DataFrame({"ortholog": index, "id": IDS[:9] + [""] * 51}, index=SYMBOLS)
        assert choose_names(SYMBOLS, var, "human").gene_ids == IDS


def test_a_column_of_different_genes_fills_no_gap() -> None:
    index = [*SYMBOLS[:50], *(f"probe {i}" for i in range(10))]
    var = pd.DataFrame({"nearest": [*SYMBOLS[1:41], *[""] * 10, *SYMBOLS[50:]]}, index=index)
    assert choose_names(index, var, "human").gene_ids == [*IDS[:50], *[""] * 10]


def test_an_equally_good_column_of_other_genes_is_a_conflict() -> None:
    var = pd.DataFrame({"nearest": [*SYMBOLS[1:], SYMBOLS[0]]}, index=SYMBOLS)
    assert "var['nearest'] (100.0%)" in str(choose_names(SYMBOLS, var, "human").conflict)
    var["nearest"] = [f"{gene}.3" for gene in IDS]
    assert choose_names(SYMBOLS, var, "human").conflict is None


@pytest.mark.parametrize("names", [IDS, SYMBOLS])
@pytest.mark.parametrize(
    "prefix",
    ["GRCh38_", "GRCh38-", "hg19_", "GRCh38______", "GRCh38-2020-A_", "hg19_premrna___", "human:"],
)
def test_a_shared_prefix_is_removed_from_names(
    tmp_path: Path, prefix: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    var = pd.DataFrame(index=[f"{prefix}{name}" for name in names])
    assert_truth(written(tmp_path, COUNTS, var), tmp_path / "out.h5ad")
    if names is SYMBOLS:
        assert f"d: prefix {prefix!r} is left out of {N_GENES} names\n" in capsys.readouterr().out


def test_each_organism_takes_its_genome_of_two(tmp_path: Path) -> None:
    names = [*(f"GRCh38_{name}" for name in SYMBOLS), "mm10___Actb", "mm10___Trp53", "mm10___Xist"]
    found = match_names(names, "human")
    assert found.gene_ids == [*IDS, "", "", ""]
    assert match_names(names[-3:], "mouse").n_genes == 3


@pytest.mark.parametrize(
    "form", ["adt_{}", "ADT-{}", "sg_{}", "{}:UCHT1|{}|AHS0231|pAbO", "guide_{}", "HTO:{}"]
)
def test_antibodies_never_count_as_their_target_gene(form: str) -> None:
    assert match_names([form.replace("{}", name) for name in SYMBOLS], "human").n_matched == 0


@pytest.mark.parametrize(
    "form",
    ["sg-{}", "CRISPR-{}", "{}-sg1", "{}-CD4-protein", "CD4-protein-{}", "GRCh38_sg_{}", "{}|sg2"],
)
def test_an_id_in_a_name_of_a_guide_is_not_its_gene(form: str) -> None:
    assert match_names([form.format(gene) for gene in IDS], "human").n_matched == 0


@pytest.mark.parametrize(
    "name",
    [
        "H2-Ab1_ENSMUSG00000073421",
        "AB041806_ENSMUSG00000073421",
        "ENSMUSG00000073421_protein_coding",
    ],
)
def test_genes_that_are_named_like_antibodies_are_read(name: str) -> None:
    assert match_names([name], "mouse").gene_ids == ["ENSMUSG00000073421"]


def test_missing_names_never_match_a_gene_called_NA() -> None:
    matches = match_names(["NA", "NA.1", "NA-2", "nan", "XK", "TP53"], "human")
    assert [bool(gene) for gene in matches.gene_ids] == [False] * 4 + [True] * 2


def test_dots_of_R_are_dashes_before_they_end_a_prefix() -> None:
    names = ["HLA.A", "HLA.B", "HLA.DRA", "TP53", "GAPDH"]
    matches = match_names(names, "human")
    expected = [look_up(name.replace(".", "-"), "human").gene for name in names]
    assert all(expected)
    assert matches.gene_ids == expected
    assert not matches.prefixes


@pytest.mark.parametrize("form", ["intron_{}", "{}_antisense", "{}.{}-I", "{}-U"])
def test_other_rows_of_an_id_are_not_added_to_it(form: str) -> None:
    ids = [f"{gene}.{version}" for version, gene in enumerate(IDS, 1)]
    others = [form.format(gene, version) for version, gene in enumerate(IDS, 1)]
    assert match_names([*ids, *others], "human").gene_ids == [*IDS, *([""] * len(IDS))]
    shared = [f"{gene}_PAR_Y" for gene in IDS]
    assert match_names([*ids, *shared], "human").gene_ids == [*IDS, *IDS]
    alone = [f"GRCh38_{gene}" for gene in IDS]
    assert match_names(alone, "human").gene_ids == IDS


def test_introns_are_not_added_to_their_gene() -> None:
    names = [*SYMBOLS, *(f"intron_{name}" for name in SYMBOLS)]
    assert match_names(names, "human").gene_ids == [*IDS, *[""] * N_GENES]


def test_names_that_R_or_a_second_id_changed_are_read() -> None:
    names = ["HLA.DRA", "MT.CO1", "TP53|7157", "BRCA2 (675)", "ENSG00000139618;BRCA2", "NKX2.1"]
    plain = match_names(["HLA-DRA", "MT-CO1", "TP53", "BRCA2", "BRCA2", "NKX2-1"], "human")
    assert match_names(names, "human").gene_ids == plain.gene_ids
    assert "" not in plain.gene_ids


def test_symbols_that_a_spreadsheet_made_dates_are_read() -> None:
    dates = ["2-Sep", "03-Sep", "2006-09-07", "5-Mar"]
    human = match_names(dates, "human")
    symbols = ["SEPTIN2", "SEPTIN3", "SEPTIN7", "MARCHF5"]
    assert human.gene_ids == match_names(symbols, "human").gene_ids
    mouse = match_names(dates, "mouse")
    assert mouse.gene_ids == match_names([name.capitalize() for name in symbols], "mouse").gene_ids
    assert "" not in human.gene_ids + mouse.gene_ids


def test_a_date_of_several_or_present_genes_is_no_gene() -> None:
    # MARCH1 or MARC1, DEC1 or another, no SEPT20; and SEPTIN8 has a row
    names = ["1-Mar", "2-Mar", "1-Dec", "20-Sep", "8-Sep", "SEPTIN8"]
    assert [bool(gene) for gene in match_names(names, "human").gene_ids] == [False] * 5 + [True]


@pytest.mark.parametrize(
    "form", ["{}_{}", "{}-{}", "{1}-{0}", "{1}.3-{0}", "{}__{}", "{1} {0}", "{} ({})", "{1}/{0}"]
)
def test_an_id_next_to_its_symbol_names_the_gene(form: str) -> None:
    names = [form.format(symbol, gene) for symbol, gene in zip(SYMBOLS, IDS)]
    assert match_names(names, "human").gene_ids == IDS


FAMILIES = [
    (
        "ENST{:011d}.2",
        "60 look like Ensembl ids of transcripts: add up the transcripts of each gene first",
    ),
    (
        "ENSRNOG{:011d}",
        "60 look like Ensembl ids of another organism: set preprocess.organism to null",
    ),
    ("{:d}", "60 are row numbers: the names of the genes were lost when the file was written"),
    (
        "{:d}7",
        "60 are numbers, such as the gene ids of NCBI (Entrez): replace them by Ensembl gene ids",
    ),
    ("{:d}_x_at", "60 look like Affymetrix probes: map probes to genes first"),
    ("ILMN_{:d}", "60 look like probes of an array: map probes to genes first"),
    ("NM_{:06d}.4", "60 look like RefSeq transcripts"),
    ("CD{:d}-CTCATTGTAACTCCT", "60 look like antibodies: use the matrix of gene expression"),
    ("CD{:d}_TotalSeqB", "60 look like antibodies: use the matrix of gene expression"),
    ("chr1:{:d}-99999", "60 look like regions of the genome"),
]


def refusal(path: Path, out: Path, **options: object) -> str:
    with pytest.raises(DataError) as error:
        run(path, out, **options)
    return str(error.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(("form", "line"), FAMILIES)
def test_a_family_of_names_is_recognised_with_the_way_on(
    tmp_path: Path, form: str, line: str
) -> None:
    path = written(tmp_path, COUNTS, pd.DataFrame(index=[form.format(i) for i in range(N_GENES)]))
    message = refusal(path, tmp_path / "out.h5ad")
    assert message.startswith("0 of 60 genes (0.0%) map to a human Ensembl id")
    assert f"; {line}" in message
    assert "mouse" not in message.replace("human or mouse orthologs", "")


def test_names_in_another_case_are_recognised(tmp_path: Path) -> None:
    path = written(tmp_path, COUNTS, pd.DataFrame(index=[name.lower() for name in SYMBOLS]))
    assert "differ from human symbols in upper and lower case, as " in refusal(
        path, tmp_path / "out.h5ad"
    )


def test_another_organism_is_advised_only_if_it_fits_well(tmp_path: Path) -> None:
    few = pd.DataFrame(index=["Trp53", *(f"x{i}" for i in range(N_GENES - 1))])
    assert "set preprocess.organism" not in refusal(
        written(tmp_path, COUNTS, few), tmp_path / "out.h5ad"
    )
    mouse = [
        name
        for name in gene_table("mouse").symbols.values()
        if "Rik" not in name and name[:1].isalpha()
    ][:60]
    path = written(tmp_path, COUNTS, pd.DataFrame(index=mouse))
    assert refusal(path, tmp_path / "out.h5ad").endswith(
        "map as mouse: set preprocess.organism to mouse"
    )


def test_coverage_is_listed_by_column_if_none_is_good(tmp_path: Path) -> None:
    var = pd.DataFrame(
        {"probe": [*SYMBOLS[:6], *["x"] * 54]}, index=[f"row {i}" for i in range(N_GENES)]
    )
    message = refusal(written(tmp_path, COUNTS, var), tmp_path / "out.h5ad")
    assert "share of names that are genes, by column of var: the index 0.0%, probe 10.0%" in message


@pytest.mark.parametrize(
    "kinds", [["Gene"], ["protein_coding", "lncRNA"], ["GENE EXPRESSION"], [""], ["NA"]]
)
def test_biotypes_among_feature_types_are_genes(tmp_path: Path, kinds: list[str]) -> None:
    types = [kinds[i % len(kinds)] for i in range(N_GENES)]
    path = written(tmp_path, COUNTS, pd.DataFrame({"feature_types": types}, index=SYMBOLS))
    assert_truth(path, tmp_path / "out.h5ad")


@pytest.mark.parametrize(
    ("column", "gene", "antibody"),
    [
        ("Type", "Gene Expression", "Antibody Capture"),
        ("modality", "RNA", "ADT"),
        ("modality", "rna", "crispr"),
    ],
)
def test_types_of_features_have_any_column(
    tmp_path: Path, column: str, gene: str, antibody: str
) -> None:
    # rowData of DropletUtils, as zellkonverter writes it; antibodies are called as genes
    names = [*SYMBOLS, *SYMBOLS[:5]]
    types = pd.Categorical([None, *[gene] * (N_GENES - 1), *[antibody] * 5])
    var = pd.DataFrame({"Symbol": names, column: types}, index=[*IDS, *SYMBOLS[:5]])
    path = written(tmp_path, np.hstack([COUNTS, 100 + COUNTS[:, :5]]), var)
    assert_truth(path, tmp_path / "out.h5ad")
    with open_counts(path) as reader:
        reader.use_gene_column("Symbol")
        assert is_expression(reader.var).tolist() == [True] * N_GENES + [False] * 5


def test_feature_types_without_genes_are_listed(tmp_path: Path) -> None:
    types = ["Antibody Capture"] * 50 + ["CRISPR Guide Capture"] * 10
    path = written(tmp_path, COUNTS, pd.DataFrame({"feature_types": types}, index=SYMBOLS))
    assert refusal(path, tmp_path / "out.h5ad") == (
        "no genes: no var['feature_types'] is 'Gene Expression', its values are 'Antibody Capture' 50, "
        "'CRISPR Guide Capture' 10"
    )


def test_a_model_reads_genes_from_the_column_that_has_them(tmp_path: Path, make_h5ad: Make) -> None:
    run(make_h5ad(sp.csr_matrix(COUNTS), genes=IDS), tmp_path / "plain.h5ad")
    vocabulary = build_vocabulary([tmp_path / "plain.h5ad"])
    var = pd.DataFrame(
        {"features": [f"GRCh38_{name}" for name in SYMBOLS]}, index=[str(i) for i in range(N_GENES)]
    )
    with open_counts(written(tmp_path, COUNTS, var)) as reader:
        target = match_columns(reader, vocabulary).target
    assert target.tolist() == vocabulary.rows_of(IDS).tolist()


def test_a_model_of_another_organism_is_reported(tmp_path: Path, make_h5ad: Make) -> None:
    mouse = gene_table("mouse")
    to_mouse = orthologs("human", "mouse")
    human = written(tmp_path, COUNTS, pd.DataFrame(index=SYMBOLS))
    line = "its genes are of human, the model's of mouse: they are matched by orthologs"
    for panel in (
        [to_mouse[gene] for gene in IDS if gene in to_mouse],
        sorted(mouse.protein_coding)[:N_GENES],
    ):
        own = make_h5ad(
            sp.csr_matrix(COUNTS[:, : len(panel)]), genes=[mouse.symbols[gene] for gene in panel]
        )
        run(own, tmp_path / "mouse.h5ad", organism="mouse")
        vocabulary = build_vocabulary([tmp_path / "mouse.h5ad"])
        with open_counts(own) as reader:
            assert match_columns(reader, vocabulary).mismatch is None
        with open_counts(human) as reader:
            if panel[0] in to_mouse.values() and {*panel} <= {to_mouse.get(gene) for gene in IDS}:
                assert match_columns(reader, vocabulary).mismatch == line
                continue
            with pytest.raises(
                DataError, match=f"no genes in common with the model: {line}, and none is left"
            ):
                match_columns(reader, vocabulary)


def test_a_model_reports_which_names_it_sums(tmp_path: Path, make_h5ad: Make) -> None:
    run(make_h5ad(sp.csr_matrix(COUNTS), genes=IDS), tmp_path / "plain.h5ad")
    vocabulary = build_vocabulary([tmp_path / "plain.h5ad"])
    twice = [*SYMBOLS, f"{SYMBOLS[0]}-1"]
    with open_counts(
        written(tmp_path, COUNTS[:, [*range(60), 0]], pd.DataFrame(index=twice))
    ) as reader:
        notes = match_columns(reader, vocabulary).notes
    assert (
        notes[-1]
        == f"2 names are of 1 genes: their counts are summed, as {SYMBOLS[0]}, {twice[-1]} of {IDS[0]}"
    )


def test_columns_that_name_different_genes_need_a_choice(tmp_path: Path) -> None:
    var = pd.DataFrame({"nearest": [*SYMBOLS[1:], SYMBOLS[0]]}, index=SYMBOLS)
    path = written(tmp_path, COUNTS, var)
    assert refusal(path, tmp_path / "out.h5ad") == (
        "the index (100.0%) and var['nearest'] (100.0%) name as many genes, but most rows differ; set the dataset's "
        "gene_column (--gene-column) to the column that names them, or to index"
    )
    for column, truth in (("index", COUNTS), ("nearest", COUNTS[:, [59, *range(59)]])):
        made, _ = run(path, tmp_path / "out.h5ad", gene_column=column)
        wanted = pd.DataFrame(truth, made.obs_names, IDS)[made.var_names]
        pd.testing.assert_frame_equal(made.to_df(), wanted, check_dtype=False, check_names=False)
        vocabulary = build_vocabulary([tmp_path / "out.h5ad"])
        with open_counts(path) as reader, pytest.raises(DataError, match="name as many genes, but"):
            match_columns(reader, vocabulary)
        with open_dataset(path, gene_column=column) as reader:
            matched = match_columns(reader, vocabulary)
            genes = pd.Index(vocabulary.gene_ids)[matched.target]
            found = pd.DataFrame.sparse.from_spmatrix(next(reader.rows()), made.obs_names, genes)
        wanted = wanted[genes].astype(np.uint32)
        pd.testing.assert_frame_equal(found.sparse.to_dense(), wanted, check_names=False)
    with pytest.raises(
        DataError, match=r"no var column 'nerest' \(gene_column\); did you mean 'nearest'"
    ):
        run(path, tmp_path / "out.h5ad", gene_column="nerest")
