"""Exported models, which are self-contained folders, and initial weights, drawn or from a folder.

    model.safetensors   full tensors, of which only the requested elements are read
    vocabulary.tsv      gene of each token
    cells.digest        digests of its training cells (`data/shards/cell_digests`), unless left out
    config.json         family, architecture, tokenizer and digests; written last

Nothing is unpickled. Genes that the model of `init_from` never saw start as the mean row of the
genes it has.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cellmill.config.load import advising, check_options, read_model_config, unusable
from cellmill.config.parts.family import WEIGHTS_FORMAT, FamilyConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.config.plugin import in_one_line
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError, UserError
from cellmill.files import atomic_path, require_file, sha256_file, write_json, write_text
from cellmill.models.build import ModelSpec, build
from cellmill.models.cell_encoder import COVARIATES
from cellmill.models.family import Model
from cellmill.models.gene_vectors import TABLE
from cellmill.models.initial import PIECE, fill_part
from cellmill.parallel.materialize import Part, as_index, fill, named_tensors, own_part, to_empty

WEIGHTS = "model.safetensors"
RIDGE = "ridge.safetensors"  # the regression for hidden genes (`evaluate.hidden_genes.ridge`)
SIZES = ("layer", "hidden", "width", "size", "heads")
"""Words in the names of options that are sizes: none is larger than the number of weights."""


class WeightsFile:
    """Tensors of a file by name; it stays mapped as long as this object lives.

    Raises DataError if the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            require_file(path)  # the library would wait for a FIFO
        with self._name_errors():
            self._file: Any = safe_open(path, framework="pt")
            stored = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118  not a mapping
        self.shapes = {name: torch.Size(tensor.get_shape()) for name, tensor in stored.items()}
        self.float32 = {name for name, tensor in stored.items() if tensor.get_dtype() == "F32"}

    def read(self, name: str, part: Part) -> Tensor:
        with self._name_errors():
            return self._file.get_slice(name)[part] if part else self._file.get_tensor(name)

    @contextmanager
    def _name_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise unusable(self._path, "no such file") from None
        except (SafetensorError, OSError, RuntimeError) as error:
            raise unusable(self._path, f"damaged: {error}") from None


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write full, contiguous tensors to a .safetensors file, atomically, or raise DataError."""
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
    """Write a model folder. Its config.json has the `sections` model, objective, tokens, and `about`.

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
    """Return the exported model in eval mode, its vocabulary, and config.json.

    Raise DataError if the folder is unusable.
    """
    config_path = folder / "config.json"
    vocabulary_path = folder / "vocabulary.tsv"
    weights = folder / WEIGHTS
    config = read_model_config(config_path)
    with advising():
        vocabulary = Vocabulary.read(vocabulary_path)
    trained_with = config["vocabulary_digest"]
    if vocabulary.digest != trained_with:
        raise unusable(
            vocabulary_path,
            f"its digest is {vocabulary.digest[:12]}, the model was trained with {trained_with[:12]}",
        )
    file = WeightsFile(weights)
    model = _build(config_path, spec_of(config, vocabulary.n_genes), file)
    tensors = _read_checked(file, weights, model.state_dict(), config["weights_sha256"])
    model = to_empty(model, "cpu")  # after the checks: a damaged config.json may ask for any size
    model.load_state_dict(tensors, assign=True)
    fill_buffers(model, config.get("seed", 0), vocabulary)
    return model.eval(), vocabulary, config


