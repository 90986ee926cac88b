"""Files of the real programs: what each writes from a tiny genome or a known matrix equals the
truth, cell for cell.

Python programs are installed once, pinned, into CELLMILL_WRITERS (default:
~/.cache/cellmill/writers); STAR and DropletUtils come with the system (Debian: rna-star,
r-bioc-dropletutils). Without one its tests are skipped.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cellmill.data.inputs.formats import open_counts
from cellmill.files import user_cache
from tests.unit.tiny_genome import GENES, Counts, TinyGenome, write_genome

pytestmark = pytest.mark.full
PACKAGES = {
    "kb-python": ["kb-python==0.30.2"],
    "mudata": ["mudata==0.3.10"],
    "loompy": ["loompy==3.0.8", "pandas"],
    "snapatac2": ["snapatac2==2.9.0"],
    "pegasusio": ["pegasusio==0.11.0", "anndata", "pyarrow"],
    "tiledbsoma": ["tiledbsoma==2.3.0", "anndata<0.13"],
}


@cache
def python_with(package: str) -> Path:
    """The interpreter of an environment with the package; skips the test if it cannot be installed."""
    requirements = PACKAGES[package]
    folder = Path(os.environ.get("CELLMILL_WRITERS") or user_cache() / "writers") / requirements[
        0
    ].replace("==", "-")
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    # pip warns of itself
    quiet = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests in another process may install it
        if not (folder / "complete").exists():
            subprocess.run(
                [sys.executable, "-m", "venv", "--clear", str(folder)], check=True, env=quiet
            )
            words = [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--retries",
                "0",
                *requirements,
            ]
            done = subprocess.run(words, capture_output=True, text=True, check=False, env=quiet)
            if done.returncode:
                pytest.skip(
                    f"{requirements[0]} cannot be installed: {done.stderr.strip().splitlines()[-1][:200]}"
                )
            (folder / "complete").write_text("")
    return python


def program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: {package})")
    return found


def run(*words: object, cwd: Path) -> None:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]


def read(path: Path | str, counts: str = "X") -> Counts:
    """Counts by cell and gene; genes without the version of their id."""
    found: Counts = {}
    with open_counts(path, counts) as reader:
        first = 0
        for block in reader.rows(7):
            dense = block.toarray()
            for row, column in zip(*np.nonzero(dense)):
                found[reader.obs_names[first + row], reader.var_names[column].split(".")[0]] = int(
                    dense[row, column]
                )
            first += dense.shape[0]
    return found


@pytest.fixture(scope="module")
def genome(tmp_path_factory: pytest.TempPathFactory) -> TinyGenome:
    return write_genome(tmp_path_factory.mktemp("spliced"))


@pytest.fixture(scope="module")
def nascent(tmp_path_factory: pytest.TempPathFactory) -> TinyGenome:
    return write_genome(tmp_path_factory.mktemp("nascent"), with_introns=True)


@pytest.fixture(scope="module")
def star(genome: TinyGenome, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of STARsolo; UMIs are counted as they are."""
    aligner = program("STAR", "rna-star")
    folder = tmp_path_factory.mktemp("star")
    index = [
        "--runMode",
        "genomeGenerate",
        "--genomeSAindexNbases",
        6,
        "--sjdbOverhang",
        89,
        "--genomeDir",
        "index",
    ]
    run(
        aligner, *index, "--genomeFastaFiles", genome.fasta, "--sjdbGTFfile", genome.gtf, cwd=folder
    )
    solo = ["--soloType", "CB_UMI_Simple", "--soloUMIlen", 12, "--soloCBwhitelist", genome.barcodes]
    solo += [
        "--soloUMIdedup",
        "Exact",
        "--soloFeatures",
        "Gene",
        "Velocyto",
        "--soloMultiMappers",
        "EM",
    ]
    solo += ["--soloCellFilter", "TopCells", 20, "--outSAMtype", "None", "--genomeDir", "index"]
    reads = ["--readFilesCommand", "zcat", "--readFilesIn", genome.reads[1], genome.reads[0]]
    run(aligner, *solo, *reads, cwd=folder)
    return folder / "Solo.out"


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("Gene/raw", "X"),
        ("Gene/filtered", "X"),
        ("Gene/filtered/matrix.mtx", "X"),
        ("Gene/raw", "UniqueAndMult-EM"),
        ("Velocyto/filtered/spliced.mtx", "X"),
        ("Velocyto/raw", "spliced"),
    ],
)
def test_matrices_of_starsolo_have_the_molecules(
    path: str, counts: str, star: Path, genome: TinyGenome
) -> None:
    assert read(star / path, counts) == genome.total


