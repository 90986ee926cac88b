"""cellmill init: what it chooses for a file and why, what it refuses, and cellmill check after it."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.io
import scipy.sparse as sp
import yaml
from anndata.io import write_elem
from small_corpus import write_corpus

from cellmill.cli import main
from cellmill.commands.project import DEMO_DATA, make_name, name_datasets, quiet_words
from cellmill.config.load import check_options, load_config
from cellmill.config.options import TrainOptions
from cellmill.config.shipped import find_shipped
from cellmill.data.genes.tables import gene_table
from cellmill.data.prepare.perturbations import TargetNames, find_perturbations
from cellmill.data.prepare.survey import choose_columns, survey_file
from cellmill.files import write_json
from cellmill.runs.folder import TrainFolder
from cellmill.runs.identity import identity

N_CELLS = 80
CONFIG = """\
# What this project computes, filled in by `cellmill init` from its files; profiles/ sets where it runs.
# `cellmill check` opens every file and says what will be skipped. A changed key reruns the stages that read it.

corpora:
  my-project:
    table: config/datasets.tsv
    datasets:
    - cells  # 80 cells; 75 of 75 names are human genes; counts in X; label cell_type (3 values); batch sample (2 values); no donor

preprocess:
  organism: human  # 100.0% of the names of cells
  min_genes: 13  # at most a fifth of the median, 65 genes of 80 cells
  max_mito_frac: 0.2  # with min_genes drops 0.0% of 80 cells

shard:
  test_frac: 0.3  # 80 cells are few for an evaluation

tokens:
  max_tokens: 32768  # all genes of a cell: family profile reads them at little cost

model:
  family: profile  # 75 genes, a panel or a selection: ahead of baselines where cells have few counts or genes
  hidden: 128  # wider gained nothing on a few thousand cells
  layers: 1

objective:
  name: cell_decoding  # the cell embedding predicts the hidden part of the cell
  view: drop_thin  # hide whole genes, and part of the counts of the others
  batch_column: auto  # batch, donor or dataset, if the training cells have several; `plan` prints which and why

train:
  steps: auto  # by the number of cells; `plan` prints how many
  global_batch: 32
  token_budget: 262144  # at least max_tokens
  lr: 5.0e-3  # for widths up to 256
  warmup_steps: 20

consolidate:
  checkpoint: last  # embeddings improve for longer than the validation loss

evaluate:
  tasks:  # for the columns of datasets.tsv; docs/evaluation.md has more
    reconstruct: {}
    imputation: {}
    probe: {}
    few_shot: {}
    low_depth: {}
    missing_genes: {genes: [25]}  # the default is 200 and 75
    leave_out: {}
    integration: {}

runs:
  my-project:
    corpus: my-project
"""  # noqa: E501


def symbols(organism: str, n: int) -> list[str]:
    """The first `n` symbols that name one gene, none mitochondrial."""
    table = gene_table(organism)
    named = [symbol for gene, symbol in table.symbols.items() if symbol != gene]
    unique = [symbol for symbol in named if table.ids["symbol"].get(symbol)]
    return [symbol for symbol in unique if not symbol.lower().startswith("mt-")][:n]


def draw_counts(n_genes: int, mean: float = 2.0) -> np.ndarray:
    return np.random.default_rng(0).poisson(mean, (N_CELLS, n_genes)).astype(np.float32)


def repeat(*values: str) -> pd.Categorical:
    return pd.Categorical([values[i % len(values)] for i in range(N_CELLS)])


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that writes an .h5ad of counts of human genes in the working folder."""
    monkeypatch.chdir(tmp_path)

    def write_file(
        name: str = "cells.h5ad",
        matrix: Any = None,
        obs: dict[str, Any] | None = None,
        organism: str = "human",
        layers: dict[str, Any] | None = None,
    ) -> Path:
        matrix = draw_counts(75) if matrix is None else matrix
        frame = pd.DataFrame(obs or {}, index=[f"cell_{i}" for i in range(N_CELLS)])
        var = pd.DataFrame(index=symbols(organism, matrix.shape[1]))
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        ad.AnnData(sp.csr_matrix(matrix), obs=frame, var=var, layers=layers).write_h5ad(path)
        return path

    return write_file


def table_of(folder: str = "p") -> list[dict[str, str]]:
    """Rows of the table of a project."""
    frame = pd.read_csv(Path(folder, "config/datasets.tsv"), sep="\t", dtype=str)
    return [{str(k): v for k, v in row.dropna().items()} for _, row in frame.iterrows()]


