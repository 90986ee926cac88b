"""HDF5 files and folders of other tools: probes, loom files with other names, and what to do with
the rest.
"""

from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.sparse as sp

from cellmill.data.genes.names import map_genes
from cellmill.data.genes.tables import gene_table
from cellmill.data.inputs.formats import open_counts
from tests.unit.test_inputs import CELLS, GENES, h5ad, loom, read, refusal, tenx_v2, write_arrays
from tests.unit.test_matrix_market import star

N = 37
IDS = [f"ENSG{number // 3:011d}" for number in range(N)]
SYMBOL_OF_PROBE = [f"SYM{number // 3}" for number in range(N)]
KEPT = [number % 3 != 1 for number in range(N)]


def flex(counts: sp.csr_matrix, folder: Path, columns: bool = True) -> Path:
    """As Cell Ranger writes raw_probe_bc_matrix.h5: a row per probe, three of a gene here."""
    path = folder / "raw_probe_bc_matrix.h5"
    with h5py.File(path, "w") as file:
        write_arrays(file.create_group("matrix"), counts.astype(np.int32))
        file["matrix/shape"] = counts.shape[::-1]
        file["matrix/barcodes"] = np.array(CELLS, "S")
        probes = [
            f"{gene}|{symbol}|{n:07x}" for n, (gene, symbol) in enumerate(zip(IDS, SYMBOL_OF_PROBE))
        ]
        features = {
            "id": probes,
            "name": probes,
            "feature_type": ["Gene Expression"] * N,
            "genome": ["GRCh38"] * N,
        }
        if columns:
            features |= {"gene_id": IDS, "gene_name": SYMBOL_OF_PROBE}
            file["matrix/features/filtered_probes"] = np.array(KEPT)
        for name, column in features.items():
            file[f"matrix/features/{name}"] = np.array(column, "S")
    return path


def sums_by_gene(counts: sp.csr_matrix, kept: list[bool]) -> dict[str, list[float]]:
    """Counts of each gene in every cell, probe by probe."""
    dense = counts.toarray()
    sums = dict[str, list[float]]()
    for probe, gene in enumerate(IDS):
        if kept[probe]:
            held = sums.get(gene, [0.0] * len(CELLS))
            sums[gene] = [a + b for a, b in zip(held, dense[:, probe].tolist())]
    return sums


