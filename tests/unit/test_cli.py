"""The command line: help without torch, exit codes, and errors of one line, for every path that is
no file too.
"""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from limits import limited
from test_bad_models import KINDS

from cellmill import __version__
from cellmill.arguments import new_parser
from cellmill.cli import main
from cellmill.errors import DataError, Stopped

CONFIG = """
corpora: {a: {table: TABLE}, b: {table: TABLE}}
train: {steps: 1}
runs: {one: {corpus: a}, two: {corpus: b, init_from: one}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "datasets.tsv").write_text("dataset\tpath\nsim\traw.h5ad\n")
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("TABLE", str(tmp_path / "datasets.tsv")))
    return path


def commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every sub-command and its parser."""
    nested = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    if not nested:
        yield words, parser
    for action in nested:
        for name, inner in action.choices.items():
            yield from commands(inner, (*words, name))


def test_help_imports_no_slow_library() -> None:
    lines = [
        "import sys",
        "from cellmill.cli import main",
        f"for words in {[[*words, '--help'] for words, _ in commands(new_parser(''))]}:",
        "    try: main(words)",
        "    except SystemExit as end: assert end.code == 0",
        "print(sorted({'torch', 'pandas', 'anndata', 'h5py', 'scipy'} & set(sys.modules)))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert "usage: cellmill profiles new " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
    command = [str(Path(sys.executable).with_name("cellmill")), "--version"]
    assert (
        subprocess.run(command, capture_output=True, text=True).stdout
        == f"cellmill {__version__}\n"
    )


def test_lines_of_a_command_are_written_at_once() -> None:
    lines = (
        "import os",
        "from cellmill.cli import main",
        "main(['options', 'folds'])",
        "os._exit(9)  # as if killed: what is buffered is lost",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 9
    assert "evaluate.folds" in done.stdout


def test_imported_modules_are_left_out_of_garbage_collection() -> None:
    lines = (
        "import gc, sys",
        "from cellmill.imports import importing",
        "with importing(): inside, _ = gc.isenabled(), __import__('json.tool')",
        "print(inside, gc.isenabled(), gc.get_freeze_count() > 1000)",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True", "True"]


SHARD = "shard --cells none.h5ad --vocabulary none.tsv --out m.json"
CELLS = "--input none.h5ad --out o.h5ad"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{SHARD} --config CONFIG", "--corpus is required for CONFIG; there are: a, b\n"),
        (f"{SHARD} --config none.yaml", "none.yaml: No such file or directory"),
        (f"{SHARD} --options {{", "--options: not valid JSON ("),
        (f"{SHARD} --options none.json", "none.json: no such file"),
        (
            f'{SHARD} --options {{"shard":{{"sede":1}}}}',
            "--options: shard: unknown key 'sede'; did you mean 'seed'?",
        ),
        ("plan --config CONFIG --run three", "no run 'three' in CONFIG; there are: one, two\n"),
        # a configuration that is given is read though a model needs none
        (
            f"embed --config CONFIG --model m {CELLS}",
            "--run is required for CONFIG; there are: one, two\n",
        ),
        (
            "train --config CONFIG --run two --manifest m --vocabulary v --out o",
            "run 'two' has init_from: one; pass --init-from FOLDER too, as the workflow does\n",
        ),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    command: str, message: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage, *words = command.replace("CONFIG", str(config)).split()
    assert main([stage, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"cellmill {stage}: {message.replace('CONFIG', str(config))}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "usage", "message"),
    [
        ("map --inputt x", "map", "unknown option --inputt; did you mean --input?"),
        ("map --inputt=x", "map", "unknown option --inputt; did you mean --input?"),
        ("map --zebra red", "map", "unknown option --zebra; see cellmill map --help"),
        ("status --zebra", "status", "unknown option --zebra; see cellmill status --help"),
        ("logs a b", "logs", "unknown argument b; see cellmill logs --help"),
        ("import genefomer", "import", "unknown command genefomer; did you mean geneformer?"),
        (
            "run --cores 4",
            "run",
            "unknown option --cores; options of snakemake come after --, as in: cellmill run -- --cores 4",
        ),
        ("mapp", "", "unknown command mapp; did you mean map?"),
        ("zebra --input x", "", "unknown command zebra; see cellmill --help"),
    ],
)
def test_an_unknown_word_is_named_first_with_the_closest(
    command: str, usage: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(command.split())
    assert end.value.code == 2
    error = capsys.readouterr().err
    program = f"cellmill {usage}".rstrip()
    assert error.startswith(f"usage: {program} [-h]")
    assert error.splitlines()[-1] == f"{program}: error: {message}"


def test_the_usual_configuration_is_read_where_it_is_named(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    Path("config/config.yaml").write_bytes(config.read_bytes())
    embed = ["embed", "--model", "m", *CELLS.split()]
    for given, line in (
        ([], "m: no model folder (no config.json); "),
        (["--config", "config/config.yaml"], "--run is required for config/config.yaml; "),
    ):
        assert main([*embed, *given]) == 2
        assert capsys.readouterr().err.startswith(f"cellmill embed: {line}")


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (
            DataError("a\nb\x1b[2J é.h5ad: no such file"),
            2,
            "cellmill simulate: a\\nb\\x1b[2J é.h5ad: no such file\n",
        ),
        (
            OSError(28, "No space left on device", "a\nb"),
            2,
            "cellmill simulate: a\\nb: No space left on device\n",
        ),
        (Stopped("stopped at step 3"), 75, "cellmill simulate: stopped at step 3\n"),
        (KeyboardInterrupt(), 130, "cellmill simulate: interrupted\n"),
    ],
)
def test_exit_codes_tell_errors_from_stopped_runs(
    raised: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(**arguments: object) -> None:
        raise raised

    monkeypatch.setattr(importlib.import_module("cellmill.stages.data"), "simulate", run)
    assert main(["simulate", "--out", "out.h5ad"]) == code
    assert capsys.readouterr().err == line


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cellmill.commands.exchange", "cellmill.models.families.hf"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    asked = [
        "export",
        "--format",
        "transformers",
        "--model",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(asked) == 2
    assert capsys.readouterr().err == (
        "cellmill export: the package transformers is not installed; pip install 'cellmill[hf]'\n"
    )


def test_push_asks_for_its_package_before_a_licence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["push", "--repo", "me/model", "--model", str(tmp_path)]
    monkeypatch.delitem(sys.modules, "cellmill.models.hub", raising=False)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "huggingface_hub", None)
        assert main(asked) == 2
    assert capsys.readouterr().err == (
        "cellmill push: the package huggingface_hub is not installed; pip install 'cellmill[hub]'\n"
    )
    names = "CommitOperationAdd CommitOperationDelete HfApi snapshot_download".split()
    stand_in = SimpleNamespace(**dict.fromkeys(names))
    monkeypatch.setitem(sys.modules, "huggingface_hub", stand_in)
    assert main(asked) == 2
    assert capsys.readouterr().err == (
        "cellmill push: --licence: expected an identifier of the hub, such as apache-2.0 or other, got ''\n"
    )
    sys.modules.pop("cellmill.models.hub")


SPECIAL = ("a FIFO", "a socket", "a device")


PATHS = [
    (" ".join(words), action.dest)
    for words, parser in commands(new_parser(""))
    for action in parser._actions
    if (isinstance(action.type, type) and issubclass(action.type, Path))
    or action.dest in ("options", "profile")
]


def arguments(command: str, dest: str, value: Path, elsewhere: Path) -> list[str]:
    """A command line with `value` for one argument, and for others that are required a path that is
    not there.
    """
    parser = next(
        parser for words, parser in commands(new_parser("")) if " ".join(words) == command
    )
    line = command.split()
    for action in parser._actions:
        if action.dest == dest or action.required:
            default = next(iter(action.choices or ()), elsewhere / f"{action.dest}.h5ad")
            text = value if action.dest == dest else default
            line += [*action.option_strings[:1], str(text)]
    return line


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.full) for kind in SPECIAL] + ["a loop"]
)
def test_a_path_to_a_special_file_is_refused_in_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert {("train", "manifest"), ("embed", "model"), ("status", "results")} <= set(PATHS)
    assert len(PATHS) > 90
    path = tmp_path / "given.h5ad"
    KINDS[kind](path)
    for command, dest in PATHS:
        with limited():
            code = main(arguments(command, dest, path, tmp_path / "elsewhere"))
        printed = capsys.readouterr().err
        assert code == 2, (command, dest, printed)
        assert printed.count("\n") == 1, (command, dest, printed)
        assert str(path) in printed or dest == "profile", (command, dest, printed)
        if kind in SPECIAL and dest not in ("options", "profile"):
            assert f"{path}: expected a file or folder, got {kind}\n" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "preprocess --input {a} --dataset d --out {link} --report {b}",
            "preprocess: --out {link} is --input, which",
        ),
        (
            "preprocess --input {a} --dataset d --out {b} --report {b}",
            "preprocess: --report {b} is --out, which",
        ),
        ("vocabulary --cells {b} {a} --out {a}", "vocabulary: --out {a} is --cells, which"),
        ("shard --cells {a} --vocabulary {b} --out {b}", "shard: --out {b} is --vocabulary, which"),
    ],
)
def test_an_output_that_overwrites_an_input_is_refused(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {name: tmp_path / name for name in ("a", "b", "link")}
    for name in ("a", "b"):
        paths[name].write_text(name)
    paths["link"].symlink_to(paths["a"])
    assert main(words.format(**paths).split()) == 2
    line = f"cellmill {message.format(**paths)} would be lost; name another file\n"
    assert capsys.readouterr().err == line
    assert [paths[name].read_text() for name in ("a", "b")] == ["a", "b"]


def test_without_a_machine_the_error_names_who_needs_it(tmp_path: Path) -> None:
    """As a minimal image is: Snakemake's plugin for SLURM calls the program when it is imported."""
    command = [str(Path(sys.executable).with_name("cellmill")), "profiles", "install"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "cellmill profiles: no program `which` on PATH, which Snakemake's plugin for SLURM calls; install it"
    )
