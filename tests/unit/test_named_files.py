"""Files that a configuration names and Snakemake would not miss where outputs stand."""

import json
import os
from pathlib import Path

import pandas as pd
import pytest
from limits import limited

from cellmill.config.load import load_config
from cellmill.data.prepare import check as input_check
from cellmill.data.prepare.check import check_datasets, check_inputs
from cellmill.errors import UserError


def write_config(folder: Path, options: str = "", **datasets: dict[str, object]) -> Path:
    """Run `r` on corpus `c` of `datasets`, of which each has columns of the table."""
    pd.DataFrame.from_dict(datasets, orient="index").to_csv(
        folder / "t.tsv", sep="\t", index_label="dataset"
    )
    corpus = f"corpora: {{c: {{table: {folder / 't.tsv'}}}}}\nruns: {{r: {{corpus: c}}}}\ntrain: {{steps: 1}}\n"
    (folder / "c.yaml").write_text(corpus + options)
    return folder / "c.yaml"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the cells of a dataset, whose input is there too."""
    monkeypatch.chdir(tmp_path)
    for file in ("data/raw.h5ad", "results/corpora/c/cells/one.h5ad"):
        Path(file).parent.mkdir(parents=True)
        Path(file).touch()
    Path("results/corpora/c/cells/one.json").write_text(
        json.dumps({"source": {"file": "raw.h5ad"}})
    )
    return tmp_path


def checked(
    options: str = "",
    made: str = "",
    change: tuple[str, str] = ("", ""),
    **datasets: dict[str, object],
) -> str | None:
    """Its line on files that are gone, or its error; of `change` in the configuration the second
    text stands for the first.
    """
    config = write_config(Path(), options, **(datasets or {"one": {"path": "data/raw.h5ad"}}))
    config.write_text(config.read_text().replace(*change))
    try:
        lines = check_inputs(load_config(config), lambda path: path == made)
        return next((line for line in lines if "will be skipped" not in line), None)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ("vocabulary: {genes: nope}", "vocabulary.genes: "),
        ("vocabulary: {medians: nope}", "vocabulary.medians: "),
        (
            "preprocess: {reference_organism: human, orthologs: nope}",
            "preprocess.orthologs: ",
        ),
        ("model: {gene_vectors: nope, gene_vector_dim: 4}", "model.gene_vectors: "),
        ("evaluate: {tasks: {grn: {edges: nope}}}", "evaluate.tasks.grn.edges: "),
        (
            "evaluate: {tasks: {perturbation: {priors: {p: nope}}}}",
            "evaluate.tasks.perturbation.priors.p: ",
        ),
        (
            "evaluate: {tasks: {perturbation: {split_file: nope}}}",
            "evaluate.tasks.perturbation.split_file: ",
        ),
    ],
)
def test_a_missing_file_of_an_option_is_named(project: Path, options: str, where: str) -> None:
    assert checked(options) == f"{where}nope: no such file"
    assert checked(options, made="nope") is None
    Path("nope").mkdir()
    assert checked(options) == f"{where}nope: expected a file, got a folder"
    Path("nope").rmdir()
    os.mkfifo("nope")
    assert checked(options) == f"{where}nope: expected a file, got a FIFO"
    Path("nope").unlink()
    Path("nope").touch()
    assert checked(options) == f"{where}nope: the file is empty"
    Path("nope").write_text("content")
    assert checked(options) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_of_an_option_is_named(project: Path) -> None:
    Path("genes.txt").write_text("A\n")
    Path("genes.txt").chmod(0)
    said = "vocabulary.genes: genes.txt: Permission denied"
    assert checked("vocabulary: {genes: genes.txt}") == said


def test_missing_files_of_another_model_are_named(project: Path) -> None:
    options = "objective: {name: distill, teacher: ./given}\n"
    assert checked(options) == "objective.teacher: given/one.h5ad: no such file"
    Path("given").mkdir()
    Path("given/one.h5ad").write_text("content")
    assert checked(options) is None
    external = "evaluate: {external: {a: {model: models/m}, b: {model: geneformer:models/g}}}\n"
    where = "evaluate.external"
    assert checked(external) == f"{where}.a.model: models/m/model.safetensors: no such file"
    none = "models/g: no such folder; give the folder with the published files"
    assert checked(external, made="models/m/model.safetensors") == f"{where}.b.model: {none}"
    missing = checked(change=("{corpus: c}", "{corpus: c, init_from: models/m}"))
    assert missing == "runs.r.init_from: models/m/model.safetensors: no such file"


@pytest.mark.parametrize(
    "model", ["hf://owner", "hf://own/a:b", "hf://own/../x", "hf://own/name@", "hf://own/name@a@b"]
)
def test_a_misspelt_model_is_named_even_if_results_exist(project: Path, model: str) -> None:
    said = f"expected hf://owner/name or hf://owner/name@revision, got '{model}'"
    parent = ("{corpus: c}", f"{{corpus: c, init_from: {model}}}")
    assert checked(change=parent) == f"runs.r.init_from: {said}"
    where = "evaluate.external.a.model"
    assert checked(f"evaluate: {{external: {{a: {{model: {model}}}}}}}\n") == f"{where}: {said}"
    assert checked(change=("{corpus: c}", "{corpus: c, init_from: hf://own/name@v1.0}")) is None
    said = f"vocabulary.medians: expected a path, got '{model}'"
    assert checked(f"vocabulary: {{medians: {model}}}\n") == said


def test_tasks_without_a_label_are_named_once_for_all_runs(project: Path) -> None:
    Path("data/b.h5ad").touch()
    tasks = "evaluate: {tasks: {probe: {}, few_shot: {}, reconstruct: {}}}\nruns: {q: {corpus: c}, r: {corpus: c}}\n"
    path = write_config(
        Path(), "", one={"path": "data/raw.h5ad"}, b={"path": "data/b.h5ad", "label": "kind"}
    )
    path.write_text(path.read_text().replace("runs: {r: {corpus: c}}\n", tasks))
    line = "one: no label, so probe, few_shot will be skipped; fill column label of t.tsv"
    assert check_inputs(load_config(path)) == [line]


def test_a_missing_input_is_not_replaced_by_other_cells(project: Path) -> None:
    old = {"path": "data/raw.h5ad"}
    new = {"path": "data/new.h5ad"}
    none = "t.tsv: dataset one: data/new.h5ad: no such file"
    others = f"{none}, and results/corpora/c/cells/one.h5ad is of raw.h5ad; correct the path, or delete the cells"
    assert checked() is None
    Path("data/raw.h5ad").unlink()  # to save its space, say
    assert (
        checked()
        == "used as they are, since their inputs are gone: results/corpora/c/cells/one.h5ad"
    )
    assert checked(made="data/raw.h5ad") is None
    assert checked(one=new) == others
    # a dataset that no run is trained or evaluated on: its cells were made for a prediction, say
    Path("data/raw.h5ad").touch()
    only_two = ("table: t.tsv", "table: t.tsv, datasets: [two]")
    assert checked(change=only_two, one=new, two=old) == others
    Path("results/corpora/c/cells/one.h5ad").unlink()
    assert checked(change=only_two, one=new, two=old) is None
    assert checked(one=new) == f"{none}; correct the path, or put the file there"
    assert checked(made="data/new.h5ad", one=new) is None
    command = "cellmill simulate --out data/new.h5ad --cells 9"
    assert checked(one=new | {"source": command}) == f"{none}; make it: {command}"


def test_a_fifo_as_input_is_named_without_waiting(project: Path) -> None:
    os.mkfifo("data/fifo.h5ad")
    fifo: dict[str, object] = {"path": "data/fifo.h5ad"}
    with limited():
        check_datasets(load_config(write_config(Path(), one=fifo)))
        assert (
            checked(one=fifo)
            == "t.tsv: dataset one: data/fifo.h5ad: expected a file or folder, got a FIFO"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "evaluate: {tasks: {integration: {harmony: true}}}",
            "evaluate.tasks.integration requires harmonypy, which is missing: pip install 'cellmill[integrate]'",
        ),
        (
            "vocabulary: {select: seurat_v3, max_genes: 9}",
            "vocabulary.select seurat_v3 requires skmisc, which is missing: pip install 'cellmill[hvg]'",
        ),
        ("evaluate: {tasks: {integration: {}}}", None),
    ],
)
def test_a_missing_package_is_named_before_anything_runs(
    project: Path, monkeypatch: pytest.MonkeyPatch, options: str, message: str | None
) -> None:
    monkeypatch.setattr(input_check, "find_spec", lambda module: None)
    assert checked(options) == message
