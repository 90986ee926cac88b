"""Exported models whose files are not as written are refused in one line, at once and in little
memory.
"""

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import export_model
from limits import limited
from safetensors.torch import load_file, save_file
from small_corpus import genes_named, vocabulary_of

from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import UserError
from cellmill.files import sha256_file
from cellmill.models.export import load_model

WEIGHTS = "model.safetensors"
REMEDY = "; copy it again, or export the model again (consolidate)"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    vocabulary_of(genes_named(30)).write(folder / "genes.tsv")
    return export_model(folder / "model", folder / "genes.tsv")


@pytest.fixture
def model(exported: Path, tmp_path: Path) -> Path:
    """A copy of the model to damage."""
    return Path(shutil.copytree(exported, tmp_path / "model"))


def error_of(model: Path) -> str:
    with limited(), pytest.raises(UserError) as error:
        load_model(model)
    line = str(error.value)
    assert "\n" not in line
    assert len(line) < 600
    return line


def edit(model: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change config.json."""
    path = model / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize(
    "value", [10**9, 10**6, 10**30, -1, 0, 2.5, float("nan"), float("inf"), "many", None, [1], {}]
)
@pytest.mark.parametrize(
    "key", ["model.hidden", "model.layers", "model.heads", "tokens.max_tokens", "model.ffn_hidden"]
)
def test_wrong_sizes_are_refused_before_memory_is_allocated(
    model: Path, key: str, value: Any
) -> None:
    section, name = key.split(".")
    edit(model, lambda config: config | {section: config[section] | {name: value}})
    # the number of tokens and a feed-forward layer of the usual width are no part of the weights
    if (name == "max_tokens" and value in (10**9, 10**6)) or (
        name == "ffn_hidden" and value is None
    ):
        with limited():
            load_model(model)
        return
    assert name in (line := error_of(model)) or "expected" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"levels": 3}, "levels: input should be a valid dictionary, got 3"),
        ({"levels": {"donor": "abc"}}, "levels.donor: input should be a valid list, got 'abc'"),
        ({"supervised_by": [1]}, "supervised_by.0: input should be a valid string, got 1"),
        ({"tokens": []}, "tokens: input should be a valid dictionary, got "),
        ({"model": {"family": []}}, "family"),
        ({"weights_sha256": 5}, "weights_sha256: input should be a valid string, got 5"),
        ({"format": [2]}, r"expected a model of format 2, got \[2\]"),
        ({"format": 1}, "expected a model of format 2, got 1; copy it again, or export"),
        ({"model": {"hiden": 3}}, r"model: unknown key 'hiden'; did you mean 'hidden'\?"),
        *(
            ({key: None}, f"{key}: is missing")
            for key in ("vocabulary_digest", "family", "model", "tokens")
        ),
        ({"objective": {"name": "none"}}, "none"),
    ],
)
def test_other_values_in_config_json_are_named(
    model: Path, change: dict[str, Any], message: str
) -> None:
    edit(
        model,
        lambda config: {
            key: value for key, value in (config | change).items() if value is not None
        },
    )
    with pytest.raises(UserError, match=rf"config\.json: .*{message}"):
        load_model(model)


@pytest.mark.parametrize(
    "text", ["[" * 10_000 + "]" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000, "", "\0", "[]"]
)
def test_a_config_json_of_something_else_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert str(model / "config.json") in error_of(model)


@pytest.mark.parametrize("name", ["config.json", "vocabulary.tsv", WEIGHTS])
@pytest.mark.parametrize("frac", [0, 0.5, 0.99])
def test_a_file_that_is_cut_is_named_with_a_remedy(model: Path, name: str, frac: float) -> None:
    content = (model / name).read_bytes()
    (model / name).write_bytes(content[: int(frac * len(content))])
    line = error_of(model)
    assert line.startswith(f"{model / name}: ")
    assert line.endswith(REMEDY)
    assert line.count("copy it again") == 1


@pytest.mark.parametrize("entry", [{}, {"label_column": "x", "labels": 3, "calibration": None}, 3])
def test_a_damaged_entry_of_a_head_is_named(model: Path, entry: Any) -> None:
    for changes in ({"classifier": entry}, {"more_classifiers": {"part": entry}}):
        edit(model, lambda config, changes=changes: config | changes)
        line = error_of(model)
        assert line.startswith(f"{model / 'config.json'}: {next(iter(changes))}")
        assert line.endswith(REMEDY)
        edit(
            model,
            lambda config, changes=changes: {k: v for k, v in config.items() if k not in changes},
        )


def lying_header(path: Path, **changes: Any) -> None:
    """Change the entry of one tensor in the header of a .safetensors file."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header["norm.weight"] |= changes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def changed_tensor(path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(path)
    save_file(tensors | {"norm.weight": change(tensors["norm.weight"])}, path)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a shape that is huge": lambda path: lying_header(path, shape=[2**40]),
    "a shape that overflows": lambda path: lying_header(path, shape=[2**62, 2**62]),
    "a negative shape": lambda path: lying_header(path, shape=[-1]),
    "offsets beyond the end": lambda path: lying_header(path, data_offsets=[0, 2**50]),
    "offsets of another tensor": lambda path: lying_header(path, data_offsets=[0, 64]),
    "an unknown type": lambda path: lying_header(path, dtype="F128"),
    "a long header": lambda path: path.write_bytes(
        struct.pack("<Q", 2**60) + path.read_bytes()[8:]
    ),
    "a deep header": lambda path: path.write_bytes(struct.pack("<Q", 20_000) + b"[" * 20_000),
    "a truncated file": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "half precision": lambda path: changed_tensor(path, torch.Tensor.half),
    "double precision": lambda path: changed_tensor(path, torch.Tensor.double),
    "whole numbers": lambda path: changed_tensor(path, torch.Tensor.int),
    "no number": lambda path: changed_tensor(path, lambda norm: norm * np.nan),
    "infinity": lambda path: changed_tensor(path, lambda norm: norm / 0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_altered_weights_are_refused_even_with_a_valid_digest(model: Path, damage: str) -> None:
    DAMAGES[damage](model / WEIGHTS)
    edit(model, lambda config: config | {"weights_sha256": sha256_file(model / WEIGHTS)})
    line = error_of(model)
    assert line.startswith(f"{model / WEIGHTS}: ")
    assert line.endswith(REMEDY)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("norm.weight", None, "expected (16,) as in config.json, got none"),
        ("norm.weight", torch.ones(8), "expected (16,) as in config.json, got (8,)"),
        ("extra", torch.ones(2), "expected no such tensor as in config.json, got (2,)"),
    ],
)
def test_a_tensor_that_differs_is_named(
    model: Path, name: str, tensor: torch.Tensor | None, problem: str
) -> None:
    tensors = load_file(model / WEIGHTS) | {name: tensor}
    save_file({key: value for key, value in tensors.items() if value is not None}, model / WEIGHTS)
    assert (
        error_of(model) == f"{model / WEIGHTS}: {name}: {problem} (tensors that differ: 1){REMEDY}"
    )