def kb(genome: TinyGenome, folder: Path, workflow: str, *options: str) -> Path:
    """Folder of counts of kb-python."""
    command = python_with("kb-python").with_name("kb")
    files = ["-i", "index", "-g", "t2g.txt"]
    captures = ["-c1", "c1", "-c2", "c2"] if workflow == "nac" else []
    fastas = ["-f1", "f1.fa", "-f2", "f2.fa"] if workflow == "nac" else ["-f1", "f1.fa"]
    run(
        command,
        "ref",
        "--workflow",
        workflow,
        *files,
        *fastas,
        *captures,
        genome.fasta,
        genome.gtf,
        cwd=folder,
    )
    given = ["-x", "10xv3", "-w", genome.barcodes, "-t", 1, "-o", "out", *options]
    run(
        command,
        "count",
        "--workflow",
        workflow,
        *files,
        *captures,
        *given,
        *genome.reads,
        cwd=folder,
    )
    return folder / "out" / "counts_unfiltered"


@pytest.mark.parametrize("option", ["--h5ad", "--loom", "--cellranger"])
def test_counts_of_kb_python_have_the_molecules(
    option: str, genome: TinyGenome, tmp_path: Path
) -> None:
    out = kb(genome, tmp_path, "standard", option)
    written = {"--h5ad": "adata.h5ad", "--loom": "adata.loom", "--cellranger": "cellranger"}[option]
    found = {
        (cell.removesuffix("-1"), gene): count
        for (cell, gene), count in read(out / written).items()
    }
    assert read(out) == found == genome.total


def test_counts_of_kb_python_include_nascent_molecules(nascent: TinyGenome, tmp_path: Path) -> None:
    out = kb(nascent, tmp_path, "nac", "--h5ad")
    assert read(out) == read(out / "adata.h5ad") == read(out, "total") == nascent.total
    assert read(out, "cell") == nascent.spliced
    assert read(out, "nascent") == nascent.unspliced


CELLS = [
    f"ACGTACGTACGT{number:04d}".translate(str.maketrans("0123456789", "ACGTACGTAC"))
    for number in range(30)
]
CELLS = [f"{cell}-{number % 3 + 1}" for number, cell in enumerate(CELLS)]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Counts]:
    """A text table of counts that every script reads, and the same counts."""
    random = np.random.default_rng(0)
    dense = random.poisson(random.gamma(0.5, 4, (30, 12)))
    path = tmp_path_factory.mktemp("truth") / "truth.tsv"
    rows = [
        "\t".join(["", *GENES]),
        *("\t".join([cell, *map(str, row)]) for cell, row in zip(CELLS, dense.tolist())),
    ]
    path.write_text("\n".join([*rows, ""]))
    counts = {
        (CELLS[row], GENES[column]): int(dense[row, column])
        for row, column in zip(*np.nonzero(dense))
    }
    return path, counts


