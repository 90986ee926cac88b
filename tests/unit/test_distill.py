"""Distillation: the loss, vectors that stage teach finds by the names of cells, and files that
cannot be used.
"""

import json
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

from cellmill.cli import main
from cellmill.config.run import Stream
from cellmill.data.shards.index import open_vectors
from cellmill.data.shards.manifest import TRAINING_SPLITS, Manifest
from cellmill.data.stream.batch_maker import BatchFields
from cellmill.data.stream.cell_stream import CellStream, SplitSource
from cellmill.data.stream.micro_batches import MicroBatchRule
from cellmill.data.stream.order import OrderOptions
from cellmill.errors import DataError, UserError
from cellmill.evaluate.inference.files import write_embedding
from cellmill.models.batch import to_tensors
from cellmill.runs.identity import changed_keys, identity
from cellmill.stages.train import supervised_by
from cellmill.stages.training_inputs import fit_options
from tests.checks import refused
from tests.models import initialized, prepare, random_cells, spec, train_options
from tests.unit.small_corpus import read_obs, write_corpus
from tests.unit.test_labels import GENES, TOKENS
from tests.unit.test_supervised_contrastive import card

ABOUT = {"width": 3, "sha256": "", "shards": "", "model": "", "supervised_by": []}
MODEL = {
    "family": "profile",
    "hidden": 8,
    "layers": 1,
    "objective": "distill",
    "teacher": "big",
    "vectors": ABOUT,
}
LENGTHS = (3, 5, 0, 4)
NAMES = [f"cell{i}" for i in range(60)]


def test_the_loss_is_the_mean_squared_error_of_a_linear_layer() -> None:
    model = initialized(spec(GENES, TOKENS, **MODEL))
    given = np.random.default_rng(2).normal(size=(4, 3)).astype(np.float32)
    given[1, 2] = np.nan
    batch = to_tensors(random_cells(LENGTHS, TOKENS, GENES, teacher=given))
    prepared = prepare(model, batch)
    assert prepared.n_targets == 2, "the second cell has a number that is none, the third no gene"
    vectors = model.embed(batch)
    layer = model.teacher_head
    expected = sum(
        ((layer.weight @ vectors[cell] + layer.bias - torch.from_numpy(given[cell])) ** 2).sum() / 3
        for cell in (0, 3)
    )
    torch.testing.assert_close(model(prepared), expected)
    assert prepare(model, to_tensors(random_cells(LENGTHS, TOKENS, GENES))).n_targets == 0


@pytest.fixture
def shards(tmp_path: Path) -> Manifest:
    """Of 60 cells of dataset `one`, called cell0, cell1, …"""
    return write_corpus(tmp_path, 60, val_frac=0.2, test_frac=0.2)


def cells_of(shards: Manifest, split: str) -> list[int]:
    """Number in the name of each cell of a split, in the order of the shards."""
    names = read_obs(shards, split).index
    return [int(name.removeprefix("one:cell")) for name in names]


