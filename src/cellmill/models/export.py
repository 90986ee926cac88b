"""Exported models, which are self-contained folders, and initial weights, which may come from one.

    model.safetensors   full tensors, of which only the requested elements are read
    vocabulary.tsv      gene of each token
    config.json         family, architecture, tokenizer and digests; written last

Nothing is unpickled. Genes that the model of `init_from` never saw start as the mean row of the
genes it has.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cellmill.config.load import check_options, read_model_config, unusable
from cellmill.config.parts.family import WEIGHTS_FORMAT, FamilyConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.config.plugin import in_one_line
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError, UserError
from cellmill.files import atomic_path, require_file, sha256_file, write_json, write_text
from cellmill.models.build import ModelSpec, build
from cellmill.models.family import Model
from cellmill.models.gene_vectors import TABLE
from cellmill.models.initial import PIECE, fill_part
from cellmill.parallel.materialize import Part, as_index, fill, named_tensors, own_part, to_empty

WEIGHTS = "model.safetensors"
SIZES = ("layer", "hidden", "width", "size", "heads")
"""Parts of the names of options of which a model has no more than weights."""


class WeightsFile:
    """Tensors by name; the file stays mapped as long as this lives. Raises DataError if it is
    missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            require_file(path)  # the library would wait for a FIFO
        with self._named():
            self._file: Any = safe_open(path, framework="pt")
            stored = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118  no mapping
        self.shapes = {name: torch.Size(tensor.get_shape()) for name, tensor in stored.items()}
        self.float32 = {name for name, tensor in stored.items() if tensor.get_dtype() == "F32"}

    def read(self, name: str, part: Part) -> Tensor:
        with self._named():
            return self._file.get_slice(name)[part] if part else self._file.get_tensor(name)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise DataError(
                f"{self._path}: no such file; export the model first (consolidate)"
            ) from None
        except (SafetensorError, OSError, RuntimeError) as error:
            raise unusable(self._path, f"damaged: {error}") from None


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write full, contiguous tensors to a .safetensors file, atomically. Raises DataError when that
    fails.
    """
    with atomic_path(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise DataError(f"{path}: could not be written: {error}") from None


def write_model(
    folder: Path,
    sections: Mapping[str, Any],
    genes: Vocabulary,
    tensors: dict[str, Tensor],
    about: Mapping[str, Any],
    card: Callable[[dict[str, Any]], str],
) -> None:
    """Write a model folder: the options `sections` of model, objective and tokens, and `about`, are
    its config.json.

    config.json is removed first and written last; README.md is what `card` makes of it.
    """
    config_path = folder / "config.json"
    config_path.unlink(missing_ok=True)
    write_tensors(folder / WEIGHTS, tensors)
    genes.write(folder / "vocabulary.tsv")
    config = {
        "format": WEIGHTS_FORMAT,
        "family": sections["model"]["family"],
        **{name: sections[name] for name in ("model", "objective", "tokens")},
        "n_genes": genes.n_genes,
        "vocabulary_digest": genes.digest,
        **about,
        "weights_sha256": sha256_file(folder / WEIGHTS),
    }
    write_text(folder / "README.md", card(config))
    write_json(config_path, config)


def load_model(folder: Path) -> tuple[Model, Vocabulary, dict[str, Any]]:
    """Return the exported model in eval mode, its vocabulary, and config.json. Raises DataError if
    unusable.
    """
    config_path, genes_path, weights = (
        folder / name for name in ("config.json", "vocabulary.tsv", WEIGHTS)
    )
    if not config_path.exists() and (folder / "model" / "config.json").exists():
        raise DataError(f"{folder}: this is the folder of a run; its model is {folder / 'model'}")
    config = read_model_config(config_path)
    vocabulary = Vocabulary.read(genes_path)
    if vocabulary.digest != (stored := config["vocabulary_digest"]):
        problem = (
            f"its digest is {vocabulary.digest[:12]}, the model was trained with {stored[:12]}"
        )
        raise unusable(genes_path, problem)
    file = WeightsFile(weights)
    model = _build(config_path, spec_of(config, vocabulary.n_genes), file)
    state = model.state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    shapes = {name: tuple(shape) for name, shape in file.shapes.items()}
    wrong = sorted(
        name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name)
    )
    if wrong:
        name = wrong[0]
        raise unusable(
            weights,
            f"{name}: expected {expected.get(name, 'no such tensor')} as in config.json, got "
            f"{shapes.get(name, 'none')} (tensors that differ: {len(wrong)})",
        )
    wrong = [
        name
        for name, tensor in state.items()
        if tensor.is_floating_point() != (name in file.float32)
    ]
    if wrong:
        raise unusable(weights, f"{wrong[0]}: expected float32, got another type")
    digest = sha256_file(weights)
    if digest != (stored := config["weights_sha256"]):
        problem = f"its SHA-256 is {digest[:12]}, config.json has {stored[:12]}: damaged, or another model's weights"
        raise unusable(weights, problem)
    tensors = {name: file.read(name, ()) for name in file.shapes}
    wrong = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if wrong:
        raise unusable(weights, f"{wrong[0]} has values that are not finite")
    model = to_empty(model, "cpu")  # after the checks: a damaged config.json may ask for any size
    model.load_state_dict(tensors, assign=True)
    fill_buffers(model, config.get("seed", 0), vocabulary)
    return model.eval(), vocabulary, config


def fill_buffers(model: Model, seed: int, vocabulary: Vocabulary) -> None:
    """Fill the buffers that no file has, of a whole model on the CPU."""
    rest = {name for name, _ in named_tensors(model)} - model.state_dict().keys()
    fill(model, initial_tensors(model, seed, None, vocabulary, only=rest))


def _build(path: Path, spec: ModelSpec, file: WeightsFile) -> Model:
    """The model of config.json at `path` on the meta device. Raises DataError if it cannot be that
    of `file`.
    """
    n_elements = sum(shape.numel() for shape in file.shapes.values())
    for name, size in _sizes(
        spec.model.model_dump(mode="json") | spec.objective.model_dump(mode="json")
    ):
        most, of = (len(file.shapes), "tensors") if "layer" in name else (n_elements, "elements")
        if size > most:  # building a million layers would take hours
            raise unusable(path, f"{name}: {size}, but {WEIGHTS} has {most:,} {of}")
    try:
        return build(spec)
    except UserError:
        raise
    except (
        RuntimeError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        MemoryError,
    ) as error:
        raise unusable(
            path, f"no model can be built of its options: {in_one_line(error)}"
        ) from error


def _sizes(options: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _sizes(value)
        elif type(value) is int and any(part in name for part in SIZES):
            yield name, value


def spec_of(config: dict[str, Any], n_genes: int) -> ModelSpec:
    sections = (("model", FamilyConfig), ("objective", ObjectiveConfig), ("tokens", Tokens))
    parsed = {
        name: check_options(kind, config[name], f"config.json: {name}") for name, kind in sections
    }
    levels = {name: tuple(known) for name, known in config.get("levels", {}).items()}
    return ModelSpec(**parsed, n_genes=n_genes, levels=levels)


def initial_tensors(
    model: Model,
    seed: int,
    init_from: Path | None,
    vocabulary: Vocabulary,
    only: Collection[str] | None = None,
    given: Mapping[str, Tensor] = MappingProxyType({}),
    new_genes: Mapping[str, Tensor] = MappingProxyType({}),
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, CPU tensor) of every parameter and buffer, one at a time; of a DTensor the part
    of this rank.

    A tensor's generator is seeded with the CRC-32 of seed and name, so values depend on no order
    and no layout. With `only`, just these names are yielded. `given` are initial values by name, in
    place of drawn ones. With `init_from`, an exported model, its tensors are used instead, of which
    each rank reads its part; those with a row per gene are matched by Ensembl id, those with a row
    per level by the level's name, and unknown genes and levels keep their initial values; genes get
    the row in `new_genes` of the tensors that are in it. Tensors that it lacks (another objective's
    head) keep theirs too. Raises ConfigError if a shared tensor has another shape.
    """
    source = _Source(init_from, model, vocabulary) if init_from is not None else None
    for name, empty in named_tensors(model):
        if only is not None and name not in only:
            continue
        part = own_part(empty)
        theirs = None if source is None else source.rows(name, empty, part)
        if source is not None and theirs is not None and (theirs >= 0).all():
            yield name, source.read(name, theirs, part, empty.dtype)
            continue
        if name in given:
            own = given[name][part].to(empty.dtype, copy=True)
        else:
            # a 32-bit number from both: torch's CPU generator ignores the upper half of a seed
            generator = torch.Generator().manual_seed(crc32(f"{seed}:{name}".encode()))
            own = fill_part(model.fills[name], empty, part, generator)
        if source is not None and theirs is not None:
            if name in new_genes:
                own[theirs < 0] = new_genes[name][part[1:]].to(empty.dtype)
            own[theirs >= 0] = source.read(name, theirs[theirs >= 0], part, empty.dtype)
        yield name, own