LOAD = """
    import sys
    import numpy as np, pandas as pd, scipy.sparse as sp
    table = pd.read_csv(sys.argv[1], sep="\\t", index_col=0)
    out, symbols = sys.argv[2], [f"TINY{number}" for number in range(1, 13)]
    counts = sp.csr_matrix(table.to_numpy(dtype=np.float32))
    obs = pd.DataFrame(index=table.index.astype(object))
    var = pd.DataFrame({"name": symbols}, index=list(table.columns))
"""
SCRIPTS: dict[str, tuple[str, str, str, str]] = {  # package, file, counts, script
    "mudata": (
        "mudata",
        "cells.h5mu",
        "X",
        """
        import anndata, mudata
        rna = anndata.AnnData(counts, obs, var)
        prot = anndata.AnnData(counts[:, :2] * 3, obs, pd.DataFrame(index=["CD3", "CD4"]))
        mudata.MuData({"rna": rna, "prot": prot}).write(out)
        """,
    ),
    "mudata in zarr": (
        "mudata",
        "cells.zarr",
        "X",
        """
        import anndata, mudata
        rna = anndata.AnnData(counts, obs, var)
        prot = anndata.AnnData(counts[:, :2] * 3, obs, pd.DataFrame(index=["CD3", "CD4"]))
        mudata.MuData({"rna": rna, "prot": prot}).write_zarr(out)
        """,
    ),
    "loompy": (
        "loompy",
        "cells.loom",
        "X",
        """
        import loompy
        rows = {"Accession": np.array(table.columns, str), "Gene": np.array(symbols)}
        loompy.create(out, counts.T.tocoo(), rows, {"CellID": np.array(table.index, str)})
        """,
    ),
    "snapatac2": (
        "snapatac2",
        "cells.h5ad",
        "X",
        """
        import anndata, snapatac2
        anndata.AnnData(counts, obs, var).write_h5ad(out + ".plain")
        backed = snapatac2.AnnData(filename=out, X=counts)
        backed.obs_names, backed.var_names = list(table.index), list(table.columns)
        backed.close()
        """,
    ),
    "tiledbsoma": (
        "tiledbsoma",
        "experiment",
        "raw",
        """
        import anndata, tiledbsoma.io
        logs = anndata.AnnData(sp.csr_matrix(np.log1p(counts.toarray()[:, :5])), obs, var.iloc[:5])
        logs.raw = anndata.AnnData(counts, obs, var)
        tiledbsoma.io.from_anndata(out, logs, "RNA")
        """,
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_files_of_python_writers_have_the_counts(
    name: str, truth: tuple[Path, Counts], tmp_path: Path
) -> None:
    package, file, counts, script = SCRIPTS[name]
    if package == "snapatac2":
        pytest.importorskip("hdf5plugin", reason="the extra hdf5plugin is not installed")
    if package == "tiledbsoma":
        pytest.importorskip("tiledbsoma", reason="the extra soma is not installed")
    python = python_with(package)
    text = textwrap.dedent(LOAD) + textwrap.dedent(script)
    run(python, "-W", "ignore", "-c", text, truth[0], tmp_path / file, cwd=tmp_path)
    assert read(tmp_path / file, counts) == truth[1]


def test_suffixes_cut_by_pegasusio_are_reported(
    truth: tuple[Path, Counts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = """
        import anndata, pegasusio
        anndata.AnnData(counts, obs, var).write_h5ad("plain.h5ad")
        data = pegasusio.read_input("plain.h5ad")
        pegasusio.write_output(data, out)
    """
    text = textwrap.dedent(LOAD) + textwrap.dedent(script)
    run(
        python_with("pegasusio"),
        "-W",
        "ignore",
        "-c",
        text,
        truth[0],
        tmp_path / "cells.h5ad",
        cwd=tmp_path,
    )
    assert read(tmp_path / "cells.h5ad") == truth[1]
    assert (
        "cells.h5ad: pegasusio wrote its names of cells, without the -1 of Cell Ranger"
        in capsys.readouterr().err
    )


R_LOAD = """
    suppressPackageStartupMessages({library(Matrix); library(DropletUtils)})
    words <- commandArgs(trailingOnly = TRUE)
    table <- as.matrix(read.table(words[1], header = TRUE, sep = "\\t", row.names = 1, check.names = FALSE))
    counts <- as(t(table), "CsparseMatrix")
    out <- words[2]
    symbols <- paste0("TINY", 1:12)
"""
R_SCRIPTS: dict[str, tuple[str, str]] = {
    "write10xCounts to HDF5": (
        "cells.h5",
        "write10xCounts(out, counts, gene.symbol = symbols, version = '3')",
    ),
    "write10xCounts to a folder": (
        "cells",
        "write10xCounts(out, counts, gene.symbol = symbols, version = '3')",
    ),
    "write10xCounts of version 2": (
        "old",
        "write10xCounts(out, counts, gene.symbol = symbols, version = '2')",
    ),
    "writeMM and write.table": (
        "folder",
        """
        dir.create(out)
        writeMM(counts, file.path(out, "counts.mtx"))
        write.table(data.frame(rownames(counts), symbols), file.path(out, "features.tsv"))
        write.csv(data.frame(cell = colnames(counts), ident = "p"), file.path(out, "barcodes.csv"))
        """,
    ),
    "writeTENxMatrix": (
        "tenx.h5",
        """
        suppressPackageStartupMessages(library(HDF5Array))
        try(writeTENxMatrix(counts, out, group = "matrix"), silent = TRUE)
        """,
    ),
    "write.csv": ("table.csv", "write.csv(as.matrix(counts), out)"),
}


@pytest.mark.parametrize("name", R_SCRIPTS)
def test_files_of_r_have_the_counts(name: str, truth: tuple[Path, Counts], tmp_path: Path) -> None:
    rscript = program("Rscript", "r-bioc-dropletutils")
    file, script = R_SCRIPTS[name]
    if subprocess.run(
        [rscript, "-e", "library(DropletUtils)"], capture_output=True, check=False
    ).returncode:
        pytest.skip("DropletUtils is not installed (Debian: r-bioc-dropletutils)")
    (tmp_path / "script.R").write_text(textwrap.dedent(R_LOAD) + textwrap.dedent(script))
    run(rscript, "script.R", truth[0], tmp_path / file, cwd=tmp_path)
    assert read(tmp_path / file) == truth[1]


def test_missing_values_of_r_are_refused(truth: tuple[Path, Counts], tmp_path: Path) -> None:
    rscript = program("Rscript", "r-cran-matrix")
    script = """
        library(Matrix)
        counts <- sparseMatrix(i = c(1, 2), j = c(1, 1), x = c(3, NA), dims = c(2, 1))
        writeMM(counts, "matrix.mtx")
        writeLines(c("ENSG00000000001", "ENSG00000000002"), "features.tsv")
        writeLines("ACGTACGTACGTACGT", "barcodes.tsv")
    """
    run(rscript, "-e", textwrap.dedent(script), cwd=tmp_path)
    with (
        open_counts(tmp_path) as reader,
        pytest.raises(Exception, match="has the value 1e308, which R's writeMM writes"),
    ):
        next(reader.rows())