def test_a_panel_with_labels_makes_this_project(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    obs = {
        "cell_type": repeat("a", "b", "c"),
        "sample": repeat("one", "two"),
        "n_counts": np.arange(80.0),
    }
    path = write(obs=obs)
    assert main(["init", "my project", "--data", str(path)]) == 0
    project = Path("my project")
    assert (project / "config/config.yaml").read_text() == CONFIG
    assert (project / "config/datasets.tsv").read_text() == (
        f"dataset\tpath\tcounts\tlabel\tbatch\ncells\t{path.absolute()}\tX\tcell_type\tsample\n"
    )
    shipped = find_shipped("profiles/local/config.yaml").read_text()
    assert (project / "profiles/local/config.yaml").read_text() == shipped
    files = {str(file.relative_to(project)) for file in project.rglob("*") if file.is_file()}
    tables = {"config/config.yaml", "config/datasets.tsv"}
    assert files == {"Snakefile", "profiles/local/config.yaml"} | tables
    assert {path.name for path in Path().iterdir()} == {"cells.h5ad", "my project"}
    lines = capsys.readouterr().out.splitlines()
    table = "of config/datasets.tsv"
    assert lines[1:3] == [
        f"label: cell_type, chosen by its name; to change it, edit column label {table}",
        f"batch: sample, chosen by its name; to change it, edit column batch {table}; if you compare its values, "
        "set objective.batch_column of config/config.yaml to null, because a model removes differences between batches",
    ]
    assert lines[-1] == "cd 'my project' && cellmill check && cellmill run"


def test_mouse_symbols_make_a_project_of_mouse(write: Callable[..., Path]) -> None:
    assert main(["init", "p", "--data", str(write(organism="mouse"))]) == 0
    assert load_config_of("p").corpora["p"].preprocess.organism == "mouse"


def load_config_of(folder: str) -> Any:
    """The configuration of a project; its table is found from the working folder."""
    config = Path(folder, "config/config.yaml")
    text = config.read_text().replace("config/datasets.tsv", f"{folder}/config/datasets.tsv")
    Path("loaded.yaml").write_text(text)
    return load_config(Path("loaded.yaml"))


def test_two_organisms_meet_on_orthologs(write: Callable[..., Path]) -> None:
    files = [str(write("a.h5ad")), str(write("b.h5ad", organism="mouse"))]
    assert main(["init", "p", "--data", *files]) == 0
    assert load_config_of("p").corpora["p"].preprocess.reference_organism == "human"
    assert [row.get("organism") for row in table_of()] == [None, "mouse"]


@pytest.mark.parametrize("x", [None, np.ones((80, 5), np.float32)])
def test_counts_of_a_modality_are_found_in_its_layer(
    x: np.ndarray | None, write: Callable[..., Path]
) -> None:
    """X is null, or has scaled values of variable genes, as muon and MuDataSeurat write it."""
    data = ad.read_h5ad(write(layers={"counts": draw_counts(75)}))
    with h5py.File("cells.h5mu", "w") as file:
        write_elem(file, "mod/rna", data)
        del file["mod/rna/X"]
        write_elem(file, "mod/rna/X", x)
    for number, path in enumerate(["cells.h5mu", "cells.h5mu#rna"]):
        assert main(["init", f"p{number}", "--data", path]) == 0
        assert table_of(f"p{number}")[0]["counts"].endswith("counts")


def test_counts_in_a_layer_are_found_beside_logarithms(write: Callable[..., Path]) -> None:
    counts = draw_counts(300)
    logs = np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))
    layers = {"ambient": sp.csr_matrix(counts), "counts": sp.csr_matrix(counts)}
    assert main(["init", "p", "--data", str(write(matrix=logs, layers=layers))]) == 0
    assert table_of()[0]["counts"] == "counts"


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        ({"ambiguous": 0.2, "matrix": 1, "spliced": 0.5, "unspliced": 0.3}, "matrix"),  # scvelo
        ({"ambiguous": 0.2, "spliced": 0.5, "unspliced": 0.3}, "spliced"),
        ({"corrected_counts": 0.9, "counts": 1}, "counts"),
        ({"decontXcounts": None, "raw_counts": 1}, "raw_counts"),  # Tabula Sapiens
    ],
)
def test_layers_of_all_molecules_come_before_parts(
    write: Callable[..., Path], layers: dict[str, float | None], chosen: str
) -> None:
    counts = draw_counts(300)
    logs = np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))
    stored = {}
    for name, share in layers.items():
        part = 0.9 * counts + 0.07 if share is None else np.floor(counts * share)
        stored[name] = sp.csr_matrix(np.where(counts > 0, part, 0))
    path = write(matrix=logs, layers=stored)
    assert survey_file(path).counts == chosen