def mean_gene_row(weights: Path, name: str) -> Tensor:
    """Return the mean over the genes of a tensor with a row per gene, float32; reads a piece at a
    time.
    """
    file = WeightsFile(weights)
    shape = file.shapes[name]
    total = torch.zeros(shape[1:], dtype=torch.float64)
    rows = max(1, PIECE // max(1, shape[1:].numel()))
    for first in range(len(SPECIAL), shape[0], rows):
        total += file.read(name, (slice(first, min(first + rows, shape[0])),)).double().sum(0)
    return (total / (shape[0] - len(SPECIAL))).float()


class _Source:
    """Tensors of an exported model, by name, as `model` with `vocabulary` takes them over."""

    def __init__(self, folder: Path, model: Model, vocabulary: Vocabulary) -> None:
        self.folder = folder
        self.model = model
        self.file = WeightsFile(folder / WEIGHTS)
        genes = torch.from_numpy(
            Vocabulary.read(folder / "vocabulary.tsv").rows_of(vocabulary.gene_ids)
        ).long()
        special = torch.arange(len(SPECIAL))
        self.gene_rows = torch.cat([special, torch.where(genes < 0, -1, genes + len(SPECIAL))])
        self.levels: dict[str, list[str]] = read_model_config(folder / "config.json").get(
            "levels", {}
        )

    def rows(self, name: str, empty: Tensor, part: Part) -> Tensor | None:
        """Return the source's row for each row of `part`, int64, -1 for none; None if it lacks the
        tensor.
        """
        theirs = self.file.shapes.get(name)
        if theirs is None:
            return None
        rows = None
        column = self.model.level_rows.get(name)
        if column is not None:
            ours = self.model.objective.levels[column]
            levels = self.levels.get(column, ())
            # a table may begin with rows of no level
            first = len(empty) - len(ours)
            their_first = theirs[0] - len(levels)
            known = {level: their_first + row for row, level in enumerate(levels)}
            begin = range(first) if known and first == their_first else [-1] * first
            rows = torch.tensor([*begin, *(known.get(level, -1) for level in ours)])
            if (rows < 0).all():
                return None
        elif name in self.model.gene_rows:
            rows = self.gene_rows
        by_row = slice(0 if rows is None else 1, None)
        if theirs[by_row] != empty.shape[by_row]:
            is_head = name.split(".")[0] in (self.model.heads or ())
            section = "model and objective sections" if is_head else "model and tokens sections"
            raise ConfigError(
                f"init_from: expected {name} of shape {tuple(empty.shape[by_row])}, got {tuple(theirs[by_row])} in "
                f"{self.folder}; give this run the same {section}"
            )
        if rows is None:
            rows = torch.arange(len(empty) if empty.ndim else 1)
        return rows[part[0]] if part else rows

    def read(self, name: str, rows: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
        """Return these rows of a tensor, and of each what `part` has."""
        return self.file.read(name, (as_index(rows.tolist()), *part[1:]) if part else part).to(
            dtype
        )


def mean_gene_rows(spec: ModelSpec, folder: Path, device: torch.device) -> dict[str, Tensor]:
    """Return the mean row of each tensor of the model `spec` with a row per gene that the model in
    `folder` has.

    All ranks must call. Rank 0 reads the tables, a piece at a time, and sends the means: the others
    read their own part of the model alone, and all layouts have the same bits. The table of given
    gene vectors has no mean: a gene without a vector has none.
    """
    model = build(spec)
    file = WeightsFile(folder / WEIGHTS)
    shapes = {
        name: tensor.shape[1:]
        for name, tensor in named_tensors(model)
        if name in model.gene_rows
        and name in file.shapes
        and name != TABLE
        and file.shapes[name][1:] == tensor.shape[1:]  # `initial_tensors` refuses another width
    }
    if not shapes:
        return {}
    if dist.get_rank() == 0:
        sent = torch.cat([mean_gene_row(folder / WEIGHTS, name).flatten() for name in shapes]).to(
            device
        )
    else:
        sent = torch.empty(sum(shape.numel() for shape in shapes.values()), device=device)
    dist.broadcast(sent, 0)
    parts = sent.cpu().split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}
