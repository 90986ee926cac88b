"""External models: their options, what a command may write, and their rows beside the model's."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import pytest
from pydantic import ValidationError

from cellmill.cli import main
from cellmill.config.evaluate import Evaluate, command_words
from cellmill.errors import ConfigError, DataError
from cellmill.report.collect import read_run
from cellmill.report.page import render, standings
from tests.unit.evaluated import evaluate

SCRIPT = """
import sys
import anndata as ad
import numpy as np
cells = ad.read_h5ad(sys.argv[1])
counts = cells.X.toarray().astype(float)
counts = np.log1p(1e4 * counts / counts.sum(1, keepdims=True))
u, s, _ = np.linalg.svd(counts - counts.mean(0), full_matrices=False)
made = ad.AnnData(obs=cells.obs[[]], obsm={"X_emb": (u * s)[:, :7]})
CHANGE
made.write_h5ad(sys.argv[2])
"""


def command_of(folder: Path, change: str = "") -> str:
    """Command of a script that embeds by principal components, with a line changed."""
    script = folder / "embed it.py"
    script.write_text(SCRIPT.replace("CHANGE", change))
    return f"{sys.executable} {shlex.quote(str(script))} {{cells}} {{out}}"


def embed_external(command: str, cells: Path, out: Path) -> int:
    return main(["embed_external", "--name", "pca", f"--command={command}", "--input", str(cells), "--out", str(out)])


def test_paths_stay_in_one_argument_and_no_shell_reads_them() -> None:
    words = command_words("run 'a b' --in={cells} {out}.x ; $HOME", "c; {out} d", "o u t")
    assert words == ["run", "a b", "--in=c; {out} d", "o u t.x", ";", "$HOME"]


@pytest.mark.parametrize(
    ("external", "message"),
    [
        ({"a": {"command": "run {cells}"}}, "expected {out} among its arguments, got 'run {cells}'"),
        ({"a": {"command": "run '{cells} {out}"}}, "(No closing quotation)"),
        ({"a b": {"command": "run {cells} {out}"}}, "'a b' is no name; use letters, digits, '_', '.' and '-'"),
        ({"a": {"preset": "scvii"}}, "no preset 'scvii'; did you mean 'scvi'?"),
        ({"a": {"preset": "pca"}}, "no preset 'pca'; there are: scvi, harmony"),
        ({"a": {"preset": "scvi", "command": "run {cells} {out}"}}, "expected preset or command, got both; set one of"),
        ({"a": {}}, "expected preset or command, got neither; set one of them"),
        ({"a": {"preset": "scvi", "files": ["a.py"]}}, "files: expected none beside a preset; leave them out"),
    ],
)
def test_what_no_model_can_be_is_refused(external: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match="1 validation error") as raised:
        Evaluate.model_validate({"external": external})
    assert message in str(raised.value)


def test_without_external_models_the_options_are_what_they_were() -> None:
    assert "external" not in Evaluate().model_dump(mode="json")
    given = {"a": {"command": "run {cells} {out}"}}
    assert Evaluate.model_validate({"external": given}).model_dump(mode="json")["external"] == {
        "a": {"command": "run {cells} {out}", "files": []}
    }
    one, other = (Evaluate.model_validate({"external": {"a": {**given["a"], "files": f}}}) for f in ([], ["s.py"]))
    assert one.external["a"].digest != other.external["a"].digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("print('why'); sys.exit(3)", "it ended with exit status 3; its last lines are above"),
        pytest.param(
            "import os; os.kill(os.getpid(), 9)",
            "it was ended by signal 9; its last lines are above",
            marks=pytest.mark.full,
        ),
        ("sys.exit()", "it ended well and wrote no file to {out}"),
        ("open(sys.argv[2], 'w').write('no'); sys.exit()", "OUT: not an HDF5 file; evaluate.external.pca.command"),
        (
            "made = made[::-1].copy()",
            "expected the N cells of {cells} in their order, got N; the first that differs is cell 1, LAST instead of "
            "FIRST",
        ),
        (
            "made = made[:5].copy()",
            "expected the N cells of {cells} in their order, got 5; the first that differs is cell 6, no cell instead "
            "of SIXTH",
        ),
        (
            "made.obsm['X_emb'][2, 1] = np.nan",
            "1 cells have numbers in obsm['X_emb'] that are not finite, the first is THIRD; expected an embedding of "
            "every cell",
        ),
        ("del made.obsm['X_emb']", "expected a dense array of numbers in obsm['X_emb'] or X, got no dense array"),
        ("made.obsm['X_emb'] = made.obsm['X_emb'][:, :0]", "expected N rows in obsm['X_emb'], got shape (N, 0)"),
    ],
)
def test_what_a_command_gets_wrong_is_one_line(
    change: str, message: str, corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "out.h5ad"
    assert embed_external(command_of(tmp_path, change), corpus["cells"], out) == 2
    names = ad.read_h5ad(corpus["cells"]).obs_names
    known = {"FIRST": names[0], "LAST": names[-1], "SIXTH": names[5], "THIRD": names[2]}
    message = re.sub("|".join(known), lambda found: repr(known[found[0]]), message)
    message = re.sub(r"\bN\b", str(len(names)), message)
    [line] = capsys.readouterr().err.splitlines()  # that of the command is another process's
    if message.startswith("OUT"):
        assert line.endswith(message.removeprefix("OUT"))
    else:
        assert line == f"cellmill embed_external: evaluate.external.pca.command: {message}"
    assert list(out.parent.iterdir()) == []


def test_a_program_that_cannot_be_run_is_named(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embed_external("./no-such-program {cells} {out}", corpus["cells"], tmp_path / "out.h5ad") == 2
    assert capsys.readouterr().err == (
        "cellmill embed_external: evaluate.external.pca.command: './no-such-program' cannot be run: No such file or "
        "directory; name a program of PATH, or its path\n"
    )


@pytest.mark.parametrize("change", ["", "made = ad.AnnData(made.obsm['X_emb'], obs=made.obs)"], ids=["obsm", "X"])
def test_the_embedding_is_kept_in_the_form_of_ours(change: str, corpus: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.h5ad"
    command = command_of(tmp_path, change)
    assert embed_external(command, corpus["cells"], out) == 0
    made, cells = ad.read_h5ad(out), ad.read_h5ad(corpus["cells"])
    assert made.obs_names.tolist() == cells.obs_names.tolist()
    assert made.obsm["X_cellmill"].shape == (cells.n_obs, 7)
    assert made.uns["cellmill"]["command"] == command


TASKS = {
    "probe": {"seeds": 1},
    "few_shot": {"shots": [5], "draws": 2},
    "clustering": {"seeds": 1, "resolutions": [1.0]},
    "integration": {"neighbors": 15},
}


def evaluated(
    corpus: dict[str, Path], out: Path, external: bool = True, files: list[Path] | None = None, **options: Any
) -> dict[str, Any]:
    """Evaluation with or without an external model, below the folder `out`."""
    command, made = command_of(out.parent), out.parent / "made.h5ad"
    if external and not made.exists():
        assert embed_external(command, corpus["cells"], made) == 0
    given = {"tasks": TASKS} | ({"external": {"pca": {"command": command}}} if external else {}) | options
    beside = ([made] if external else []) if files is None else files
    return evaluate(corpus, out / "evaluate" / "metrics.json", beside=beside, **given)


def test_an_external_model_has_rows_beside_the_model_and_changes_no_verdict_and_no_gate(
    corpus: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("igraph", reason="task clustering requires igraph")
    without, beside = (evaluated(corpus, tmp_path / name, name == "beside") for name in ("without", "beside"))
    for task in TASKS:
        before, after = (metrics["datasets"]["simulated"]["tasks"][task] for metrics in (without, beside))
        added = [row for row in after["rows"] if row["kind"] == "external"]
        assert [row for row in after["rows"] if row["kind"] != "external"] == before["rows"], task
        assert {row["name"].partition(" + ")[0] for row in added} == {"external: pca"}
        assert after["verdicts"] == before["verdicts"]
        against = {line["against"] for line in after["differences"]}
        assert {line["against"] for line in before["differences"]} == {n for n in against if "external" not in n}
        assert any(name.startswith("external: pca") for name in against)
    probe = beside["datasets"]["simulated"]["tasks"]["probe"]["rows"]
    best = {kind: max(row["accuracy_mean"] for row in probe if row["kind"] == kind) for kind in ("model", "external")}
    assert best["external"] > best["model"]  # components against random weights
    with pytest.raises(ConfigError, match="no baseline 'external: pca'; there are: untrained"):
        evaluated(corpus, tmp_path / "gate", tasks={"probe": {}}, gate=[{"task": "probe", "baseline": "external: pca"}])

    run = read_run(tmp_path / "beside")
    standing = standings([run])[0]
    assert standing.row.startswith("embedding")
    assert standing.baseline is not None
    assert not standing.baseline[0].startswith("external")
    assert 'external: pca + kNN <span class="tag">external</span>' in render("Report", [run], [])


def test_files_of_external_models_pair_up_and_are_of_the_command(corpus: dict[str, Path], tmp_path: Path) -> None:
    message = "expected 1 --external for each of 1 --cells, for evaluate.external: pca; got 0 files"
    with pytest.raises(ConfigError, match=message):
        evaluated(corpus, tmp_path / "none", files=[])
    other = tmp_path / "other.h5ad"
    assert embed_external(command_of(tmp_path) + " --other", corpus["cells"], other) == 0
    with pytest.raises(DataError, match=r"other\.h5ad: made by model \w{12}, expected \w{12}; run embed again"):
        evaluated(corpus, tmp_path / "other", files=[other])