def _read_checked(
    file: WeightsFile, path: Path, state: dict[str, Tensor], weights_sha256: str
) -> dict[str, Tensor]:
    """Return all tensors of a file for a model's `state`. Raise DataError if they do not fit."""
    shapes = {name: tuple(shape) for name, shape in file.shapes.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    names = expected.keys() | shapes.keys()
    wrong = sorted(name for name in names if expected.get(name) != shapes.get(name))
    if wrong:
        name = wrong[0]
        raise unusable(
            path,
            f"{name}: expected {expected.get(name, 'no such tensor')} as in config.json, got "
            f"{shapes.get(name, 'none')} (tensors that differ: {len(wrong)})",
        )
    for name, tensor in state.items():
        if tensor.is_floating_point() != (name in file.float32):
            raise unusable(path, f"{name}: expected float32, got another type")
    digest = sha256_file(path)
    if digest != weights_sha256:
        raise unusable(
            path,
            f"its SHA-256 is {digest[:12]}, config.json has {weights_sha256[:12]}: damaged, or another model's weights",
        )
    tensors = {name: file.read(name, ()) for name in file.shapes}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise unusable(path, f"{name} has values that are not finite")
    return tensors


def fill_buffers(model: Model, seed: int, vocabulary: Vocabulary) -> None:
    """Fill the buffers of a whole model on the CPU that are not in its `state_dict`."""
    missing = {name for name, _ in named_tensors(model)} - model.state_dict().keys()
    fill(model, initial_tensors(model, seed, None, vocabulary, only=missing))


def _build(path: Path, spec: ModelSpec, file: WeightsFile) -> Model:
    """Build the model that config.json at `path` describes, on the meta device.

    Raise DataError if it cannot be the model of `file`.
    """
    n_tensors = len(file.shapes)
    n_elements = sum(shape.numel() for shape in file.shapes.values())
    options = spec.model.model_dump(mode="json") | spec.objective.model_dump(mode="json")
    # checked first: building a million layers would take hours
    for name, size in _sizes(options):
        if "layer" in name and size > n_tensors:
            raise unusable(path, f"{name}: {size}, but {WEIGHTS} has {n_tensors:,} tensors")
        if "layer" not in name and size > n_elements:
            raise unusable(path, f"{name}: {size}, but {WEIGHTS} has {n_elements:,} elements")
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
    """Yield name and value of the options that are sizes (SIZES), at any depth."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _sizes(value)
        elif type(value) is int and any(part in name for part in SIZES):
            yield name, value


def spec_of(config: dict[str, Any], n_genes: int) -> ModelSpec:
    model = check_options(FamilyConfig, config["model"], "config.json: model")
    objective = check_options(ObjectiveConfig, config["objective"], "config.json: objective")
    tokens = check_options(Tokens, config["tokens"], "config.json: tokens")
    levels = {column: tuple(names) for column, names in config.get("levels", {}).items()}
    return ModelSpec(model, objective, tokens, n_genes, levels)


def initial_tensors(
    model: Model,
    seed: int,
    init_from: Path | None,
    vocabulary: Vocabulary,
    only: Collection[str] | None = None,
    fixed: Mapping[str, Tensor] = MappingProxyType({}),
    new_genes: Mapping[str, Tensor] = MappingProxyType({}),
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and initial value, a CPU tensor, of every parameter and buffer, one at a time.

    Of a DTensor the value is the part of this rank. A tensor's generator is seeded with the CRC-32
    of seed and name, so values depend on no order and no layout. With `only`, just these names are
    yielded. `fixed` are values by name that replace drawn values.

    With `init_from`, the folder of an exported model, its tensors are used instead, of which each rank
    reads its part. Tensors with a row per gene are matched by Ensembl id, tensors with a row per level
    by the level's name. Genes and levels that the exported model lacks keep their initial values, unless
    `new_genes` has a row for new genes of that tensor. So do tensors that it lacks (another objective's
    head). Raise ConfigError if a shared tensor has another shape.
    """
    source = _Source(init_from, model, vocabulary) if init_from is not None else None
    for name, empty in named_tensors(model):
        if only is not None and name not in only:
            continue
        part = own_part(empty)
        rows = None if source is None else source.rows(name, empty, part)
        if source is not None and rows is not None and (rows >= 0).all():
            yield name, source.read(name, rows, part, empty.dtype)
            continue
        if name in fixed:
            value = fixed[name][part].to(empty.dtype, copy=True)
        else:
            # a 32-bit number from both: torch's CPU generator ignores the upper half of a seed
            generator = torch.Generator().manual_seed(crc32(f"{seed}:{name}".encode()))
            value = fill_part(model.fills[name], empty, part, generator)
        if source is not None and rows is not None:
            has_row = rows >= 0
            if name in new_genes:
                value[~has_row] = new_genes[name][part[1:]].to(empty.dtype)
            value[has_row] = source.read(name, rows[has_row], part, empty.dtype)
        yield name, value


def check_kept(spec: ModelSpec, folder: Path, left_out: Collection[str] = ()) -> None:
    """Raise ConfigError if the model of `spec` has no place for a tensor of the model in `folder`.

    It may lack those of another objective, and the modules and parameters in `left_out`.
    """
    path = folder / "config.json"
    config = read_model_config(path)
    spec = replace(spec, levels={**config.get("levels", {}), **spec.levels})
    theirs = {
        "model": check_options(FamilyConfig, config["model"], f"{path}: model"),
        "tokens": check_options(Tokens, config["tokens"], f"{path}: tokens"),
    }
    lost = _parameters(replace(spec, **theirs)) - _parameters(spec)
    names = sorted(name for name in lost if name.split(".")[0] not in left_out)
    if not names:
        return
    remedy = "give this run the same model and tokens sections"
    for section, options in theirs.items():
        for key, value in options:
            changed = getattr(spec, section).model_copy(update={key: value})
            if names[0] in _parameters(replace(spec, **{section: changed})):
                remedy = f"set {section}.{key} to {value}"
    raise ConfigError(
        f"init_from: this run's model has no place for {names[0]} of {folder} (tensors without a place: {len(names)}); "
        f"{remedy}, or leave it out with finetune.leave_out: [{names[0].split('.')[0]}]"
    )


def _parameters(spec: ModelSpec) -> set[str]:
    """Return the names of all parameters; tables of covariates are named by their columns."""
    model = build(spec)
    names = {name for name, _ in model.named_parameters()}
    tables = {name for name in names if name.startswith(COVARIATES)}
    return names - tables | {f"covariates.{model.level_rows[name]}" for name in tables}


def mean_gene_row(weights: Path, name: str) -> Tensor:
    """Return the mean row over genes of a tensor, float32, read a piece at a time."""
    file = WeightsFile(weights)
    shape = file.shapes[name]
    total = torch.zeros(shape[1:], dtype=torch.float64)
    rows = max(1, PIECE // max(1, shape[1:].numel()))
    for first in range(len(SPECIAL), shape[0], rows):
        total += file.read(name, (slice(first, min(first + rows, shape[0])),)).double().sum(0)
    return (total / (shape[0] - len(SPECIAL))).float()


def scale_vectors(table: Tensor, folder: Path, vocabulary: Vocabulary) -> Tensor:
    """Return the gene vectors `table` on the scale of those of the model in `folder`.

    Both were divided by a root mean square over other genes; the factor is over the genes of both.
    """
    file = WeightsFile(folder / WEIGHTS)
    if TABLE not in file.shapes or file.shapes[TABLE][1:] != table.shape[1:]:
        return table  # `initial_tensors` refuses another width
    rows = Vocabulary.read(folder / "vocabulary.tsv").rows_of(vocabulary.gene_ids)
    known = torch.from_numpy(rows).long()
    theirs = file.read(TABLE, ())[len(SPECIAL) :][known].double()
    ours = table[len(SPECIAL) :].double()
    is_shared = (known >= 0) & theirs.any(1) & ours.any(1)
    norms = [vectors[is_shared].norm().item() for vectors in (theirs, ours)]
    return table * (norms[0] / norms[1]) if is_shared.any() else table


class _Source:
    """Tensors of an exported model, for a `model` with another `vocabulary` and other levels."""

    def __init__(self, folder: Path, model: Model, vocabulary: Vocabulary) -> None:
        self.folder = folder
        self.model = model
        self.file = WeightsFile(folder / WEIGHTS)
        source_genes = Vocabulary.read(folder / "vocabulary.tsv")
        genes = torch.from_numpy(source_genes.rows_of(vocabulary.gene_ids)).long()
        rows = torch.where(genes < 0, -1, genes + len(SPECIAL))
        self.gene_rows = torch.cat([torch.arange(len(SPECIAL)), rows])
        """The source's row of each of the model's tokens, -1 for none."""
        config = read_model_config(folder / "config.json")
        self.levels: dict[str, list[str]] = config.get("levels", {})
        self.covariates: list[str] = config["tokens"].get("covariates", [])

    def find(self, name: str) -> str:
        """Return the source's name of a tensor: the table of a covariate may have another number."""
        if not name.startswith(COVARIATES):
            return name
        column = self.model.level_rows[name]
        return f"{COVARIATES}{[*self.covariates, column].index(column)}.weight"

    def rows(self, name: str, empty: Tensor, part: Part) -> Tensor | None:
        """Return the source's row for each row of `part`, int64, -1 for none.

        Return None if the source lacks the tensor.
        """
        source_shape = self.file.shapes.get(self.find(name))
        if source_shape is None:
            return None
        rows = None
        column = self.model.level_rows.get(name)
        if column is not None:
            rows = self._level_rows(column, len(empty), source_shape[0])
            if (rows < 0).all():
                return None
        elif name in self.model.gene_rows:
            rows = self.gene_rows
        matched = slice(0 if rows is None else 1, None)  # dims that must be equal
        if source_shape[matched] != empty.shape[matched]:
            is_head = name.split(".")[0] in (self.model.heads or ())
            section = "model and objective sections" if is_head else "model and tokens sections"
            raise ConfigError(
                f"init_from: expected {name} of shape {tuple(empty.shape[matched])}, got "
                f"{tuple(source_shape[matched])} in {self.folder}; give this run the same {section}"
            )
        if rows is None:
            rows = torch.arange(len(empty) if empty.ndim else 1)
        return rows[part[0]] if part else rows

    def _level_rows(self, column: str, n_rows: int, n_source_rows: int) -> Tensor:
        """Return the source's row of each row of a table by level, -1 for none.

        Levels are the last rows; a row of the unknown level may come before them.
        """
        levels = self.model.objective.levels[column]
        source_levels = self.levels.get(column, ())
        n_before = n_rows - len(levels)
        n_source_before = n_source_rows - len(source_levels)
        row_of = {level: n_source_before + row for row, level in enumerate(source_levels)}
        rows = [-1] * n_before
        if row_of and n_before == n_source_before:
            rows = list(range(n_before))
        rows += [row_of.get(level, -1) for level in levels]
        return torch.tensor(rows)

    def read(self, name: str, rows: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
        """Return these rows of a tensor, as far as the other dims of `part` reach."""
        if part:
            part = (as_index(rows.tolist()), *part[1:])
        return self.file.read(self.find(name), part).to(dtype)


def mean_gene_rows(spec: ModelSpec, folder: Path, device: torch.device) -> dict[str, Tensor]:
    """Return the mean gene's row of each tensor with a row per gene, from the model in `folder`.

    Rank 0 reads the tables, a piece at a time, and sends the means. So other ranks read only their part
    of the model, and all layouts have the same bits. The table of given gene vectors is left out: a gene
    without a vector has zeros there. Collective over all ranks.
    """
    model = build(spec)
    source_shapes = WeightsFile(folder / WEIGHTS).shapes
    shapes: dict[str, torch.Size] = {}
    for name, tensor in named_tensors(model):
        if name not in model.gene_rows or name not in source_shapes or name == TABLE:
            continue
        if source_shapes[name][1:] == tensor.shape[1:]:  # `initial_tensors` refuses another width
            shapes[name] = tensor.shape[1:]
    if not shapes:
        return {}
    sizes = [shape.numel() for shape in shapes.values()]
    means = torch.empty(sum(sizes), device=device)
    if dist.get_rank() == 0:
        rows = [mean_gene_row(folder / WEIGHTS, name).flatten() for name in shapes]
        means = torch.cat(rows).to(device)
    dist.broadcast(means, 0)
    parts = means.cpu().split(sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}