@pytest.mark.parametrize("name", ["spliced", "ambiguous", "mask", "empty"])
def test_estimated_counts_come_before_layers_without_a_name(
    write: Callable[..., Path], name: str
) -> None:
    counts = draw_counts(300)
    estimates = sp.csr_matrix(np.where(counts > 0, 0.9 * counts + 0.07, 0))
    values = {"mask": counts > 0, "empty": 0 * counts}.get(name, counts // 2)
    layers = {name: sp.csr_matrix(values.astype(np.float32))}
    assert survey_file(write(matrix=estimates, layers=layers)).counts == "X"


def test_counts_are_recovered_from_logarithms_and_depths(write: Callable[..., Path]) -> None:
    counts = draw_counts(300)
    logs = np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))
    path = write(matrix=logs, obs={"n_counts": counts.sum(axis=1)})
    assert survey_file(path).counts == "expm1(X)"


def test_logarithms_alone_are_refused_in_one_line(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    counts = draw_counts(300)
    logs = np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))
    assert main(["init", "p", "--data", str(write(matrix=logs))]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"cellmill init: {Path('cells.h5ad').absolute()}: X looks log-transformed; the file has no other matrix; "
        "use a file with raw counts",
        "cellmill init: 1 of 1 inputs cannot be used, nothing written",
    ]
    assert not Path("p").exists()


def test_estimated_counts_get_a_rule(write: Callable[..., Path]) -> None:
    counts = draw_counts(75)
    counts[::7, 3] += 0.37
    assert main(["init", "p", "--data", str(write(matrix=counts))]) == 0
    assert table_of()[0]["counts_rule"] == "stochastic"


def test_a_file_without_labels_gets_tasks_without_them(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    obs = {"state": repeat("a", "b"), "barcode": [f"b{i}" for i in range(N_CELLS)]}
    assert main(["init", "p", "--data", str(write(obs=obs))]) == 0
    assert "no label; no batch; no donor; columns with few values: state" in capsys.readouterr().out
    assert [*load_config_of("p").runs["p"].evaluate.tasks] == ["reconstruct", "imputation"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["leiden", "Cell Type", "donor_id"], {"label": "Cell Type", "donor": "donor_id"}),
        (["leiden", "majorCelltype"], {"label": "majorCelltype"}),
        (["leiden", "orig.ident"], {"label": "leiden", "batch": "orig.ident"}),
        (["cell_type_ontology_term_id", "cell_type"], {"label": "cell_type"}),
        (["state", "phase"], {}),
    ],
)
def test_columns_are_chosen_by_name(names: list[str], expected: dict[str, str]) -> None:
    assert choose_columns(names) == expected


def test_labels_need_two_values_that_are_shared(write: Callable[..., Path]) -> None:
    one_value = {
        "cell_type": repeat("a"),
        "louvain": [f"l{i}" for i in range(N_CELLS)],
        "annotation": repeat("a", "unknown"),
        "cluster": repeat("0", "1"),
    }
    survey = survey_file(write(obs=one_value))
    assert survey.columns == {"label": "cluster"}