def write_teacher(
    folder: Path, vectors: Any, names: list[str] = NAMES, key: str | None = "X_emb", **about: str
) -> Path:
    """The file of a teacher that knows the cells by name; without a key its vectors are X, with
    `about` of cellmill.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "one.h5ad"
    obs = pd.DataFrame(index=names)
    path.unlink(missing_ok=True)
    if about:
        write_embedding(path, obs, vectors, about)
        return path
    stored = {"X": vectors} if key is None else {"obsm": {} if vectors is None else {key: vectors}}
    ad.AnnData(obs=obs, **stored).write_h5ad(path)
    return path


def teach(shards: Manifest, out: Path, *files: Path) -> int:
    return main(
        [
            "teach",
            "--manifest",
            str(shards.path),
            "--embeddings",
            *map(str, files),
            "--out",
            str(out),
        ]
    )


@pytest.mark.parametrize(
    ("key", "about"),
    [
        ("X_emb", {}),
        (None, {}),
        ("X_cellmill", {"model_digest": "abc", "supervised_by": "kind, donor"}),
    ],
)
def test_vectors_are_standardised_over_training_cells(
    shards: Manifest,
    tmp_path: Path,
    key: str | None,
    about: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = np.random.default_rng(0).normal(5, 3, (60, 4)).astype(np.float32)
    given[:, 3] = 2  # a direction in which the teacher's cells are equal
    train, val = (cells_of(shards, split) for split in TRAINING_SPLITS)
    given[train[2], 1], known = np.inf, [cell for cell in range(60) if cell != train[5]]
    order = np.random.default_rng(1).permutation(known)
    path = write_teacher(
        tmp_path / "teacher", given[order], [NAMES[cell] for cell in order], key, **about
    )
    assert teach(shards, tmp_path / "out", path) == 0
    n = len(train)
    assert f"{n - 2} of {n} training cells have a vector of 4 numbers" in capsys.readouterr().out
    described, found = open_vectors(tmp_path / "out", shards)
    expected = given.astype(np.float64)
    expected[[train[2], train[5]]] = np.nan
    mean = np.nanmean(expected[train], 0)
    std = np.nanstd(expected[train], 0)
    expected = (expected - mean) / np.where(std > 0, std, 1)
    assert set(found) == set(TRAINING_SPLITS), "a student sees no vector of a test cell"
    for split, cells in (("train", train), ("val", val)):
        np.testing.assert_allclose(found[split], expected[cells], rtol=1e-4, atol=1e-5)
    labels = ["donor", "kind"] if about else []
    assert (described.width, described.model, described.supervised_by) == (
        4,
        "abc" if about else "",
        labels,
    )


def test_a_batch_has_the_vectors_of_its_cells(shards: Manifest, tmp_path: Path) -> None:
    given = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    assert teach(shards, tmp_path / "out", write_teacher(tmp_path / "teacher", given)) == 0
    vectors = open_vectors(tmp_path / "out", shards)[1]["train"]
    stream = CellStream(
        SplitSource(shards.path, "train"),
        OrderOptions(Stream(lanes=4), global_batch=8, seed=0),
        TOKENS,
        MicroBatchRule(64),
        fields=BatchFields(teacher_folder=str(tmp_path / "out")),
    )
    batches = [*chain.from_iterable(islice(stream, 4))]
    stream.close()
    cells = np.concatenate([batch.cell_ids for batch in batches])
    assert not np.array_equal(cells, np.sort(cells))
    np.testing.assert_array_equal(
        np.concatenate([batch.teacher for batch in batches]), vectors[cells]
    )


def test_a_split_without_vectors_is_refused(shards: Manifest, tmp_path: Path) -> None:
    given = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    assert teach(shards, tmp_path / "out", write_teacher(tmp_path / "teacher", given)) == 0
    fields = BatchFields(teacher_folder=str(tmp_path / "out"))
    with pytest.raises(DataError, match=r"out: no vectors of split test; read train or val$"):
        fields.open_cell_arrays(shards, "test")


def options(**teacher: Any) -> Any:
    parts = {"cell_decoding": {}, "distill": {"teacher": "./given"} | teacher}
    return train_options(model={"family": "profile"}, objective={"name": "sum", "parts": parts})


def test_the_run_records_the_digest_of_its_vectors(shards: Manifest, tmp_path: Path) -> None:
    found = []
    for seed in range(2):
        vectors = np.random.default_rng(seed).normal(size=(60, 2)).astype(np.float32)
        about = {"model_digest": "abcdef0123456789" * 4, "supervised_by": "kind"}
        assert teach(shards, tmp_path / "out", write_teacher(tmp_path, vectors, **about)) == 0
        found.append(fit_options(options(), tmp_path, shards, tmp_path / "out"))
    first, second = found
    stored = {"options": first.model_dump(mode="json"), "identity": identity(first, None)}
    assert changed_keys(stored, identity(first, None), "test") == {}
    [(key, change)] = changed_keys(stored, identity(second, None), "test").items()
    assert key == "objective.parts"
    digests = [part.objective.parts["distill"].vectors.sha256[:12] for part in found]
    assert all(f"'sha256': '{digest}'" in change for digest in digests), change
    assert supervised_by(first.objective, None) == ["kind"]
    said = "| distilled from | ./given, weights `abcdef0123456789` |\n"
    assert said in card("profile", first.objective.model_dump(mode="json"), ["kind"])
    with refused(
        "objective distill requires its teacher's vectors; pass --teacher, as the workflow does"
    ):
        fit_options(options(), tmp_path, shards)


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "cut": ("vectors.npy", lambda whole: whole[:-1], "damaged: "),
    "changed": ("vectors.npy", lambda whole: whole[:-1] + b"?", "expected sha256 DIGEST, got"),
    "gone": ("vectors.npy", None, "no such file"),
    "no description": ("vectors.json", None, "no such file"),
    "another description": ("vectors.json", lambda whole: b"{}", "width: is missing"),
    "other shards": (
        "vectors.json",
        lambda whole: json.dumps(json.loads(whole) | {"shards": "0123456789abcdef"}).encode(),
        "expected vectors of shards SHARDS, got of 0123456789ab; run t",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_vectors_are_refused_in_one_line(
    shards: Manifest, tmp_path: Path, case: str
) -> None:
    out, (name, change, message) = tmp_path / "out", DAMAGE[case]
    assert (
        teach(shards, out, write_teacher(tmp_path / "teacher", np.eye(60, 2, dtype=np.float32)))
        == 0
    )
    message = message.replace("SHARDS", shards.fingerprint[:12])
    message = message.replace("DIGEST", open_vectors(out, shards)[0].sha256[:12])
    path = out / name
    path.unlink() if change is None else path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError) as raised:
        open_vectors(out, shards, verify=True)
    assert str(raised.value).startswith(f"{path}: {message}")


NO_VECTOR = "MANIFEST: no training cell has a vector in FILE; expected cells of these names"
NO_ARRAY = "FILE: expected a dense array of numbers in obsm['X_cellmill'] or obsm['X_emb'] or X"
UNUSABLE: dict[str, tuple[Any, list[str], str]] = {
    "of other cells": (np.eye(60, 2), [f"other{i}" for i in range(60)], NO_VECTOR),
    "all missing": (np.full((60, 2), np.nan), NAMES, NO_VECTOR),
    "all equal": (
        np.ones((60, 2)),
        NAMES,
        "FILE: the vectors of all training cells are equal; embed them by another",
    ),
    "a name twice": (
        np.eye(60, 2),
        [*NAMES[:59], NAMES[0]],
        "FILE: obs names are not unique: 'cell0' occurs 2 times",
    ),
    "without an array": (None, NAMES, NO_ARRAY),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_teacher_is_refused_in_one_line(
    shards: Manifest, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors, names, message = UNUSABLE[case]
    path = write_teacher(tmp_path, vectors, names)
    assert teach(shards, tmp_path / "out", path) == 2
    message = message.replace("MANIFEST", str(shards.path)).replace("FILE", str(path))
    assert capsys.readouterr().err.startswith(f"cellmill teach: {message}")
    assert not (tmp_path / "out" / "vectors.json").exists()


def test_files_of_two_models_are_refused(
    shards: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_teacher(tmp_path / "a", np.eye(60, 2), model_digest="a")
    for model, width in (("b", 2), ("a", 3)):
        path = write_teacher(tmp_path / "other", np.eye(60, width), model_digest=model)
        assert teach(shards, tmp_path / "out", first, path) == 2
        line = f"{path}: its vectors are of another model than {first}'s; embed both by one model"
        assert capsys.readouterr().err == f"cellmill teach: {line}\n"
