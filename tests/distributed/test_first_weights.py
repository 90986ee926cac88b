"""Each rank reads of `init_from` what it keeps, and starts from the values that a whole model has,
in every layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, distribute_tensor

from cellmill.config.options import TrainOptions
from cellmill.config.parts.family import WEIGHTS_FORMAT
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.files import write_json
from cellmill.models import export as weights_file
from cellmill.models import initial
from cellmill.models.build import ModelSpec, build
from cellmill.models.export import initial_tensors, write_tensors
from cellmill.parallel.materialize import named_tensors
from cellmill.parallel.mesh import build_mesh
from cellmill.train.worker import build_model
from tests.checks import quick
from tests.distributed.conformance import LAYOUTS, PIPELINES, PP, TP
from tests.distributed.conftest import options
from tests.distributed.pool import Pool


def vocabulary_of(numbers: range) -> Vocabulary:
    ids = [f"ENSG{number:011d}" for number in numbers]
    return Vocabulary(ids, ids, np.ones(len(ids), np.int64), np.ones(len(ids), np.float32))


OURS = vocabulary_of(range(61))
THEIRS = vocabulary_of(range(70, 9, -1))


def export(options: dict[str, Any], folder: Path) -> None:
    """Write a model over THEIRS to `folder`, whose head for genes is left out."""
    parsed = TrainOptions.model_validate(options)
    network = build(ModelSpec.of(parsed, THEIRS.n_genes))
    tensors = dict(initial_tensors(network, 5, None, THEIRS))
    write_tensors(
        folder / "model.safetensors",
        {name: t for name, t in tensors.items() if name != "gene_bias"},
    )
    THEIRS.write(folder / "vocabulary.tsv")
    sections = parsed.model_dump(mode="json", include={"model", "tokens", "objective"})
    texts = {
        "family": parsed.model.family,
        "vocabulary_digest": THEIRS.digest,
        "weights_sha256": "",
    }
    write_json(folder / "config.json", {"format": WEIGHTS_FORMAT, **texts, **sections})


class _Counting:
    """A .safetensors file, or a tensor in it, that adds the bytes of each read to `reads`."""

    def __init__(self, real: Any, reads: list[int]) -> None:
        self.real = real
        self.reads = reads

    def get_slice(self, name: str) -> _Counting:
        return _Counting(self.real.get_slice(name), self.reads)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.real[index]
        self.reads.append(tensor.nbytes)
        return tensor

    def __getattr__(self, name: str) -> Any:
        if name not in ("keys", "get_shape", "get_dtype"):
            raise AssertionError(f"{name} was not expected to be read")
        return getattr(self.real, name)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of each read of a .safetensors file; random values are made in small pieces."""
    reads: list[int] = []
    piece = initial.PIECE
    weights_file.safe_open = lambda path, framework: _Counting(safe_open(path, framework), reads)
    initial.PIECE = 64
    try:
        yield reads
    finally:
        weights_file.safe_open = safe_open
        initial.PIECE = piece


def first_weights(options: dict[str, Any], folder: str | None) -> dict[str, Any]:
    """Names of tensors that differ from those of a whole model, and bytes: read, kept by this rank,
    of all.
    """
    parsed = TrainOptions.model_validate(options)
    mesh = build_mesh(parsed.parallel, int(os.environ["LOCAL_WORLD_SIZE"]), "cpu")
    source = None if folder is None else Path(folder)
    network = build(ModelSpec.of(parsed, OURS.n_genes))
    means = {}
    if parsed.finetune.new_genes == "mean":
        tensors = load_file(Path(str(folder)) / "model.safetensors")
        means = {
            name: tensors[name][2:].double().mean(0).float()
            for name in network.gene_rows & tensors.keys()
        }
    whole = dict(initial_tensors(network, parsed.train.seed, source, OURS, new_genes=means))
    if means:  # the first of our genes is none of theirs
        assert torch.equal(whole["gene_embedding.weight"][2], means["gene_embedding.weight"])
    with counted() as reads:
        model = build_model(parsed, OURS, folder, mesh, {})
    differing = []
    kept = 0
    for name, tensor in named_tensors(model):
        own = tensor.detach()
        expected = whole[name]
        if isinstance(tensor, DTensor):
            own = tensor.to_local().detach()
            placed = distribute_tensor(
                expected, tensor.device_mesh, tensor.placements, src_data_rank=None
            )
            expected = placed.to_local()
        kept += own.nbytes
        differing += [] if torch.equal(own, expected) else [name]
    of_model = sum(tensor.nbytes for tensor in whole.values())
    return {"differing": differing, "read": sum(reads), "kept": kept, "all": of_model}


MEAN = {"new_genes": "mean"}
CASES: list[tuple[str, dict[str, str]]] = [
    (name, {}) for name in ("FULL_SHARD", "HYBRID_SHARD", "tp 4", TP, PP)
]
CASES += [(name, MEAN) for name in ("FULL_SHARD", TP, PP)]


@pytest.mark.parametrize(
    ("layout", "finetune"), quick(CASES, [(TP, {}), (PP, {}), ("FULL_SHARD", MEAN)])
)
def test_a_rank_reads_only_its_part_of_the_first_weights(
    pool: Pool, tmp_path: Path, layout: str, finetune: dict[str, str]
) -> None:
    given = options((LAYOUTS | PIPELINES)[layout], model={"objective": "masked_gene"}) | {
        "finetune": finetune
    }
    export(given, tmp_path)
    found = pool.run("test_first_weights.first_weights", options=given, folder=str(tmp_path))
    assert [rank["differing"] for rank in found] == [[]] * len(found)
    if finetune:  # new genes begin as the mean row, for which rank 0 alone reads the others
        assert all(rank["read"] <= rank["kept"] for rank in found[1:])
        return
    assert all(0.6 * rank["kept"] < rank["read"] <= rank["kept"] for rank in found)
    if layout == "FULL_SHARD":
        assert sum(rank["read"] for rank in found) <= found[0]["all"], (
            "the ranks together read the model once"
        )


FROZEN = "never trains the random vectors of the genes that"


@pytest.mark.parametrize(
    ("finetune", "is_warned"),
    [
        ({"method": "lora"}, True),
        ({"method": "head_only"}, True),
        ({"method": "lora", "new_genes": "mean"}, False),
        ({"method": "full"}, False),
    ],
)
def test_random_rows_that_never_train_are_named(
    alone: None,
    tmp_path: Path,
    finetune: dict[str, str],
    is_warned: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = options({}, model={"objective": "masked_gene"}) | {"finetune": finetune}
    export(given, tmp_path)
    mesh = build_mesh(TrainOptions.model_validate(given).parallel, 1, "cpu")
    build_model(TrainOptions.model_validate(given), OURS, str(tmp_path), mesh, {})
    printed = capsys.readouterr().out
    assert (FROZEN in printed) == is_warned
    if is_warned:  # the first 10 of 61 genes
        assert f"{finetune['method']} {FROZEN} {tmp_path} lacks, 16.4% of those" in printed