def test_a_mismatch_is_refused_with_both_digests(model: Path) -> None:
    path = model / "vocabulary.tsv"
    ours = Vocabulary.read(path)
    digest = f"{ours.digest[:12]}{REMEDY}"
    for theirs in (vocabulary_of(genes_named(31)[1:]), replace(ours, medians=ours.medians * 2)):
        theirs.write(path)
        assert (
            error_of(model)
            == f"{path}: its digest is {theirs.digest[:12]}, the model was trained with {digest}"
        )
    ours.write(path)
    before = sha256_file(model / WEIGHTS)
    content = bytearray((model / WEIGHTS).read_bytes())
    content[-3] ^= 1
    (model / WEIGHTS).write_bytes(content)
    digests = f"its SHA-256 is {sha256_file(model / WEIGHTS)[:12]}, config.json has {before[:12]}: damaged, or"
    assert error_of(model).startswith(f"{model / WEIGHTS}: {digests}")


@pytest.mark.parametrize("name", [WEIGHTS, "vocabulary.tsv"])
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    assert error_of(model) == f"{model / name}: no such file{REMEDY}"


def test_a_folder_without_config_json_is_no_model(model: Path) -> None:
    (model / "config.json").unlink()
    expected = "no model folder (no config.json); a model is results/runs/RUN/model"
    assert error_of(model) == f"{model}: {expected}"


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # the whole path may be too long for a socket
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


KINDS: dict[str, Callable[[Path], Any]] = {
    "a FIFO": os.mkfifo,
    "a socket": make_socket,
    "a folder": Path.mkdir,
    "a loop": lambda path: path.symlink_to(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", "vocabulary.tsv", WEIGHTS])
def test_special_files_are_named_without_waiting_for_them(
    model: Path, name: str, kind: str
) -> None:
    (model / name).unlink()
    KINDS[kind](model / name)
    assert error_of(model).startswith(f"{model / name}: ")
