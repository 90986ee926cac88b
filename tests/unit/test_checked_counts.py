"""What cellmill init, check and a dry run say of the matrix that `counts` names."""

from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellmill.cli import main
from cellmill.data.fractions import describe_fractions
from cellmill.data.genes.tables import gene_table
from cellmill.data.inputs.formats import open_counts

N_CELLS = 80
LOGS_REFUSED = "is fractional: it looks log-transformed; raw counts may be in counts: set the dataset's `counts`"


def draw(cells: int = N_CELLS, genes: int = 75) -> np.ndarray:
    """Counts of cells of different depths."""
    generator = np.random.default_rng(0)
    depths = generator.uniform(0.5, 4, (cells, 1))
    return generator.poisson(depths, (cells, genes)).astype(np.float32)


def logs_of(counts: np.ndarray) -> np.ndarray:
    return np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that writes `c.h5ad` with logarithms in X, depths and a layer of counts."""
    monkeypatch.chdir(tmp_path)
    table = gene_table("human")
    genes = [gene for gene, symbol in table.symbols.items() if not symbol.startswith("MT-")][:75]

    def write_file(x: object, has_counts: bool = True) -> Path:
        counts = draw()
        obs = pd.DataFrame({"n_counts": counts.sum(axis=1)}, [f"c{i}" for i in range(N_CELLS)])
        layers = {"counts": sp.csr_matrix(counts)} if has_counts else None
        data = ad.AnnData(x, obs=obs, var=pd.DataFrame(index=genes), layers=layers)
        data.write_h5ad("c.h5ad")
        return Path("c.h5ad")

    return write_file


def test_recovered_counts_pass_init_check_and_a_dry_run(
    write: Callable[..., Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(sp.csr_matrix(logs_of(draw())), has_counts=False)
    assert main(["init", "p", "--data", str(path)]) == 0
    monkeypatch.chdir("p")
    assert "\texpm1(X)\t" in Path("config/datasets.tsv").read_text()
    assert main(["check"]) == 0
    assert main(["run", "--", "-n", "-q"]) == 0
    table = Path("config/datasets.tsv").read_text().replace("expm1(X)", "expm1(raw)")
    Path("config/datasets.tsv").write_text(table)
    capfd.readouterr()
    fault = f"{path.absolute().parent.parent / 'c.h5ad'} has no matrix 'raw' (counts); there are: X"
    assert main(["run", "--", "-n", "-q"]) == 2
    assert fault in capfd.readouterr().err


@pytest.mark.parametrize("store", [sp.csr_matrix, sp.csc_matrix, np.asarray])
def test_check_refuses_logarithms_as_preprocess_does(
    store: Callable[..., object],
    write: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write(store(logs_of(draw()))).absolute()
    assert main(["init", "p", "--data", str(path)]) == 0
    monkeypatch.chdir("p")
    Path("config/datasets.tsv").write_text(f"dataset\tpath\nc\t{path}\n")
    capsys.readouterr()
    assert main(["check"]) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no")]
    assert line.startswith(f"no  counts of c: {path}: X does not hold counts: ")
    assert line.endswith(LOGS_REFUSED)
    words = ["--dataset", "c", "--input", str(path), "--out", "o.h5ad", "--report", "o.json"]
    assert main(["preprocess", *words]) == 2
    assert line.partition(": ")[2] in capsys.readouterr().err


def test_check_doubts_rounded_values(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(sp.csr_matrix(2 * draw())).absolute()
    assert main(["init", "p", "--data", str(path)]) == 0
    monkeypatch.chdir("p")
    Path("config/datasets.tsv").write_text(f"dataset\tpath\nc\t{path}\n")
    capsys.readouterr()
    assert main(["check"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"?   counts of c: {path}: X may hold normalised values that were rounded: 100% of cells have no gene with "
        "a count of 1; raw counts may be in counts: set the dataset's `counts`",
        "ok  genes of c: 75 of 75 (100.0%) have a human Ensembl id",
    ]


def test_doubts_on_counts_look_at_other_matrices(tmp_path: Path) -> None:
    logs = sp.csr_matrix(logs_of(draw()))
    data = ad.AnnData(logs, layers={"counts": sp.csr_matrix(2 * draw())})
    data.write_h5ad(tmp_path / "c.h5ad")
    with open_counts(tmp_path / "c.h5ad", "counts") as reader:
        for _ in reader.rows():
            pass
        [doubt] = reader.doubts()
    assert doubt.endswith(
        "; no other matrix in this file holds counts (X looks log-transformed); use a file with raw counts"
    )


def test_fractions_are_judged_behind_many_empty_cells() -> None:
    logs = sp.csr_matrix(logs_of(draw(20)))
    padded = sp.vstack([sp.csr_matrix((200, logs.shape[1]), dtype=np.float32), logs], format="csr")
    assert describe_fractions(padded) == describe_fractions(logs)


def test_a_flag_for_the_matrix_is_named(
    corpus: dict[str, Path], simulated: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["embed", "--model", str(corpus["model"]), "--input", str(simulated)]
    assert main([*words, "--counts", "raw", "--out", str(tmp_path / "e.h5ad")]) == 2
    assert "no matrix 'raw' (--counts); there are: X" in capsys.readouterr().err


def test_unusable_inputs_of_init_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "p", "--data", "nothere/*.h5ad"]) == 2
    said, _ = capsys.readouterr().err.splitlines()
    assert said == f"cellmill init: {tmp_path}/nothere/*.h5ad: no file matches this pattern"
    Path("e.h5ad").touch()
    assert main(["init", "p", "--data", "e.h5ad"]) == 2
    assert capsys.readouterr().err.startswith(f"cellmill init: {tmp_path}/e.h5ad: empty: 0 bytes\n")


def test_a_missing_table_says_where_paths_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(
        "corpora: {c: {table: t.tsv}}\nruns: {c: {corpus: c}}\ntrain: {steps: 1}\n"
    )
    assert main(["check", "--config", "c.yaml"]) == 2
    assert capsys.readouterr().err.endswith(
        "t.tsv: No such file or directory; expected the table of datasets; paths start at the working folder, "
        f"{tmp_path}\n"
    )
