"""Checked options, from YAML or as a run stored them.

Errors name the key, the nearest one and the file.

A run's resolved options are stored in its run.json, in each checkpoint's state.json and in exported
models. An option added with a default needs no translation, because validation fills it in. A run
with `init_from` takes sections from the model that it starts from, and some options must equal the
model's. Torch-free.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from cellmill.config.datasets import check_name
from cellmill.config.options import TrainOptions
from cellmill.config.parts.family import WEIGHTS_FORMAT, FamilyConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.config.plugin import Plugin
from cellmill.config.published import PublishedFolder, model_folder_of
from cellmill.config.section import Section, error_line, explain, shown, unknown_key
from cellmill.config.workflow import ENTRIES, Workflow, as_written, expand, mapping, sections_of
from cellmill.errors import ConfigError, DataError, UserError
from cellmill.files import read_json, refuse_special

Tree = dict[str, Any]  # parsed JSON or YAML, or what is made into it
INHERITED: dict[str, type[Plugin]] = {"model": FamilyConfig, "tokens": Tokens}
ATLAS = "atlas"  # folder, in the model's
RECORD = "atlas.json"
REMEDY = "copy it again, or export the model again (consolidate)"


class _Loader(yaml.SafeLoader):
    """Loader that refuses 010, 0x10, 1:30, and a key that a mapping has twice: PyYAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise ConfigError(
                    f"line {key.start_mark.line + 1}: key {key.value!r} is there twice; remove one"
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = node.value
        value = int(self.construct_yaml_int(node))
        digits = text.replace("_", "").lstrip("+-")
        if not digits.isdigit() or int(digits) != abs(value):
            line = node.start_mark.line + 1
            raise ConfigError(
                f"line {line}: {text} is {value} in YAML 1.1; write {value}, or '{text}' in quotes"
            )
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def read_yaml(path: Path) -> Any:
    """The tree in a YAML file. Raise ConfigError, or DataError for a FIFO, with one line."""
    refuse_special(path)
    try:
        # a subclass of SafeLoader, which makes only texts, numbers, lists and mappings
        return yaml.load(Path(path).read_text(encoding="utf-8-sig"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split()).replace(' in "<unicode string>",', " at")
        raise ConfigError(f"{path}: not valid YAML: {text}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def with_parents(runs: Mapping[str, Tree], written: Mapping[str, Tree]) -> dict[str, Tree]:
    """Runs in which `init_from` supplies the options of model and tokens that nobody wrote.

    Those at the top of the file give way, section by section, where they do not match the model.
    Keys that the run itself sets (`written`) stay.
    """
    done: dict[str, Tree] = {}

    def resolve(name: str, above: tuple[str, ...]) -> Tree:
        if name not in done:
            parent = runs[name].get("init_from")
            sections = None
            # a circle is refused later
            if isinstance(parent, str) and parent not in (*above, name):
                if parent in runs:
                    sections = resolve(parent, (*above, name))
                elif not parent.startswith("hf://"):
                    # a model of the hub may not be here yet, and options must not change when it is
                    sections = stored_sections(parent)
            done[name] = runs[name] | _inherited(runs[name], written[name], sections)
        return done[name]

    return {name: resolve(name, ()) for name in runs}


def _inherited(run: Tree, written: Tree, parent: Tree | None) -> Tree:
    """Sections of a run, completed by those of its parent."""
    given = [tree[key] for tree in (run, parent or {}) for key in INHERITED if key in tree]
    # the check of the whole reports a section that is no mapping, and stage train a damaged model
    if parent is None or not all(isinstance(options, dict) for options in given):
        return {}
    with suppress(ValidationError):
        unequal_options(parent, parent)
        parent = parent | {"tokens": _suiting(parent["tokens"], run.get("objective"))}
        return {key: _completed(key, run, written, parent) for key in INHERITED}
    return {}


def _suiting(tokens: Tree, objective: Any) -> Tree:
    """Tokens of a parent, without zeros if the run's objective has no use for them."""
    parts = ObjectiveConfig.model_validate(objective or {}).all_parts()
    left_out = set() if all(part.reads_zeros for part in parts) else {"zero_frac"}
    return {key: value for key, value in tokens.items() if key not in left_out}


def _completed(key: str, run: Tree, written: Tree, parent: Tree) -> Tree:
    """Section `key` of a run, with the keys of its parent that nobody wrote.

    Of a section at the top that does not match the parent, only what the run itself sets is left.
    """
    contract = INHERITED[key]
    merged = contract.override(parent[key], run[key])
    matches = True
    try:
        matches = not unequal_options(parent, parent | {key: merged})
    except ValidationError:
        with suppress(ValidationError):  # an error of the run's own is reported
            contract.model_validate(run[key])
            matches = False
    return merged if matches else contract.override(parent[key], written.get(key) or {})


def stored_sections(parent: str) -> Tree | None:
    """Sections of a model folder, published folder or model of the hub; None if it is not there."""
    published = PublishedFolder.named_by(parent)
    if published is not None:
        try:
            published.files()
        except DataError:
            return None  # `check_inputs` reports it
        return published.sections()
    path = Path(model_folder_of(parent), "config.json")
    if not path.is_file():
        return None
    with advising():
        config = read_json(path)
    if not isinstance(config, dict):
        return None
    sections = {key: config.get(key) for key in INHERITED}
    if not all(isinstance(options, dict) for options in sections.values()):
        return None  # stage train reports the error
    # the file of the vectors is where the model was trained; the model has them
    model = {key: value for key, value in config["model"].items() if key != "gene_vectors"}
    return {"tokens": config["tokens"], "model": model}


def unequal_options(
    before: Mapping[str, Any], now: Mapping[str, Any], parent: Path | str = ""
) -> dict[str, str]:
    """Options of model and tokens that must equal those of the model `parent` but differ.

    Each has a message. Raise ValidationError.
    """
    model = FamilyConfig.model_validate(before["model"])
    tokens = Tokens.model_validate(before["tokens"])
    new_model = FamilyConfig.model_validate(now["model"])
    new_tokens = Tokens.model_validate(now["tokens"])
    rows = model.table_rows(tokens)
    new_rows = new_model.table_rows(new_tokens)
    sized = [key for key, n_rows in rows.items() if new_rows.get(key) != n_rows]
    compared: dict[str, tuple[Section, Section, tuple[str, ...]]] = {
        "model": (model, new_model, ("family", *new_model.weight_keys)),
        "tokens": (tokens, new_tokens, ("tokenizer", *sized)),
    }
    unequal = {}
    for section, (stored, options, keys) in compared.items():
        for key in keys:
            old = getattr(stored, key, None)
            new = getattr(options, key, None)
            if old != new:
                had = f"the model to start from ({parent}) has {old!r}"
                unequal[f"{section}.{key}"] = f"{section}.{key} is {new!r}, {had}; make them equal"
    return unequal


def load_config(path: Path) -> Workflow:
    """Configuration of a YAML file. Raise ConfigError with one line that names the key."""
    return check_config(read_yaml(path), str(path))


def check_config(tree: Any, source: str = "config/config.yaml") -> Workflow:
    """Configuration of a tree of dicts, as Snakemake loads it.

    Raise ConfigError naming the key in `source`.
    """
    try:
        tree = with_sweeps(tree)
        checked = Workflow.model_validate(with_defaults(tree))
    except ValidationError as error:
        where, message = explain(error, Workflow)
        missing = _missing_parent(tree)
        if missing is not None and where[-1:] != ["init_from"]:
            where, message = missing
        raise ConfigError(f"{source}: {error_line(as_written(where, tree), message)}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    for name, run in checked.runs.items():
        parent = run.init_from
        if parent is None:
            continue
        before = vars(checked.runs[parent]) if parent in checked.runs else stored_sections(parent)
        if before is None:
            continue
        with suppress(ValidationError):  # an error in the model's own file: stage train reports it
            for message in unequal_options(before, vars(run), parent).values():
                raise ConfigError(f"{source}: runs.{name}: {message}")
    checked.check_datasets(source)
    checked.keep_written(tree)
    return checked


def _missing_parent(tree: Tree) -> tuple[list[str], str] | None:
    """The last run whose published folder is missing, and the message.

    Without its parent's sections a run may be wrong.
    """
    missing = None
    for name, run in tree["runs"].items():
        parent = _mapping(run, f"runs.{name}").get("init_from")
        published = PublishedFolder.named_by(str(parent))
        if published is not None:
            try:
                published.files()
            except DataError as error:
                missing = (["runs", name, "init_from"], str(error))
    return missing


def check_options(model: type[BaseModel], options: Any, source: str) -> Any:
    """`options` as a `model`. Raise ConfigError with one line."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"{source}: {error_line(*explain(error, model))}") from None


def stored_options(options: Tree, source: str) -> TrainOptions:
    """Parse the options stored in `source`. Raise ConfigError if this version cannot read them."""
    return check_options(TrainOptions, options, source)


def top_level() -> dict[str, type[Section] | None]:
    """Keys of a configuration file: sections with their class, None for mappings and single keys."""
    keys: dict[str, type[Section] | None] = {}
    for owner in ENTRIES.values():
        keys |= sections_of(owner)
    return keys | dict.fromkeys(Workflow.model_fields) | sections_of(Workflow)


def with_sweeps(tree: Any) -> Any:
    """The tree with the runs of its sweeps among the others."""
    if not isinstance(tree, dict) or tree.get("sweep") is None:
        return tree
    runs = _mapping(tree.get("runs"), "runs")
    swept, _ = expand(tree["sweep"], runs)
    return tree | {"runs": runs | swept}


def with_defaults(tree: Any) -> Tree:
    """The tree with the sections at its top merged into each corpus and run."""
    if not isinstance(tree, dict):
        given = "an empty file" if tree is None else type(tree).__name__
        raise ConfigError(f"expected a mapping of sections, got {given}")
    known = top_level()
    wrong = [str(key) for key in tree if key not in known]
    if wrong:
        raise ConfigError(unknown_key(wrong[0], known, whole=Workflow))
    merged: Tree = {name: value for name, value in tree.items() if name in Workflow.model_fields}
    merged |= {name: _mapping(tree.get(name), name) for name in sections_of(Workflow)}
    entries = {kind: _entries(kind, tree.get(kind)) for kind in ENTRIES}
    for kind, owner in ENTRIES.items():
        merged[kind] = {name: dict(options) for name, options in entries[kind].items()}
        for section, options in sections_of(owner).items():
            defaults = _mapping(tree.get(section), section)
            for entry in merged[kind].values():
                if isinstance(entry.get(section), dict | None):
                    entry[section] = options.override(defaults, entry.get(section) or {})
    merged["runs"] = with_parents(merged["runs"], entries["runs"])
    return merged


def _entries(kind: str, given: Any) -> dict[str, Tree]:
    """Corpora or runs as they are written, by names that paths can have."""
    if not isinstance(given, dict) or not given:
        raise ConfigError(f"{kind}: expected a mapping with at least one name, got {given!r}")
    for name in given:
        try:
            check_name(name)
        except ValueError as error:
            raise ConfigError(f"{kind}: {error}") from None
        if name.endswith(".h5ad"):
            raise ConfigError(
                f"{kind}: {name} is the name of a file; set {name.removesuffix('.h5ad')}, without .h5ad"
            )
    return {name: _mapping(options, f"{kind}.{name}") for name, options in given.items()}


def _mapping(value: Any, where: str) -> Tree:
    # Snakemake's --config makes text of null
    return {} if value in (None, "null") else mapping(value, where)


class ListedCells(BaseModel):
    """Entry of config.json about cells.digest."""

    model_config = ConfigDict(strict=True)

    n_cells: int
    n_barcodes: int
    unknown: list[str]
    sha256: str


class ClassifierEntry(BaseModel):
    """Entry of config.json on a head that predicts labels."""

    model_config = ConfigDict(strict=True)

    label_column: str
    labels: list[str]
    calibration: Tree | None


class ModelFile(BaseModel):
    """Keys of config.json of an exported model that are read; the file has more."""

    model_config = ConfigDict(strict=True)

    family: str
    vocabulary_digest: str
    weights_sha256: str
    model: Tree
    tokens: Tree
    objective: Tree
    levels: dict[str, list[str]] = {}
    supervised_by: list[str] = []
    cell_digests: ListedCells | None = None
    classifier: ClassifierEntry | None = None
    more_classifiers: dict[str, ClassifierEntry] = {}


def unusable(path: Path, problem: str) -> DataError:
    return DataError(f"{path}: {problem}; {REMEDY}")


@contextmanager
def advising(remedy: str = REMEDY) -> Iterator[None]:
    """Add `remedy`, by default for a model folder, to the error of a file that cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}; {remedy}") from None
    except UserError as error:
        raise DataError(f"{str(error).removesuffix('; copy it again')}; {remedy}") from None


def require_model(folder: Path) -> None:
    """Raise DataError unless `folder` has the config.json of a model."""
    if os.path.lexists(folder / "config.json"):
        return
    inner = folder / "model"
    if (inner / "config.json").exists():
        raise DataError(f"{folder}: this is the folder of a run; its model is {inner}")
    raise DataError(
        f"{folder}: no model folder (no config.json); a model is results/runs/RUN/model"
    )


def find_atlas(model: Path, atlas: Path | None) -> Path:
    """Return the folder `atlas`, by default that in the folder `model`.

    Raise DataError with the command that makes it if there is none.
    """
    require_model(model)
    folder = model / ATLAS if atlas is None else atlas
    path = folder / RECORD
    if not path.exists():
        command = f"cellmill atlas --model {shlex.quote(str(model))}"
        if atlas is not None:
            command += f" --atlas {shlex.quote(str(atlas))}"
        command += " --embeddings EMBEDDED.h5ad --labels COLUMN"
        if path.match("results/runs/*/model/atlas/atlas.json"):
            command = f"cellmill run -- {shlex.quote('/'.join(path.parts[-6:]))}"
        raise DataError(f"{path}: no such file; make the atlas first: {command}")
    return folder


def read_model_config(path: Path) -> Tree:
    """Return the contents of config.json of a model. Raise DataError naming what is wrong."""
    require_model(path.parent)
    with advising():
        config = read_json(path)
    version = config.get("format") if isinstance(config, dict) else None
    if version != WEIGHTS_FORMAT:
        raise unusable(path, f"expected a model of format {WEIGHTS_FORMAT}, got {shown(version)}")
    try:
        ModelFile.model_validate(config)
    except ValidationError as error:
        raise unusable(path, error_line(*explain(error, ModelFile))) from None
    return dict(config)