def test_excluded_probes_are_dropped(
    counts: sp.csr_matrix, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = flex(counts, tmp_path)
    with open_counts(path) as reader:
        wanted = sums_by_gene(counts, KEPT)
        assert reader.var_names == list(wanted)
        assert reader.var["symbol"].tolist() == [f"SYM{number}" for number in range(13)]
        got = np.vstack([block.toarray() for block in reader.rows(50)])
        assert got.T.tolist() == list(wanted.values())
    assert capsys.readouterr().err == (
        f"{path}: 12 of 37 probes are excluded (filtered_probes is false), the other 25 probes are summed into 13 "
        "genes by gene_id\n"
    )


def test_excluded_rows_of_genes_are_counted(
    counts: sp.csr_matrix, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = flex(counts, tmp_path)
    with h5py.File(path, "a") as file:
        features = file["matrix/features"]
        del features["gene_id"], features["id"]
        features["id"] = np.array([f"gene{number}" for number in range(N)], "S")
    with open_counts(path) as reader:
        assert len(reader.var_names) == sum(KEPT)
    said = "12 of 37 probes are excluded (filtered_probes is false)"
    assert capsys.readouterr().err == f"{path}: {said}\n"


def test_probes_named_by_gene_are_summed(
    counts: sp.csr_matrix, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = flex(counts, tmp_path, columns=False)
    with open_counts(path) as reader:
        wanted = sums_by_gene(counts, [True] * N)
        assert reader.var_names == list(wanted)
        got = np.vstack([block.toarray() for block in reader.rows(50)])
        assert got.T.tolist() == list(wanted.values())
    assert (
        "37 probes are summed into 13 genes by the Ensembl id in their names"
        in capsys.readouterr().err
    )


def test_one_row_of_each_gene_is_no_probe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names as the UCSC Cell Browser writes them."""
    names = [f"ENSG{number:011d}|SYM{number}" for number in range(3)]
    path = tmp_path / "exprMatrix.tsv"
    path.write_text("gene\tc1\tc2\n" + "".join(f"{name}\t1\t2\n" for name in names))
    with open_counts(path) as reader:
        assert reader.var_names == [name.partition("|")[0] for name in names]
    printed = capsys.readouterr().err
    assert "rows are named by the Ensembl id in their names" in printed
    assert "summed" not in printed


def test_probes_of_an_anndata_are_summed_too(counts: sp.csr_matrix, tmp_path: Path) -> None:
    path = h5ad(counts, tmp_path / "probes.h5ad")
    with h5py.File(path, "a") as file:
        for name, values in {
            "gene_id": np.array(IDS, "O"),
            "filtered_probes": np.array(KEPT),
        }.items():
            file[f"var/{name}"] = values
            kind = "array" if name == "filtered_probes" else "string-array"
            file[f"var/{name}"].attrs.update({"encoding-type": kind, "encoding-version": "0.2.0"})
        file["var"].attrs["column-order"] = np.array(["gene_id", "filtered_probes"], "O")
    with open_counts(path) as reader:
        wanted = sums_by_gene(counts, KEPT)
        assert reader.var_names == list(wanted)
        assert np.vstack([block.toarray() for block in reader.rows(50)]).T.tolist() == list(
            wanted.values()
        )


@pytest.mark.parametrize("mode", ["X", "S+U+A", "U"])
def test_columns_of_usa_mode_are_summed_in_an_anndata(
    mode: str, counts: sp.csr_matrix, tmp_path: Path
) -> None:
    names = [f"ENSG{number:011d}{end}" for end in ("", "-U", "-A") for number in range(12)]
    path = h5ad(counts, tmp_path / "usa.h5ad")
    with h5py.File(path, "a") as file:
        file["X"].attrs["shape"] = np.array([230, 36])
        stored = counts[:, :36].tocsr()
        for name in ("data", "indices", "indptr"):
            del file["X"][name]
        write_arrays(file["X"], stored)
        index = file["var"].attrs["_index"]
        del file["var"][index]
        file["var"][index] = np.array(names, "O")
        file["var"][index].attrs.update(
            {"encoding-type": "string-array", "encoding-version": "0.2.0"}
        )
    dense = counts.toarray()
    parts = {"S": dense[:, :12], "U": dense[:, 12:24], "A": dense[:, 24:36]}
    wanted = sum(parts[letter] for letter in ("S+A" if mode == "X" else mode).split("+"))
    assert (read(path, mode).toarray() == wanted).all()
    other = h5ad(counts, tmp_path / "plain.h5ad")
    assert refusal(other, "S+U+A").endswith(
        "no matrix 'S+U+A' (the dataset's `counts`); there are: X"
    )


def rename_attributes(path: Path, genes: str, cells: str) -> Path:
    with h5py.File(path, "a") as file:
        for group, old, new in (("row_attrs", "Accession", genes), ("col_attrs", "CellID", cells)):
            file.move(f"{group}/{old}", f"{group}/{new}")
        if "Gene" in file["row_attrs"]:
            del file["row_attrs/Gene"]
    return path


def test_attributes_of_several_values_are_left_out(counts: sp.csr_matrix, tmp_path: Path) -> None:
    """As pySCENIC writes regulons: a field for each."""
    path = loom(counts, tmp_path)
    with h5py.File(path, "a") as file:
        auc = np.zeros(len(CELLS), [("ATF4(+)", "f8"), ("JUN(+)", "f8")])
        file["col_attrs/RegulonsAUC"] = auc
        file["row_attrs/Regulons"] = np.ones(len(GENES), [("ATF4(+)", "i8"), ("JUN(+)", "i8")])
    assert (read(path).toarray() == counts.toarray()).all()
    with open_counts(path) as reader:
        assert "RegulonsAUC" not in reader.obs_columns
        assert "Regulons" not in reader.var


@pytest.mark.parametrize(
    "names", [("target_name", "barcode"), ("rownames", "colnames"), ("some_genes", "some_cells")]
)
def test_loom_files_with_unusual_names_are_read(
    names: tuple[str, str], counts: sp.csr_matrix, tmp_path: Path
) -> None:
    path = rename_attributes(loom(counts, tmp_path), *names)
    assert (read(path) != counts).nnz == 0
    with open_counts(path) as reader:
        assert (reader.var_names, reader.obs_names.tolist()) == (GENES, CELLS)


def test_cells_numbered_by_floats_have_whole_numbers(counts: sp.csr_matrix, tmp_path: Path) -> None:
    """As Baysor writes them."""
    path = loom(counts, tmp_path)
    with h5py.File(path, "a") as file:
        del file["col_attrs/CellID"]
        file["col_attrs/CellID"] = np.arange(1.0, len(CELLS) + 1)
    with open_counts(path) as reader:
        assert reader.obs_names[:2].tolist() == ["1", "2"]


def test_the_best_of_several_loom_attributes_names_genes(
    counts: sp.csr_matrix, tmp_path: Path
) -> None:
    path = rename_attributes(loom(counts, tmp_path), "some", "CellID2")
    with h5py.File(path, "a") as file:
        file["row_attrs/more"] = np.array([f"m{n}" for n in range(len(GENES))], "S")
        del file["row_attrs/some"]
        file["row_attrs/some"] = np.array([*gene_table("human").symbols][: len(GENES)], "S")
    with open_counts(path) as reader:
        mapped = map_genes(reader.var_names, reader.var, "human")
    assert mapped.gene_ids == [*gene_table("human").symbols][: len(GENES)]
    assert mapped.coverage.column == "some"


def test_a_tenx_matrix_of_r_without_symbols_is_read(counts: sp.csr_matrix, tmp_path: Path) -> None:
    path = tenx_v2(counts, tmp_path)
    with h5py.File(path, "a") as file:
        del file["GRCh38/gene_names"]
    assert (read(path) != counts).nnz == 0


def test_folders_below_are_named(tmp_path: Path) -> None:
    for name in ("Gene/raw", "Gene/filtered"):
        (tmp_path / "Solo.out" / name).mkdir(parents=True)
        star(tmp_path / "Solo.out" / name)
    (tmp_path / "Solo.out" / "Summary.csv").write_text("a,b\n")
    assert refusal(tmp_path / "Solo.out").endswith(
        "; it has Gene/filtered/, Gene/raw/: give one of these"
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cells.rds", "DropletUtils::write10xCounts("),
        ("cells.xlsx", "save the sheet as .csv"),
        ("a.h5ad.gz", "gunzip"),
        ("a.csv.bz2", "bunzip2"),
        ("s1.gem.gz", "stereo_to_anndata"),
        ("quants_mat.gz", "--dumpMtx"),
        ("cells.cloupe", "give filtered_feature_bc_matrix.h5"),
        ("counts.parquet", "save it as .csv"),
    ],
)
def test_files_of_no_format_come_with_a_way_on(name: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"X\n\x00\x00")
    text = refusal(tmp_path / name)
    assert "no known format; there are: FASTA of proteins" in text
    assert hint in text


def test_a_folder_of_bpcells_comes_with_its_command(tmp_path: Path) -> None:
    for name in ("version", "storage_order", "row_names", "val_data"):
        (tmp_path / name).write_bytes(b"col\n")
    assert refusal(tmp_path).endswith(
        "; it is a matrix of BPCells: in R run BPCells::write_matrix_10x_hdf5("
        'BPCells::open_matrix_dir(FOLDER), "cells.h5")'
    )


def test_a_folder_of_alevin_comes_with_its_option(tmp_path: Path) -> None:
    for name in ("quants_mat.gz", "quants_mat_rows.txt", "quants_mat_cols.txt"):
        (tmp_path / "alevin").mkdir(exist_ok=True)
        (tmp_path / "alevin" / name).write_bytes(b"X\n")
    for folder in (tmp_path, tmp_path / "alevin"):
        assert refusal(folder).endswith("; let alevin write text with --dumpMtx")


def test_text_tables_of_a_folder_are_named(tmp_path: Path) -> None:
    for name in ("cell_metadata.csv", "cell_by_gene.csv", "images.bin"):
        (tmp_path / name).write_bytes(b"X\n")
    assert refusal(tmp_path).endswith(
        "; it has cell_by_gene.csv, cell_metadata.csv: give the table of counts"
    )


def test_a_list_of_molecules_names_the_matrix(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "molecule_info.h5", "w") as file:
        file["barcode_idx"] = np.arange(3)
        file["features/id"] = [b"ENSG00000141510"]
    assert refusal(tmp_path / "molecule_info.h5").endswith(
        "; it lists the molecules of Cell Ranger: give filtered_feature_bc_matrix.h5"
    )
