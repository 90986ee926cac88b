"""An exported model: a folder that stands alone, and first weights that may come from one.

    model.safetensors   full tensors
    vocabulary.tsv      which gene each token is
    config.json         family, architecture, tokenizer and digests; written last

Nothing here unpickles anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cellmill.config.family import WEIGHTS_FORMAT, FamilyConfig
from cellmill.config.load import check_options, upgrade_options
from cellmill.config.objective import ObjectiveConfig
from cellmill.config.tokens import SPECIAL, Tokens
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError
from cellmill.files import atomic_path, read_json, sha256_file
from cellmill.models.build import ModelSpec, build
from cellmill.models.family import Model
from cellmill.parallel.materialize import fill, named_tensors


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write full, contiguous tensors to a .safetensors file, atomically. Raises DataError when that fails."""
    with atomic_path(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise DataError(f"{path}: could not be written: {error}") from None


def load_model(folder: Path) -> tuple[Model, Vocabulary, dict[str, Any]]:
    """The exported model in `folder`, on the CPU in eval mode, its vocabulary, and its config.json.

    Raises DataError when a file is missing, damaged, or not of the same model as the others.
    """
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or config.get("format") != WEIGHTS_FORMAT:
        raise DataError(
            f"{folder / 'config.json'}: not a model of format {WEIGHTS_FORMAT}; export it again (consolidate)"
        )
    if missing := [
        key for key in ("family", "model", "tokens", "vocabulary_digest", "weights_sha256") if key not in config
    ]:
        raise DataError(f"{folder / 'config.json'}: {missing[0]} is missing; export the model again (consolidate)")
    config = upgrade_options(config)
    if wrong := [key for key in ("family", "vocabulary_digest", "weights_sha256") if not isinstance(config[key], str)]:
        raise DataError(f"{folder / 'config.json'}: {wrong[0]} is not a text; export the model again (consolidate)")
    vocabulary = Vocabulary.read(folder / "vocabulary.tsv")
    if vocabulary.digest != config["vocabulary_digest"]:
        raise DataError(
            f"{folder / 'vocabulary.tsv'}: its digest is {vocabulary.digest[:12]}, the model was trained with "
            f"{config['vocabulary_digest'][:12]}; export the model again (consolidate)"
        )
    model = build(spec_of(config, vocabulary.n_genes)).to_empty(device="cpu")
    tensors = dict(_read_tensors(folder / "model.safetensors"))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
        name = wrong[0]
        raise DataError(
            f"{folder / 'model.safetensors'}: {name} is {found.get(name, 'missing')}, config.json says "
            f"{expected.get(name, 'there is none')} ({len(wrong)} such tensors); export the model again (consolidate)"
        )
    if (digest := sha256_file(folder / "model.safetensors")) != config["weights_sha256"]:
        raise DataError(
            f"{folder / 'model.safetensors'}: its SHA-256 is {digest[:12]}, config.json has "
            f"{config['weights_sha256'][:12]}: damaged, or another model's; export the model again (consolidate)"
        )
    model.load_state_dict(tensors, assign=True)
    rest = {name for name, _ in named_tensors(model)} - expected.keys()  # non-persistent buffers
    fill(model, initial_tensors(model, config.get("seed", 0), None, vocabulary, only=rest))
    return model.eval(), vocabulary, config


def spec_of(config: dict[str, Any], n_genes: int) -> ModelSpec:
    """Return the specification of the model that a config.json describes, also one of an earlier version."""
    stored = upgrade_options({key: config[key] for key in ("model", "objective", "tokens") if key in config})
    sections = (("model", FamilyConfig), ("objective", ObjectiveConfig), ("tokens", Tokens))
    found = {name: check_options(kind, stored[name], f"config.json: {name}") for name, kind in sections}
    return ModelSpec(**found, n_genes=n_genes)


def initial_tensors(
    model: Model, seed: int, init_from: Path | None, vocabulary: Vocabulary, only: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Initial value of every parameter and buffer, as (name, full CPU tensor), one at a time; the same on every rank.

    A tensor's generator is seeded with the CRC-32 of seed and name, so the values depend on no order and no layout.
    `only` yields the tensors of these names alone.
    With `init_from`, an exported model, its tensors take their place; in those with a row for each gene, rows are
    found by Ensembl id, and genes it did not know keep their fresh values. Tensors it lacks (another objective's
    head) stay fresh. Raises ConfigError when a shared tensor has another shape.
    """
    source = _Source(init_from) if init_from is not None else None
    for name, empty in named_tensors(model):
        if only is not None and name not in only:
            continue
        tensor = torch.empty(empty.shape, dtype=empty.dtype)
        # one 32-bit number from both: torch's CPU generator does not read the upper half of a seed
        generator = torch.Generator().manual_seed(crc32(f"{seed}:{name}".encode()))
        model.initialize(name, tensor, generator)
        if source is not None:
            source.fill(name, tensor, vocabulary if name in model.gene_rows else None)
        yield name, tensor


class _Source:
    """Tensors of an exported model, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vocabulary = Vocabulary.read(folder / "vocabulary.tsv")
        self.tensors = dict(_read_tensors(folder / "model.safetensors"))

    def fill(self, name: str, tensor: torch.Tensor, vocabulary: Vocabulary | None) -> None:
        """Overwrites `tensor` with the source's; by gene when a vocabulary is given."""
        theirs = self.tensors.get(name)
        if theirs is None:
            return
        if vocabulary is None:
            self._check(name, theirs.shape, tensor.shape)
            tensor.copy_(theirs)
            return
        self._check(name, theirs.shape[1:], tensor.shape[1:])
        rows = torch.from_numpy(self.vocabulary.rows_of(vocabulary.gene_ids)).long()
        known = (rows >= 0).nonzero().flatten()
        special = len(SPECIAL)
        tensor[:special] = theirs[:special]
        tensor[known + special] = theirs[rows[known] + special]

    def _check(self, name: str, theirs: torch.Size, ours: torch.Size) -> None:
        if theirs != ours:
            raise ConfigError(
                f"init_from: {name} is {tuple(theirs)} in {self.folder}, {tuple(ours)} here; "
                "give this run the same model and tokens sections"
            )


def _read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; export the model first (consolidate)") from None
    except SafetensorError as error:
        raise DataError(f"{path}: damaged: {error}; export the model again (consolidate)") from None
