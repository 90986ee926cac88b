"""A path on the command line that is no file, or not what is wanted there, ends in one line and exit code 2."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from limits import limited
from test_bad_models import KINDS

from cellmill import cli
from cellmill.arguments import new_parser

SPECIAL = ("a FIFO", "a socket", "a device")


def commands(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every sub-command and its parser."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield words, parser
    for action in nested:
        for name, inner in action.choices.items():
            yield from commands(inner, (*words, name))


def is_path(action: argparse.Action) -> bool:
    is_typed = isinstance(action.type, type) and issubclass(action.type, Path)
    return is_typed or action.dest in ("options", "profile")


PATHS = [
    (" ".join(words), action.dest)
    for words, parser in commands(new_parser(""))
    for action in parser._actions
    if is_path(action)
]


def arguments(command: str, dest: str, value: Path, elsewhere: Path) -> list[str]:
    """A command line with `value` for one argument, and for others that are required a path that is not there."""
    parser = next(parser for words, parser in commands(new_parser("")) if " ".join(words) == command)
    line = command.split()
    for action in parser._actions:
        if action.dest == dest or action.required:
            default = next(iter(action.choices or ()), elsewhere / f"{action.dest}.h5ad")
            text = value if action.dest == dest else default
            line += [*action.option_strings[:1], str(text)]
    return line


def test_every_path_of_the_command_line_is_known() -> None:
    assert {("train", "manifest"), ("embed", "model"), ("evaluate", "ancestors"), ("status", "results")} <= set(PATHS)
    assert len(PATHS) > 50


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.full) for kind in SPECIAL] + ["a loop"])
def test_a_path_that_is_no_file_is_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "given.h5ad"
    KINDS[kind](path)
    for command, dest in PATHS:
        with limited():
            code = cli.main(arguments(command, dest, path, tmp_path / "elsewhere"))
        printed = capsys.readouterr().err
        assert code == 2, (command, dest, printed)
        assert printed.count("\n") == 1, (command, dest, printed)
        assert str(path) in printed or dest == "profile", (command, dest, printed)
        if kind in SPECIAL and dest not in ("options", "profile"):
            assert f"{path}: expected a file or folder, got {kind}\n" in printed
