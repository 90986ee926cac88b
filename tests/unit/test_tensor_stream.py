"""`cellmill.stream`: the batches of a run as tensors, resumed exactly; the loops of the
documentation run.
"""

import re
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_corpus import read_obs, write_corpus

import cellmill
from cellmill.config.parts.tokens import Tokens
from cellmill.config.run import Stream
from cellmill.data.stream.cell_stream import CellStream, SplitSource
from cellmill.data.stream.micro_batches import MicroBatchRule
from cellmill.data.stream.order import OrderOptions
from cellmill.errors import ConfigError, DataError, UserError

CELLS = 533
LANES = {"lanes": 8, "block_cells": 4, "window_blocks": 3}
ROOT = Path(__file__).resolve().parents[2]
LOOPS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "data.md").read_text(encoding="utf-8"), re.M | re.S
)
TORCH = next(text for text in LOOPS if "import torch\n" in text)
LIGHTNING = next(text for text in LOOPS if "import lightning\n" in text)


def cells_of(batches: list[Any]) -> list[int]:
    cells: list[int] = []
    for batch in batches:
        cells += batch["cell_ids"].tolist()
    return cells


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the shards that the documentation names."""
    made = tmp_path_factory.mktemp("tensors")
    kinds = ["B", "T", "NK"]
    obs = {
        "bulk_labels": [kinds[i % 3] for i in range(CELLS)],
        "age": [float(i % 90) for i in range(CELLS)],
    }
    write_corpus(made / "results" / "corpora" / "pbmc", CELLS, obs=obs, val_frac=0.2)
    return made


def opened(folder: Path, split: str = "train", **options: Any) -> Any:
    given = {"global_batch": 32, "stream": LANES, "tokens": {"max_tokens": 12}} | options
    return cellmill.stream(folder / "results/corpora/pbmc/shards/manifest.json", split, **given)


def epochs(stream: Any, n: int) -> list[list[dict[str, torch.Tensor]]]:
    return [list(stream) for _ in range(n)]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_batches_are_those_that_a_run_reads_an_epoch_at_a_time(folder: Path) -> None:
    stream = opened(folder, columns=["bulk_labels"], number_columns=["age"], counts=True)
    found = epochs(stream, 3)
    manifest = folder / "results/corpora/pbmc/shards/manifest.json"
    engine = CellStream(
        SplitSource(manifest, "train"),
        OrderOptions(Stream.model_validate(LANES), global_batch=32, seed=0),
        Tokens.model_validate({"max_tokens": 12}),
        MicroBatchRule(32 * 12),
    )
    assert [len(epoch) for epoch in found] == 3 * [len(stream)] == 3 * [engine.steps_per_epoch]
    for batch, [theirs] in zip(chain.from_iterable(found), engine):
        for name in ("token_ids", "values", "cu_seqlens", "cell_ids"):
            np.testing.assert_array_equal(batch[name].numpy(), getattr(theirs, name))
    engine.close()
    dtypes = {
        name: (str(tensor.dtype).removeprefix("torch."), tensor.dim())
        for name, tensor in found[0][0].items()
    }
    assert dtypes == {
        "token_ids": ("int64", 1),
        "values": ("float32", 1),
        "cu_seqlens": ("int32", 1),
        "cell_ids": ("int64", 1),
        "counts": ("int64", 1),
        "levels": ("int64", 2),
        "numbers": ("float64", 2),
    }
    assert stream.levels == {"bulk_labels": ("B", "NK", "T")}
    train = [sorted(cells_of(epoch)) for epoch in found]
    n_train = len(train[0])
    assert train == 3 * [list(range(n_train))]
    validated = opened(folder, "val")
    once, again = epochs(validated, 2)
    assert cells_of(once) == list(range(CELLS - n_train))
    for one, other in zip(once, again, strict=True):
        assert_same(one, other)
    with pytest.raises(ConfigError, match="reads its split from the start"):
        validated.load_state_dict(stream.state_dict())
    stream.close()
    validated.close()


@pytest.mark.parametrize("step", [0, 1, 7, 13, 14, 20])  # 14 steps an epoch
def test_a_tensor_stream_resumes_with_the_same_batches(step: int, folder: Path) -> None:
    whole, first = (opened(folder, columns=["bulk_labels"]) for _ in range(2))
    assert len(whole) == 14
    expected = [*chain.from_iterable(epochs(whole, 3))]
    for _ in range(step // 14):
        list(first)
    list(islice(first, step % 14))
    state = first.state_dict()
    again = opened(folder, columns=["bulk_labels"])
    again.load_state_dict(state)
    rest = chain.from_iterable(epochs(again, 3 - step // 14))
    for one, other in zip(rest, expected[step:], strict=True):
        assert_same(one, other)
    ranks = [opened(folder, columns=["bulk_labels"], rank=rank, world_size=4) for rank in range(4)]
    for stream in ranks:
        stream.load_state_dict(state)
    for parts, batch in zip(zip(*ranks, strict=True), expected[step:]):
        kinds: dict[int, int] = {}
        for part in parts:
            kinds |= zip(part["cell_ids"].tolist(), part["levels"][:, 0].tolist())
        assert kinds == dict(zip(batch["cell_ids"].tolist(), batch["levels"][:, 0].tolist()))
        assert sum(len(part["token_ids"]) for part in parts) == len(batch["token_ids"])
    for stream in (whole, first, again, *ranks):
        stream.close()


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, []),
        ({"columns": ["bulk_labels"], "number_columns": ["age"]}, ["bulk_labels", "age"]),
    ],
    ids=["fewer", "more"],
)
def test_a_state_of_other_columns_names_them(
    folder: Path, options: dict[str, Any], columns: list[str]
) -> None:
    saved = opened(folder, columns=["bulk_labels"])
    stream = opened(folder, **options)
    with pytest.raises(ConfigError) as refused:
        stream.load_state_dict(saved.state_dict())
    assert str(refused.value) == (
        f"expected obs columns ['bulk_labels'], as in the checkpoint, got {columns}; read the same columns, or "
        "start a new run"
    )
    saved.close()
    stream.close()


def test_a_loaded_state_ends_a_loop_and_starts_the_next(folder: Path) -> None:
    stream = opened(folder)
    batches = epochs(stream, 1)[0]
    state = stream.state_dict() | {"epoch": 0, "step": 2}
    seen = 0
    for _ in stream:
        seen += 1
        if seen == 3:
            stream.load_state_dict(state)
    assert seen == 3
    for one, other in zip(stream, batches[2:], strict=True):
        assert_same(one, other)
    stream.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 12}, "global_batch: expected a multiple of stream.lanes 8, got 12"),
        (
            {"global_batch": 0},
            "train: global_batch: input should be greater than or equal to 1, got 0",
        ),
        ({"seed": -1}, "train: seed: input should be greater than or equal to 0, got -1"),
        ({"world_size": 0}, "world_size: expected a divisor of stream.lanes 8, got 0"),
        ({"world_size": 3}, "world_size: expected a divisor of stream.lanes 8, got 3"),
        ({"rank": 2, "world_size": 2}, "rank: expected 0 to 1, below world_size, got 2"),
        ({"columns": "bulk_labels"}, "columns: expected a list of obs columns, got 'bulk_labels'"),
        ({"split": "all"}, "split: expected one of train, val, test, got 'all'"),
        ({"stream": {"lane": 8}}, "stream: unknown key 'lane'; did you mean 'lanes'?"),
        (
            {"tokens": {"covariates": ["age"]}},
            "tokens.covariates: expected none, got ['age']; name them in columns",
        ),
        (
            {"tokens": {"tokenizer": "binned", "binning": "quantile_corpus"}},
            "tokens.edges: expected the edges of the bins, which only a run fits, got null",
        ),
        (
            {"stream": {"lanes": 16, "train_frac": 0.01}, "world_size": 16},
            "results/corpora/pbmc/shards/manifest.json: train: 4 of 429 cells (stream.train_frac 0.01) for 16 "
            "data ranks; raise stream.train_frac, or use fewer processes",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_what_a_stream_cannot_have_is_refused_in_one_line(
    options: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(UserError) as refused:
        opened(folder, **options)
    assert str(refused.value).removeprefix(f"{folder}/") == message


def test_a_missing_value_has_code_0(tmp_path: Path) -> None:
    kinds = ["B", None, "T", "B"]
    ages = [1.5, None, None, 2.5]
    obs: dict[str, object] = {
        "kind": [kinds[i % 4] for i in range(120)],
        "group": ["a", "b"] * 60,
        "age": np.array([ages[i % 4] for i in range(120)], float),
    }
    manifest = write_corpus(tmp_path / "results/corpora/pbmc", 120, obs=obs)
    expected = read_obs(manifest, "train")
    stream = opened(tmp_path, columns=["kind", "group"], number_columns=["age"])
    assert stream.levels == {"kind": ("B", "T"), "group": ("a", "b")}
    n_missing = 0
    for batch in stream:
        rows = zip(batch["cell_ids"].tolist(), batch["levels"].tolist(), batch["numbers"].tolist())
        for cell, (kind, group), [age] in rows:
            obs_row = expected.iloc[cell]
            assert group == 1 + stream.levels["group"].index(obs_row["group"])
            assert np.isnan(age) == np.isnan(obs_row["age"])
            if kind:
                assert stream.levels["kind"][kind - 1] == obs_row["kind"]
            else:
                assert obs_row["kind"] is None or obs_row.isna()["kind"]
                n_missing += 1
    assert n_missing == 30
    stream.close()


def test_a_split_of_few_cells_is_named_with_its_cells(tmp_path: Path) -> None:
    write_corpus(tmp_path / "results/corpora/pbmc", 5)
    refusal = (
        r"json: train: 5 of 5 cells \(stream.train_frac 1\) for 8 data ranks; use fewer processes$"
    )
    with pytest.raises(DataError, match=refusal):
        opened(tmp_path, world_size=8)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_flipped_byte_in_a_shard_is_refused(split: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "results" / "corpora" / "pbmc", 200, test_frac=0.3)
    opened(tmp_path, split).close()  # hashed and recorded
    shard = next(tmp_path.rglob(f"{split}-*.h5ad"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(
        DataError, match=rf"{shard.name}: expected sha256 \w+ as in the manifest, got \w+: damaged"
    ):
        opened(tmp_path, split)


def test_the_loop_in_plain_torch_learns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(TORCH.splitlines()) <= 40
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(TORCH, names)
    losses = names["losses"]
    assert len(losses) == 3 * len(names["stream"])
    assert np.mean(losses[-5:]) < losses[0]
    later = cellmill.stream(
        names["manifest"],
        columns=["bulk_labels"],
        global_batch=64,
        seed=1,
        stream={"equal_steps": True},
    )
    later.load_state_dict(torch.load("loop.pt")["stream"])
    for one, other in zip(later, names["stream"], strict=True):
        assert_same(one, other)
    later.close()
    names["stream"].close()


# of Lightning: on workers of loaders, and on a device that is not used
@pytest.mark.filterwarnings("ignore")
def test_the_loop_in_lightning_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning", reason="the package lightning is not installed")
    assert len(LIGHTNING.splitlines()) <= 40
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(folder / "results")
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "loop"}
    exec(LIGHTNING, names)
    steps = names["trainer"].global_step
    assert steps == 2 * names["trainer"].num_training_batches
    shared = {"accelerator": "cpu", "logger": False, "max_epochs": 2}
    models = []
    kept = lightning.pytorch.callbacks.ModelCheckpoint(
        ".", "{step}", every_n_train_steps=9, save_top_k=-1
    )
    for start in ({"callbacks": [kept]}, {}):
        torch.manual_seed(0)
        models.append(
            names["Classifier"]("results/corpora/pbmc/shards/manifest.json", "bulk_labels")
        )
        path = None if start else "step=9.ckpt"  # within the second epoch
        lightning.Trainer(**shared, **start).fit(models[-1], ckpt_path=path)
    for name, tensor in names["model"].state_dict().items():
        assert all(torch.equal(model.state_dict()[name], tensor) for model in models), name
