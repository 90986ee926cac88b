"""Files that a configuration names and Snakemake would not miss where outputs stand."""

import json
import os
from pathlib import Path

import pytest
from limits import limited

from cellmill.config.load import load_config
from cellmill.data.prepare import check as input_check
from cellmill.data.prepare.check import check_datasets, check_inputs
from cellmill.errors import UserError

CONFIG = "corpora: {c: {table: t.tsv}}\nruns: {r: {corpus: c}}\ntrain: {steps: 1}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the cells of a dataset, whose input is there too."""
    monkeypatch.chdir(tmp_path)
    Path("t.tsv").write_text("dataset\tpath\none\tdata/raw.h5ad\n")
    for file in ("data/raw.h5ad", "results/corpora/c/cells/one.h5ad"):
        Path(file).parent.mkdir(parents=True)
        Path(file).touch()
    Path("results/corpora/c/cells/one.json").write_text(json.dumps({"source": {"file": "raw.h5ad"}}))
    return tmp_path


def checked(options: str = "", made: str = "") -> str | None:
    """Result of the check, or its error."""
    Path("c.yaml").write_text(CONFIG + options)
    try:
        return check_inputs(load_config(Path("c.yaml")), lambda path: path == made)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ("vocabulary: {genes: nope}", "corpora.c.vocabulary.genes: "),
        ("vocabulary: {medians: nope}", "corpora.c.vocabulary.medians: "),
        ("preprocess: {reference_organism: human, orthologs: nope}", "corpora.c.preprocess.orthologs: "),
        ("model: {gene_vectors: nope, gene_vector_dim: 4}", "runs.r.model.gene_vectors: "),
        ("evaluate: {tasks: {grn: {edges: nope}}}", "runs.r.evaluate.tasks.grn.edges: "),
        (
            "evaluate: {tasks: {perturbation: {priors: {esm: nope}}}}",
            "runs.r.evaluate.tasks.perturbation.priors.esm: ",
        ),
    ],
)
def test_a_missing_file_of_an_option_is_named_unless_a_rule_makes_it(project: Path, options: str, where: str) -> None:
    assert checked(options) == f"{where}nope: no such file"
    assert checked(options, made="nope") is None
    Path("nope").mkdir()
    assert checked(options) == f"{where}nope: expected a file, got a folder"
    Path("nope").rmdir()
    os.mkfifo("nope")
    assert checked(options) == f"{where}nope: expected a file, got a FIFO"
    Path("nope").unlink()
    Path("nope").touch()
    assert checked(options) is None


def test_a_missing_file_of_a_teacher_is_named(project: Path) -> None:
    options = "objective: {name: distill, teacher: ./given}\n"
    assert checked(options) == "runs.r.objective.teacher: given/one.h5ad: no such file"
    Path("given").mkdir()
    Path("given/one.h5ad").touch()
    assert checked(options) is None


def test_a_missing_model_folder_is_named(project: Path) -> None:
    Path("c.yaml").write_text(CONFIG.replace("{corpus: c}", "{corpus: c, init_from: models/m}"))
    with pytest.raises(UserError, match=r"^runs\.r\.init_from: models/m/model\.safetensors: no such file$"):
        check_inputs(load_config(Path("c.yaml")))


def test_cells_of_another_input_than_the_one_that_is_missing_are_refused(project: Path) -> None:
    assert checked() is None
    Path("data/raw.h5ad").unlink()  # to save its space, say
    assert checked() == "used as they are, since their inputs are gone: results/corpora/c/cells/one.h5ad"
    assert checked(made="data/raw.h5ad") is None
    Path("t.tsv").write_text("dataset\tpath\none\tdata/new.h5ad\n")
    assert checked() == (
        "t.tsv: dataset one: data/new.h5ad: no such file, and results/corpora/c/cells/one.h5ad is of raw.h5ad; correct "
        "the path, or delete the cells"
    )
    # a dataset that no run is trained or evaluated on: its cells were made for a prediction, say
    Path("data/raw.h5ad").touch()
    Path("t.tsv").write_text("dataset\tpath\none\tdata/new.h5ad\ntwo\tdata/raw.h5ad\n")
    others = "corpora: {c: {table: t.tsv, datasets: [two]}}\n" + CONFIG.partition("\n")[2]
    Path("c.yaml").write_text(others)
    with pytest.raises(UserError, match=r"^t\.tsv: dataset one: data/new\.h5ad: no such file, and "):
        check_inputs(load_config(Path("c.yaml")))
    Path("results/corpora/c/cells/one.h5ad").unlink()
    check_inputs(load_config(Path("c.yaml")))
    Path("t.tsv").write_text("dataset\tpath\none\tdata/new.h5ad\n")
    assert checked() == "t.tsv: dataset one: data/new.h5ad: no such file; correct the path, or put the file there"
    assert checked(made="data/new.h5ad") is None
    command = "cellmill simulate --out data/new.h5ad --cells 9"
    Path("t.tsv").write_text(f"dataset\tpath\tsource\none\tdata/new.h5ad\t{command}\n")
    assert checked() == f"t.tsv: dataset one: data/new.h5ad: no such file; make it: {command}"


def test_an_input_that_is_a_fifo_is_named_and_not_waited_for(project: Path) -> None:
    os.mkfifo("data/fifo.h5ad")
    Path("t.tsv").write_text("dataset\tpath\none\tdata/fifo.h5ad\n")
    Path("c.yaml").write_text(CONFIG)
    with limited():
        check_datasets(load_config(Path("c.yaml")))
        assert checked() == "t.tsv: dataset one: data/fifo.h5ad: expected a file or folder, got a FIFO"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "evaluate: {tasks: {integration: {harmony: true}}}",
            "runs.r.evaluate.tasks.integration requires harmonypy, which is missing: pip install 'cellmill[integrate]'",
        ),
        (
            "evaluate: {tasks: {clustering: {}}}",
            "runs.r.evaluate.tasks.clustering requires igraph, which is missing: pip install 'cellmill[cluster]'",
        ),
        (
            "vocabulary: {select: seurat_v3, max_genes: 9}",
            "corpora.c.vocabulary.select seurat_v3 requires skmisc, which is missing: pip install 'cellmill[hvg]'",
        ),
        ("evaluate: {tasks: {integration: {}}}", None),
    ],
)
def test_a_package_that_a_stage_needs_is_looked_up_before_anything_runs(
    project: Path, monkeypatch: pytest.MonkeyPatch, options: str, message: str | None
) -> None:
    monkeypatch.setattr(input_check, "find_spec", lambda module: None)
    assert checked(options) == message