def test_labels_of_two_files_share_one_name(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a = write("a.h5ad", obs={"cell_type": repeat("x", "y")})
    b = write("b.h5ad", obs={"annotation": repeat("x", "y")})
    assert main(["init", "p", "--data", str(a), str(b)]) == 0
    shown = [(row["label"], row["label_name"]) for row in table_of()]
    assert shown == [("cell_type", "cell_type"), ("annotation", "cell_type")]
    assert capsys.readouterr().out.splitlines()[2] == (
        "label: cell_type of a, annotation of b, chosen by their names; to change them, edit column label of "
        "config/datasets.tsv; all become column cell_type (label_name)"
    )


@pytest.mark.parametrize("mito_frac", [0.0, 0.35, 0.9])
def test_thresholds_keep_most_cells(write: Callable[..., Path], mito_frac: float) -> None:
    counts = draw_counts(400, mean=3.0)
    counts[:10] = 0
    counts[:10, :3] = 1
    path = write(matrix=counts)
    written = ad.read_h5ad(path)
    names = [*written.var_names]
    names[5] = "MT-CO1"
    written.var_names = names
    dense = written.X.toarray()
    rest = dense.sum(axis=1) - dense[:, 5]
    dense[:, 5] = np.round(rest * mito_frac / (1 - mito_frac))
    written.X = sp.csr_matrix(dense)
    written.write_h5ad(path)
    thresholds = survey_file(path).thresholds
    n_genes = (dense > 0).sum(axis=1)
    is_dropped = n_genes < thresholds.min_genes
    is_dropped |= dense[:, 5] / dense.sum(axis=1) > thresholds.max_mito_frac
    assert thresholds.min_genes == int(0.2 * np.median(n_genes))
    assert is_dropped.sum() == 10
    assert thresholds.max_mito_frac == {0.0: 0.2, 0.35: 0.4, 0.9: 1.0}[mito_frac]


def test_whole_transcriptomes_keep_the_usual_threshold(write: Callable[..., Path]) -> None:
    assert main(["init", "p", "--data", str(write(matrix=draw_counts(2500)))]) == 0
    text = Path("p/config/config.yaml").read_text()
    assert "  min_genes: 200  # at most a fifth of the median" in text
    assert "  family: profile  # 2,500 genes, whole transcriptomes: level with" in text


def test_patterns_folders_and_repeats_are_datasets(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write("a/x.h5ad")
    write("b/x.h5ad")
    folder = Path("sample 1")
    folder.mkdir()
    scipy.io.mmwrite(folder / "matrix.mtx", sp.csc_matrix(draw_counts(75).T.astype(int)))
    (folder / "genes.tsv").write_text("\n".join(f"{name}\t{name}" for name in symbols("human", 75)))
    (folder / "barcodes.tsv").write_text("\n".join(f"b{i}" for i in range(N_CELLS)))
    assert main(["init", "p", "--data", "*/x.h5ad", "a/../a/x.h5ad", "sample 1"]) == 0
    assert [row["dataset"] for row in table_of()] == ["a-x", "b-x", "sample-1"]
    assert "a/../a/x.h5ad: given twice, used once\n" in capsys.readouterr().out


def test_names_are_unique_and_usable() -> None:
    paths = [
        "/s/1/x.h5ad",
        "/t/1/x.h5ad",
        "/s/my file.csv.gz",
        "https://a.b/c/y.zarr",
        "/2024.h5ad",
    ]
    assert name_datasets(paths) == ["1-x", "1-x-2", "my-file", "y", "data-2024"]
    assert [make_name(text) for text in ("", "on", "é", "a" * 200)][:3] == [
        "data",
        "data-on",
        "data",
    ]


def test_a_url_stays_a_url_in_the_table(write: Callable[..., Path], monkeypatch: Any) -> None:
    url = write().absolute().as_uri()
    monkeypatch.setenv("CELLMILL_CACHE", "cache")
    assert main(["init", "p", "--data", url]) == 0
    assert table_of()[0]["path"] == url


def test_every_faulty_input_is_told_in_one_line(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write("good.h5ad")
    Path("empty.h5ad").touch()
    Path("brace{s}.h5ad").write_bytes(Path("good.h5ad").read_bytes())
    Path("proteins.fasta").write_text(">a\nMKV\n")
    Path("cut.csv.gz").write_bytes(gzip.compress(b"gene,c1,c2\nTP53,1,2\n")[:-9])
    faulty = [
        "empty.h5ad",
        "brace{s}.h5ad",
        "proteins.fasta",
        "cut.csv.gz",
        "missing.h5ad",
        "*.loom",
    ]
    assert main(["init", "p", "--data", "good.h5ad", *faulty]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(faulty) + 1
    for name in faulty:
        assert sum(name in line for line in lines) == 1, lines
    assert lines[-1] == (
        "cellmill init: 6 of 7 inputs cannot be used, nothing written; --skip-unreadable leaves them out"
    )
    assert not Path("p").exists()
    assert main(["init", "p", "--skip-unreadable", "--data", "good.h5ad", *faulty]) == 0
    assert [row["dataset"] for row in table_of()] == ["good"]


@pytest.mark.parametrize("kind", ["file", "folder with a file"])
def test_nothing_that_exists_is_overwritten(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    kept = Path("p") if kind == "file" else Path("p/notes.txt")
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("mine")
    assert main(["init", "p", "--data", str(write())]) == 2
    said = "cellmill init: p: exists and is not an empty folder; choose another FOLDER\n"
    assert capsys.readouterr().err == said
    assert kept.read_text() == "mine"


def test_an_empty_folder_becomes_the_project(write: Callable[..., Path]) -> None:
    Path("p").mkdir()
    assert main(["init", "p", "--data", str(write())]) == 0
    assert Path("p/Snakefile").is_file()


def test_check_says_what_is_skipped_and_what_is_broken(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled = write("a.h5ad", obs={"cell_type": repeat("x", "y"), "batch": repeat("1", "2")})
    plain = write("b.h5ad")
    assert main(["init", "p", "--data", str(labelled), str(plain)]) == 0
    monkeypatch.chdir("p")
    capsys.readouterr()
    assert main(["check"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok  genes of a: 75 of 75 (100.0%) have a human Ensembl id",
        "ok  genes of b: 75 of 75 (100.0%) have a human Ensembl id",
        "?   b: no label, so probe, few_shot, low_depth, missing_genes, leave_out, integration will be skipped; "
        "fill column label of config/datasets.tsv",
        "config/config.yaml: every file and column is there, or the workflow makes it",
    ]
    content = Path("../b.h5ad").read_bytes()
    Path("../b.h5ad").write_bytes(content[: len(content) // 2])
    assert main(["check"]) == 2
    told = capsys.readouterr()
    assert "no  genes of b: " in told.out
    assert told.err == "cellmill check: 1 of the datasets cannot be used, for the reasons above\n"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ("lr: 0.02", r"another configuration (train.lr 0.005 -> 0.02); change it back, or "),
        ("steps: 5", r"10 steps in all were lowered to 5; set train.steps above 6, or "),
        ("steps: 20", ""),
        ("log_every_steps: 1", ""),
    ],
)
def test_check_and_plan_name_options_that_train_will_refuse(
    write: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changed: str,
    problem: str,
) -> None:
    assert main(["init", "p", "--data", str(write())]) == 0
    monkeypatch.chdir("p")
    config = Path("config/config.yaml")
    tree = yaml.safe_load(config.read_text())
    tree["train"]["steps"] = 10
    config.write_text(yaml.safe_dump(tree))
    options = check_options(TrainOptions, load_config(config).section("train", "p"), "here")
    folder = TrainFolder(Path("results/runs/p/train"))
    state = {"options": options.model_dump(mode="json"), "identity": identity(options, None)}
    write_json(folder.begin(6) / "state.json", state | {"steps": 10, "progress": {"best_step": 6}})
    folder.finish(folder.checkpoint_folder / "step-00000006.incomplete", keep=1)
    write_corpus(Path("results/corpora/p"), 300, val_frac=0.2)
    assert main(["check"]) == 0
    assert main(["plan"]) == 0
    assert "refuse" not in capsys.readouterr().out
    tree["train"] |= yaml.safe_load(changed)
    config.write_text(yaml.safe_dump(tree))
    assert main(["check"]) == (2 if problem else 0)
    assert main(["plan"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "refuse" in line]
    starts = ["no  run p will be refused: ", "warning     stage train will refuse this run: "]
    for line, start in zip(lines, starts):
        assert line.startswith(f"{start}{folder.path}: it holds a training of 6 steps")
        assert problem in line
    assert len(lines) == (2 if problem else 0)
    assert main(["plan", "--out", "results/runs/p/plan.json"]) == 0
    # it would stay there after `restart`
    recorded = json.loads(Path("results/runs/p/plan.json").read_text())["warnings"]
    assert not any("refuse" in warning for warning in recorded)


def test_check_accepts_files_that_the_workflow_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo in a fresh checkout, whose cells rule demo_data writes."""
    for name in ("config.yaml", "datasets.tsv"):
        (tmp_path / "config").mkdir(exist_ok=True)
        (tmp_path / "config" / name).write_text(find_shipped(f"config/{name}").read_text())
    assert f'"{DEMO_DATA}"' in find_shipped("workflow/rules/data.smk").read_text()
    monkeypatch.chdir(tmp_path)
    assert main(["check"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"?   genes of pbmc68k: {DEMO_DATA} does not exist yet",
        "config/config.yaml: every file and column is there, or the workflow makes it",
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--config", "train.lr=1e-3"],
            "--config train.lr=1e-3: expected 'train={lr: 1e-3}'; targets go before --config",
        ),
        (
            ["--config", "train={lr: 1e-3}", "results/a"],
            "--config results/a: expected KEY=VALUE; targets go before --config",
        ),
        (
            ["-n", "--configfile", "nope.yaml"],
            "--configfile nope.yaml: no such file; targets go before --configfile",
        ),
    ],
)
def test_words_that_snakemake_cannot_read_are_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert main(["run", "--", *words]) == 2
    assert capsys.readouterr().err == f"cellmill run: {line}\n"


@pytest.mark.parametrize("words", [["run"], ["run", "--profile", "mine"]])
def test_run_outside_a_project_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "cellmill run: no project here (no Snakefile or profiles/local): cd into one, or `cellmill init`\n"
    )


def test_run_in_a_folder_without_permission_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "Snakefile").touch()
    (tmp_path / "profiles/local").mkdir(parents=True)
    tmp_path.chmod(0o555)
    monkeypatch.chdir(tmp_path)
    user = os.geteuid()
    if user == 0:  # may write everywhere
        os.seteuid(65534)
    try:
        assert main(["run", "--", "-n", "-q"]) == 2
    finally:
        os.seteuid(user)
    assert capsys.readouterr().err == (
        f"cellmill run: {tmp_path}: Permission denied; the workflow writes to its working directory\n"
    )


def test_run_leaves_out_reasons_if_the_profile_is_as_shipped(tmp_path: Path) -> None:
    shipped = find_shipped("profiles/local")
    assert quiet_words(shipped) == ["--quiet", "host", "reason"]
    text = (shipped / "config.yaml").read_text().replace("quiet: [host]", "quiet: [rules]")
    (tmp_path / "config.yaml").write_text(text)
    assert quiet_words(tmp_path) == quiet_words(tmp_path / "none") == []


def test_tasks_without_a_batch_or_control_are_named(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(obs={"cell_type": repeat("x", "y")}).absolute()
    assert main(["init", "p", "--data", str(path)]) == 0
    monkeypatch.chdir("p")
    config = Path("config/config.yaml")
    tasks = "tasks: {leave_out: {}, integration: {}, perturbation: {}}\n"
    text = config.read_text()
    head, _, rest = text.partition("  tasks:")
    config.write_text(f"{head}  {tasks}\nruns:{rest.partition('runs:')[2]}")
    capsys.readouterr()
    assert main(["check"]) == 0
    assert [line[4:].partition(";")[0] for line in capsys.readouterr().out.splitlines()[1:-1]] == [
        "cells: no donor or batch, so leave_out will be skipped",
        "cells: no batch, so integration will be skipped",
        "cells: no control, so perturbation will be skipped",
    ]
    frame = ad.read_h5ad(path)
    frame.obs["batch"] = repeat("1", "2")  # a column with the name of the role counts
    frame.write_h5ad(path)
    assert main(["check"]) == 0
    assert "batch" not in capsys.readouterr().out


def test_a_screen_gets_its_column_and_controls(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, *_ = symbols("human", 75)
    genes = repeat("NT", first, f"{first}_{second}", "non-targeting", "guide-9")
    obs = {"cell_type": repeat("x", "y"), "gene": genes, "batch": repeat("1", "2")}
    path = write(obs=obs).absolute()
    assert main(["init", "p", "--data", str(path)]) == 0
    (row,) = table_of()
    assert row["perturbation"] == "gene"
    assert row["control"] == "NT|non-targeting"
    assert (
        "perturbation: gene of cells, whose values are genes and the control NT|non-targeting; to change it, edit "
        "columns perturbation and control of config/datasets.tsv"
    ) in capsys.readouterr().out.splitlines()
    tasks = yaml.safe_load(Path("p/config/config.yaml").read_text())["evaluate"]["tasks"]
    assert tasks["perturbation"] == {}


@pytest.mark.parametrize(
    "columns",
    [
        {"disease": ("control", "COVID", "influenza")},  # no genes
        {"condition": ("ctrl", "IFNB1")},  # one gene
        {"gene": ("NT", "TP53", "IFNB1"), "perturbation": ("KO", "NT", "WT")},  # the name is taken
        {"marker": ("CD4", "CD8A", "MS4A1")},  # no control
    ],
)
def test_other_columns_are_no_perturbations(columns: dict[str, tuple[str, ...]]) -> None:
    obs = pd.DataFrame({name: repeat(*values) for name, values in columns.items()})
    assert find_perturbations(obs, TargetNames([], "human")) is None
