"""Manifests and shards with random damage are refused in one line, or read with the right numbers.

`CELLMILL_FUZZ=N` makes N mutations instead of MUTATIONS of each kind and seed.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from limits import limited
from small_corpus import stream_of, write_corpus

from cellmill.config.checks import check_rows
from cellmill.config.parts.tokens import ContinuousTokens
from cellmill.data.inputs.formats import open_counts
from cellmill.data.shards.manifest import (
    Manifest,
    record_verified,
    stamp_files,
    verify,
    verify_changed,
)
from cellmill.data.shards.reader import name_cells, open_shards
from cellmill.errors import DataError, UserError
from cellmill.evaluate.seen.copies import find_equal_cells
from cellmill.evaluate.seen.held_out_check import HeldOutCheck
from cellmill.evaluate.training_shards import read_counts
from cellmill.files import digest, sha256_file

MUTATIONS = int(os.environ.get("CELLMILL_FUZZ", "50"))
DEEP = "deep nesting"  # replaced in the text, as json.dumps cannot write it
VALUES = (
    *(
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**40,
        2**63,
        10**400,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\0",
        "\ud800",
    ),
    *(
        "../train-00000.h5ad",
        "/dev/zero",
        "..",
        "train-00001.h5ad",
        "a/b",
        "uint8",
        "float32",
        [],
        {},
        [[]],
        DEEP,
    ),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the shards of 260 cells."""
    folder = tmp_path_factory.mktemp("corpus")
    donors = pd.Categorical([f"d{i % 5}" for i in range(260)])
    manifest = write_corpus(
        folder, 260, obs={"donor": donors}, val_frac=0.2, test_frac=0.2, cells_per_shard=64
    )
    shutil.copy(folder / "cells" / "one.h5ad", manifest.path.with_name("cells.h5ad"))
    return manifest.path.parent


def read_all(folder: Path) -> str:
    """Digest of all that a training and an evaluation read."""
    manifest = Manifest.read(folder / "manifest.json")
    # as a training begins
    check_rows(ContinuousTokens(), manifest, str(manifest.path))
    open_shards(manifest, "train")
    verify(manifest)
    hashed = hashlib.sha256()
    for split in ("train", "val"):
        columns = {"donor": "tokens.covariates"}
        order = {"lanes": 4, "block_cells": 16, "window_blocks": 2}
        stream = stream_of(
            manifest, options=order, split=split, is_training=False, level_columns=columns
        )
        for batches in stream:
            for batch in batches:
                assert batch.levels is not None
                for part in (
                    batch.token_ids,
                    batch.values,
                    batch.cu_seqlens,
                    batch.cell_ids,
                    batch.levels,
                ):
                    hashed.update(np.ascontiguousarray(part).tobytes())
        stream.close()
    check = HeldOutCheck([manifest], ["one"])
    hashed.update(json.dumps(sorted(check.names["one"])).encode())
    hashed.update(read_counts(manifest, 1000).toarray().tobytes())
    with open_counts(folder / "cells.h5ad") as reader:
        hashed.update(
            find_equal_cells(reader, check.corpora, np.ones(reader.n_obs, bool)).tobytes()
        )
    return hashed.hexdigest()


@pytest.fixture(scope="module")
def right(corpus: Path) -> str:
    return read_all(corpus)


