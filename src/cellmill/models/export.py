"""Exported models, which are self-contained folders, and initial weights, which may come from one.

    model.safetensors   full tensors
    vocabulary.tsv      gene of each token
    config.json         family, architecture, tokenizer and digests; written last

Nothing is unpickled.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
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

WEIGHTS = "model.safetensors"
TEXTS = ("family", "vocabulary_digest", "weights_sha256")
"""Keys of config.json that hold a string."""


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write full, contiguous tensors to a .safetensors file, atomically. Raises DataError when that fails."""
    with atomic_path(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise DataError(f"{path}: could not be written: {error}") from None


def load_model(folder: Path) -> tuple[Model, Vocabulary, dict[str, Any]]:
    """Return the exported model in `folder`, on the CPU in eval mode, its vocabulary, and its config.json.

    Raises DataError if a file is missing, damaged, or of another model.
    """
    config_path, genes_path, weights = (folder / name for name in ("config.json", "vocabulary.tsv", WEIGHTS))
    config = _read_config(config_path)
    vocabulary = Vocabulary.read(genes_path)
    if vocabulary.digest != config["vocabulary_digest"]:
        raise _unusable(
            genes_path,
            f"its digest is {vocabulary.digest[:12]}, the model was trained with {config['vocabulary_digest'][:12]}",
        )
    model = build(spec_of(config, vocabulary.n_genes)).to_empty(device="cpu")
    tensors = dict(_read_tensors(weights))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name)):
        name = wrong[0]
        raise _unusable(
            weights,
            f"{name}: expected {expected.get(name, 'no such tensor')} as in config.json, got "
            f"{shapes.get(name, 'none')} (tensors that differ: {len(wrong)})",
        )
    if (digest := sha256_file(weights)) != config["weights_sha256"]:
        raise _unusable(
            weights,
            f"its SHA-256 is {digest[:12]}, config.json has {config['weights_sha256'][:12]}: damaged, or another "
            "model's weights",
        )
    model.load_state_dict(tensors, assign=True)
    rest = {name for name, _ in named_tensors(model)} - expected.keys()  # non-persistent buffers
    fill(model, initial_tensors(model, config.get("seed", 0), None, vocabulary, only=rest))
    return model.eval(), vocabulary, config


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    version = config.get("format") if isinstance(config, dict) else None
    if version != WEIGHTS_FORMAT:
        raise _unusable(path, f"expected a model of format {WEIGHTS_FORMAT}, got {version}")
    if missing := [key for key in (*TEXTS, "model", "tokens") if key not in config]:
        raise _unusable(path, f"{missing[0]} is missing")
    if wrong := [key for key in TEXTS if not isinstance(config[key], str)]:
        raise _unusable(path, f"{wrong[0]}: expected a string, got {config[wrong[0]]!r}")
    config = upgrade_options(config)
    if wrong := [key for key in ("model", "tokens", "objective") if not isinstance(config.get(key), dict)]:
        raise _unusable(path, f"{wrong[0]}: expected a mapping, got {config.get(wrong[0])!r}")
    return config


def _unusable(path: Path, problem: str) -> DataError:
    return DataError(f"{path}: {problem}; export the model again (consolidate)")


def spec_of(config: dict[str, Any], n_genes: int) -> ModelSpec:
    """Return the specification of the model in a config.json, of this or an earlier version."""
    stored = upgrade_options({key: config[key] for key in ("model", "objective", "tokens") if key in config})
    sections = (("model", FamilyConfig), ("objective", ObjectiveConfig), ("tokens", Tokens))
    parsed = {name: check_options(kind, stored[name], f"config.json: {name}") for name, kind in sections}
    levels = {name: tuple(known) for name, known in config.get("levels", {}).items()}
    return ModelSpec(**parsed, n_genes=n_genes, levels=levels)


def initial_tensors(
    model: Model, seed: int, init_from: Path | None, vocabulary: Vocabulary, only: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full CPU tensor) of every parameter and buffer, one at a time; the same on every rank.

    A tensor's generator is seeded with the CRC-32 of seed and name, so values depend on no order and no layout. With
    `only`, just these names are yielded.
    With `init_from`, an exported model, its tensors are used instead; those with a row per gene are matched by Ensembl
    id, those with a row per level by the level's name, and unknown genes and levels keep their random values. So do
    tensors that it lacks (another objective's head). Raises ConfigError if a shared tensor has another shape.
    """
    source = _Source(init_from) if init_from is not None else None
    for name, empty in named_tensors(model):
        if only is not None and name not in only:
            continue
        tensor = torch.empty(empty.shape, dtype=empty.dtype)
        # a 32-bit number from both: torch's CPU generator ignores the upper half of a seed
        generator = torch.Generator().manual_seed(crc32(f"{seed}:{name}".encode()))
        model.initialize(name, tensor, generator)
        if source is not None:
            if name in model.level_rows:
                source.fill_levels(name, tensor, model.level_rows[name], model.objective.levels)
            else:
                source.fill(name, tensor, vocabulary if name in model.gene_rows else None)
        yield name, tensor


class _Source:
    """Tensors of an exported model, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vocabulary = Vocabulary.read(folder / "vocabulary.tsv")
        self.tensors = dict(_read_tensors(folder / WEIGHTS))
        self.levels: dict[str, list[str]] = read_json(folder / "config.json").get("levels", {})

    def fill(self, name: str, tensor: torch.Tensor, vocabulary: Vocabulary | None) -> None:
        """Overwrite `tensor` with the source's, by gene if a vocabulary is given."""
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

    def fill_levels(self, name: str, tensor: torch.Tensor, column: str, levels: Mapping[str, Sequence[str]]) -> None:
        """Overwrite the rows of `tensor` whose levels of `column` the source has too."""
        theirs = self.tensors.get(name)
        rows = {level: row for row, level in enumerate(self.levels.get(column, ()))}
        if theirs is None or not rows:
            return
        self._check(name, theirs.shape[1:], tensor.shape[1:])
        known = [row for row, level in enumerate(levels[column]) if level in rows]
        # a table may begin with rows of no level
        first, their_first = len(tensor) - len(levels[column]), len(theirs) - len(rows)
        tensor[:first] = theirs[:their_first]
        tensor[[first + row for row in known]] = theirs[[their_first + rows[levels[column][row]] for row in known]]

    def _check(self, name: str, theirs: torch.Size, ours: torch.Size) -> None:
        if theirs != ours:
            raise ConfigError(
                f"init_from: expected {name} of shape {tuple(ours)}, got {tuple(theirs)} in {self.folder}; "
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
        raise _unusable(path, f"damaged: {error}") from None