def test_cells_beyond_those_needed_are_not_read(corpus: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(corpus, tmp_path / "copy")
    manifest = Manifest.read(folder / "manifest.json")
    first, second, *_ = manifest.splits["train"].shards
    expected = read_counts(manifest, 1000)[: first.n_obs]
    manifest.shard_path(second).unlink()
    assert (read_counts(manifest, first.n_obs) != expected).nnz == 0
    with pytest.raises(DataError, match=second.name):
        read_counts(manifest, first.n_obs + 1)


def test_a_cell_has_its_row_if_its_name_cannot_be_read(corpus: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(corpus, tmp_path / "copy")
    manifest = Manifest.read(folder / "manifest.json")
    shards = open_shards(manifest, "train")
    path = shards[0].path
    assert name_cells(shards, np.array([3]))[0].startswith("one:")
    path.unlink()
    assert name_cells(shards, np.array([3])) == [f"unnamed cell ({path.name} row 3)"]


def check(folder: Path, right: str | None, what: str) -> bool:
    """True if the folder is refused, in one line; else it is read as `right`, or without `right` in
    any way.
    """
    with limited():
        try:
            got = read_all(folder)
        except UserError as error:
            line = str(error)
            assert "\n" not in line, what
            assert 0 < len(line) < 1000, what
            assert str(folder) in line, what
            return True
        except Exception as error:
            raise AssertionError(what) from error
    assert right in (None, got), what
    return False


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in a tree."""
    keys: Any = []
    if isinstance(tree, dict):
        keys = list(tree)
    elif isinstance(tree, list):
        keys = range(len(tree))
    found = []
    for key in keys:
        found += [(tree, key), *places(tree[key])]
    return found


def sign(tree: dict[str, Any]) -> None:
    """Give a manifest the fingerprint and checksum of its entries, where they have one."""
    try:
        splits: dict[str, list[Any]] = {}
        for name, split in tree["splits"].items():
            splits[name] = []
            for shard in split["shards"]:
                splits[name].append([shard["n_obs"], shard["nnz"], shard["content"]])
        fields = {"format": 1} | {key: tree[key] for key in ("vocabulary", "seed", "split")}
        tree["fingerprint"] = digest(fields | {"splits": splits})
        tree["checksum"] = digest(
            {name: value for name, value in tree.items() if name != "checksum"}
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return


def mutated_manifest(text: str, rng: random.Random) -> tuple[str, str]:
    """A manifest with one change, and what was changed."""
    kind = rng.choice(["value", "value", "value", "value", "lost", "twice", "cut", "byte"])
    if kind == "cut":
        at = rng.randrange(len(text))
        return text[:at], f"cut at {at}"
    if kind == "byte":
        at = rng.randrange(len(text))
        new = chr(rng.randrange(1, 256))
        return text[:at] + new + text[at + 1 :], f"character {at} is {new!r}"
    tree = json.loads(text)
    container, key = rng.choice(places(tree))
    signed = rng.random() < 0.5
    value = rng.choice(VALUES)
    if kind == "lost":
        del container[key]
    else:
        container[key] = value
    if signed:
        sign(tree)
    changed = json.dumps(tree)
    if kind == "twice" and isinstance(container, dict):
        changed = text.replace(
            f"{json.dumps(key)}:", f"{json.dumps(key)}: {json.dumps(value)}, {json.dumps(key)}:", 1
        )
    return changed.replace(
        json.dumps(DEEP), "[" * 10_000 + "]" * 10_000
    ), f"{kind} {key!r}: {value!r}, {signed=}"


@pytest.fixture
def folder(corpus: Path, tmp_path: Path) -> Path:
    """A copy of the shards, to damage."""
    return Path(shutil.copytree(corpus, tmp_path / "shards"))


@pytest.fixture(params=["fixed", pytest.param("random", marks=pytest.mark.full)])
def seed(request: pytest.FixtureRequest) -> int:
    return 1 if request.param == "fixed" else random.SystemRandom().randrange(10**9)


def test_a_mutated_manifest_is_refused_or_read_right(
    corpus: Path, right: str, folder: Path, seed: int
) -> None:
    rng = random.Random(seed)
    text = (corpus / "manifest.json").read_text()
    for number in range(MUTATIONS):
        changed, what = mutated_manifest(text, rng)
        (folder / "manifest.json").write_text(changed)
        # a vocabulary of other genes, or another seed, with the fingerprint to match, is another
        # corpus
        check(
            folder,
            None if "signed=True" in what else right,
            f"seed {seed}, mutation {number}: {what}",
        )


def set_values(path: Path, name: str, at: Any, value: int) -> None:
    """Change values of an array of an HDF5 file."""
    with h5py.File(path, "a") as file:
        file[name][at] = value


def replace(path: Path, name: str, new: dict[str, Any] | None = None) -> None:
    """Put another array in the place of a part of an HDF5 file, or nothing."""
    with h5py.File(path, "a") as file:
        del file[name]
        if new:
            file.create_dataset(name, **new)


def set_numbers(path: Path, at: Any, value: Any) -> None:
    """Change numbers of an array of the index."""
    array = np.load(path)
    array[at] = value
    np.save(path, array)


def claim(path: Path, shape: tuple[int, ...], dtype: str) -> None:
    """Give an array of the index the header of another."""
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": dtype, "fortran_order": False, "shape": shape}
        )
        file.write(bytes(4096))


def reverse(path: Path) -> None:
    np.save(path, np.ascontiguousarray(np.load(path)[:, ::-1]))


def instead(path: Path, make: Callable[[Path], Any] | None = None) -> None:
    """Put something else in the place of a file, or nothing."""
    path.unlink()
    if make is not None:
        make(path)


SHARD, OFFSETS, BORDERS, LEVELS, HASHES = (
    "train-00000.h5ad",
    *(f"train-{k}.npy" for k in ("offsets", "borders", "levels", "hashes")),
)
CHANGES: list[tuple[str, str, Callable[..., Any], *tuple[Any, ...]]] = [
    # what is read of a shard: nonzeros by offset, names of cells and genes by HDF5
    ("bytes above", SHARD, set_values, "uns/packed/bytes", slice(None), 255),
    ("bytes of zeros", SHARD, set_values, "uns/packed/bytes", slice(None), 0),
    ("bytes change", SHARD, set_values, "uns/packed/bytes", slice(7, 4000, 9), 3),
    ("no bytes", SHARD, replace, "uns/packed/bytes"),
    ("short bytes", SHARD, replace, "uns/packed/bytes", {"data": np.zeros(9, np.uint8)}),
    ("a border falls", BORDERS, set_numbers, 5, 0),
    ("borders end beyond their shard", BORDERS, set_numbers, 128, 2**32 - 1),
    ("borders do not begin at 0", BORDERS, set_numbers, 0, 1),
    ("a border in another cell", BORDERS, set_numbers, 7, 41),
    ("borders of another size", BORDERS, claim, (3,), "<u4"),
    ("no names of cells", SHARD, replace, "obs/_index"),
    ("short names of cells", SHARD, replace, "obs/_index", {"data": ["a"]}),
    ("obs is an array", SHARD, replace, "obs", {"data": [1]}),
    ("no genes", SHARD, replace, "var"),
    ("genes are numbers", SHARD, replace, "var/gene_id", {"data": np.zeros(40)}),
    ("an offset falls", OFFSETS, set_numbers, 5, 0),
    ("offsets end beyond their shard", OFFSETS, set_numbers, 64, 2**31 - 1),
    ("offsets do not begin at 0", OFFSETS, set_numbers, 0, 1),
    ("a huge array", OFFSETS, claim, (2**45,), "<i4"),
    ("an array of another size", OFFSETS, claim, (3,), "<i4"),
    ("an array of floats", OFFSETS, claim, (162,), "<f4"),
    ("an array of objects", OFFSETS, claim, (162,), "|O"),
    ("an impossible dtype", OFFSETS, claim, (162,), "<q9"),
    ("a level that is none", LEVELS, set_numbers, (1, 3), 0),
    ("a level above", LEVELS, set_numbers, (1, 3), 6),
    ("hashes of zeros", HASHES, set_numbers, ..., 0),
    ("hashes that fall", HASHES, reverse),
    ("an archive", HASHES, Path.write_bytes, b"PK\3\4" + bytes(100)),
]
for _name in (SHARD, HASHES):
    CHANGES += [
        (f"a folder for {_name}", _name, instead, Path.mkdir),
        (f"a FIFO for {_name}", _name, instead, os.mkfifo),
        (f"a loop for {_name}", _name, instead, lambda path: path.symlink_to(path)),
        (f"empty for {_name}", _name, instead, Path.touch),
        (f"gone for {_name}", _name, instead),
    ]


def sign_file(folder: Path, name: str) -> None:
    """Give the manifest the SHA-256 of a changed file, as if it had been written like this."""
    tree = json.loads((folder / "manifest.json").read_text())
    for split in tree["splits"].values():
        for file in (*split["shards"], *split["index"].values()):
            if file["name"] == name:
                file["sha256"] = sha256_file(folder / name)
    sign(tree)
    (folder / "manifest.json").write_text(json.dumps(tree))


def test_other_contents_are_refused_even_with_a_valid_digest(corpus: Path, tmp_path: Path) -> None:
    for what, name, change, *arguments in CHANGES:
        folder = Path(shutil.copytree(corpus, tmp_path / what))
        change(folder / name, *arguments)
        if (folder / name).is_file():
            sign_file(folder, name)
        refused = check(folder, None, what)
        # of hashes any number is possible: with others, cells are found or missed as copies
        assert refused or name == SHARD or what in ("hashes of zeros", "hashes that fall"), what
        shutil.rmtree(folder)


def test_a_shard_with_random_bytes_is_refused(right: str, folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    shard = folder / "train-00001.h5ad"
    content = shard.read_bytes()
    for number in range(MUTATIONS):
        changed = bytearray(content)
        places = [
            rng.randrange(rng.choice([100, 3000, len(content)]))
            for _ in range(rng.choice([1, 1, 4, 30]))
        ]
        for at in places:
            changed[at] = rng.choice([0, 255, rng.randrange(256)])
        shard.write_bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.1 else changed)
        what = f"seed {seed}, mutation {number}: bytes {places}"
        check(folder, right, what)


def test_evaluation_finds_one_byte_changed_after_training(folder: Path) -> None:
    manifest = Manifest.read(folder / "manifest.json")
    assert len(HeldOutCheck([manifest], ["one"]).names["one"]) > 100
    with h5py.File(folder / "train-00000.h5ad", "a") as file:
        file["obs/_index"][0] = "one:cell99999"
    with pytest.raises(
        DataError, match=r"train-00000\.h5ad: expected sha256 \w+ as in the manifest, got"
    ):
        HeldOutCheck([manifest], ["one"])


def test_a_shard_replaced_while_all_are_hashed_is_hashed_again(
    corpus: Path, tmp_path: Path
) -> None:
    # without the record of a training, whose stamps are also those of the copies
    shutil.copytree(corpus, tmp_path / "copy", ignore=shutil.ignore_patterns("verified.json"))
    manifest = Manifest.read(tmp_path / "copy" / "manifest.json")
    stamps = stamp_files(manifest)
    assert verify_changed(manifest, stamps) == len(stamps)
    record_verified(manifest, stamps)
    assert verify_changed(manifest, stamp_files(manifest)) == 0
    shard = manifest.shard_path(manifest.splits["train"].shards[0])
    shard.write_bytes(b"other")
    record_verified(manifest, stamps)
    with pytest.raises(DataError, match=f"{shard.name}: expected sha256 "):
        verify_changed(manifest, stamp_files(manifest))
