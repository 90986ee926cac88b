"""Checked options, from YAML or as a run stored them; errors name the key, the nearest one and the file.

A run's resolved options are stored in its run.json, in each checkpoint's state.json and in exported models. An option
added with a default needs no translation, because validation fills it in. YAML is refused where PyYAML would lose a
part of it or end in a traceback. Torch-free.

A run with `init_from` takes sections from the model that it starts from, and some options must equal the model's.
config.json of an exported model is checked before it is used.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from cellmill.config.datasets import check_name
from cellmill.config.options import TrainOptions
from cellmill.config.parts.family import WEIGHTS_FORMAT, FamilyConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.config.plugin import Plugin
from cellmill.config.published import PublishedFolder, model_folder_of
from cellmill.config.section import Section, error_line, explain, shown, unknown_key
from cellmill.config.workflow import Workflow, entries_of, expand, keys_of, mapping, sections_of
from cellmill.errors import ConfigError, DataError
from cellmill.files import read_json, refuse_special


class _Loader(yaml.SafeLoader):
    """Loader that refuses a key that a mapping has twice, of which PyYAML keeps the last, and 010, 0x10 and 1:30."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                raise ConfigError(f"line {key.start_mark.line + 1}: key {key.value!r} is there twice; remove one")
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        value = self.construct_yaml_int(node)
        digits = node.value.replace("_", "").lstrip("+-")
        if not digits.isdigit() or int(digits) != abs(value):
            raise ConfigError(
                f"line {node.start_mark.line + 1}: {node.value} is {value} in YAML 1.1; write {value}, or "
                f"'{node.value}' in quotes for text"
            )
        return int(value)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def read_yaml(path: Path) -> Any:
    """The tree in a YAML file. Raises ConfigError, or DataError for a FIFO, with one line."""
    refuse_special(path)
    try:
        # a subclass of SafeLoader, which makes texts, numbers, lists and mappings alone
        return yaml.load(Path(path).read_text(encoding="utf-8-sig"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


Tree = dict[str, Any]
INHERITED: dict[str, type[Plugin]] = {"model": FamilyConfig, "tokens": Tokens}


def with_parents(runs: dict[str, Tree], own: Mapping[str, Tree]) -> dict[str, Tree]:
    """The runs, where one that starts from a model of other sizes or tokens than those at the top takes that model's.

    A key that the run itself sets (`own`) stays. A section that suits the model already stays as it is, so that an
    option that is free, such as dropout, is that of the top.
    """
    done: dict[str, Tree] = {}

    def resolved(name: str, above: tuple[str, ...]) -> Tree:
        if name not in done:
            run, parent = runs[name], runs[name].get("init_from")
            if not isinstance(parent, str) or parent in (*above, name):  # a circle is refused later
                theirs: Tree | None = None
            elif parent in runs:
                theirs = resolved(parent, (*above, name))
            else:
                # a model on the hub may not be here yet, and options must not change when it comes
                theirs = None if parent.startswith("hf://") else stored_sections(parent)
            done[name] = run if theirs is None else {**run, **_taken(run, own[name], theirs)}
        return done[name]

    return {name: resolved(name, ()) for name in runs}


def stored_sections(parent: str) -> Tree | None:
    """Sections of the model of a folder, published folder or model of the hub; None if it is not there (yet)."""
    if (published := PublishedFolder.named_by(parent)) is not None:
        return published.sections() if _problem(published) is None else None  # `check_inputs` reports it
    if not (path := Path(model_folder_of(parent), "config.json")).is_file():
        return None
    config = read_json(path)
    if not isinstance(config, dict) or any(not isinstance(config.get(key), dict) for key in INHERITED):
        return None  # stage train reports the error
    # the file of the vectors is where the model was trained; the model has them
    return {"tokens": config["tokens"], "model": {k: v for k, v in config["model"].items() if k != "gene_vectors"}}


def _problem(published: PublishedFolder) -> str | None:
    """What is wrong with the files of the folder."""
    try:
        published.files()
    except DataError as error:
        return str(error)
    return None


def _taken(run: Tree, own: Tree, theirs: Tree) -> Tree:
    """The sections of `run` that must equal the model's."""
    try:
        unlike = {option.partition(".")[0] for option, before, now in weight_pairs(theirs, run) if before != now}
    except (ValidationError, ConfigError):  # the check of the whole reports the error
        return {}
    return {key: INHERITED[key].override(theirs[key], own.get(key) or {}) for key in INHERITED if key in unlike}


def weight_pairs(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Options that must be equal: their names, values of the model `before`, and of a run that starts from it.

    Both are sections `model` and `tokens`, by name. Raises ValidationError or ConfigError for sections that are wrong.
    """
    model, new_model = (FamilyConfig.model_validate(sections["model"]) for sections in (before, now))
    tokens, new_tokens = (Tokens.model_validate(sections["tokens"]) for sections in (before, now))
    for key in dict.fromkeys(("family", *new_model.weight_keys)):
        yield f"model.{key}", getattr(model, key, None), getattr(new_model, key)
    bins = ("bins",) if tokens.value_kind == "class" else ()  # rows of the embedding of values
    for key in ("tokenizer", *bins, *model.token_keys):
        yield f"tokens.{key}", getattr(tokens, key, None), getattr(new_tokens, key, None)


def check_parents(runs: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for a run whose model or tokens differ from the model that it starts from."""
    for name, run in runs.items():
        parent = run.init_from
        if parent is None:
            continue
        before = vars(runs[parent]) if parent in runs else stored_sections(parent)
        if before is None:
            continue
        try:
            pairs = [*weight_pairs(before, vars(run))]
        except (ValidationError, ConfigError):  # of the model's own file: stage train reports the error
            continue
        for option, value, now in pairs:
            if value != now:
                raise ConfigError(f"{source}: runs.{name}: {unequal(option, now, parent, value)}")


def unequal(option: str, now: Any, parent: Path | str, before: Any) -> str:
    """Message on an option of a run that must equal the one of the model it starts from."""
    return f"{option} is {now!r}, the model to start from ({parent}) has {before!r}; make them equal"


def load_config(path: Path) -> Workflow:
    """Configuration of a YAML file. Raises ConfigError with one line that names the key."""
    return check_config(read_yaml(path), str(path))


def check_config(tree: Any, source: str = "config/config.yaml", workflow: type[Workflow] = Workflow) -> Workflow:
    """Configuration of a tree of dicts, as Snakemake loads it. Raises ConfigError naming the key in `source`."""
    try:
        tree = with_sweeps(tree)
        checked = workflow.model_validate(with_defaults(tree, workflow))
    except ValidationError as error:
        where, message = explain(error, workflow)
        for name, run in tree["runs"].items():  # without its parent's sections a run may be wrong
            published = PublishedFolder.named_by(str((run or {}).get("init_from")))
            if where[-1:] != ["init_from"] and published is not None and (problem := _problem(published)) is not None:
                where, message = ["runs", name, "init_from"], problem
        raise ConfigError(f"{source}: {error_line(_as_written(where, tree), message)}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    check_parents(checked.runs, source)
    checked.check_datasets(source)
    return checked


def check_options(model: type[BaseModel], options: Any, source: str) -> Any:
    """`options` as a `model`. Raises ConfigError with one line."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"{source}: {error_line(*explain(error, model))}") from None


def stored_options(options: dict[str, Any], source: str) -> TrainOptions:
    """Parse the options stored in `source`. Raises ConfigError if this version cannot read them."""
    return check_options(TrainOptions, options, source)


def top_level(workflow: type[Workflow] = Workflow) -> dict[str, type[Section] | None]:
    """Keys of a configuration file: every section, and None for the mappings of corpora and runs and single keys."""
    owners = entries_of(workflow)
    inherited = {name: section for owner in owners.values() for name, section in sections_of(owner).items()}
    return {**inherited, **sections_of(workflow), **dict.fromkeys([*keys_of(workflow), *owners])}


def with_sweeps(tree: Any) -> Any:
    """The tree with the runs of its sweeps among the others."""
    if not isinstance(tree, dict) or tree.get("sweep") is None:
        return tree
    own = _mapping(tree.get("runs"), "runs")
    return {**tree, "runs": {**own, **expand(tree["sweep"], own)[0]}}


def with_defaults(tree: Any, workflow: type[Workflow] = Workflow) -> dict[str, Any]:
    """The tree with the sections at its top merged into each corpus and run."""
    if not isinstance(tree, dict):
        raise ConfigError(f"expected a mapping of sections, got {type(tree).__name__}")
    known = top_level(workflow)
    if wrong := [str(key) for key in tree if key not in known]:
        raise ConfigError(unknown_key(wrong[0], known))
    merged: dict[str, Any] = {name: tree.get(name) or {} for name in sections_of(workflow)}
    merged |= {name: tree[name] for name in keys_of(workflow) if name in tree}
    for kind, owner in entries_of(workflow).items():
        entries = tree.get(kind)
        if not isinstance(entries, dict) or not entries:
            raise ConfigError(f"{kind}: expected a mapping with at least one name, got {entries!r}")
        _check_names(kind, entries)
        defaults = {name: _mapping(tree.get(name), name) for name in sections_of(owner)}
        merged[kind] = {}
        for name, given in entries.items():
            own = _mapping(given, f"{kind}.{name}")
            merged[kind][name] = defaults | own
            for section, options in sections_of(owner).items():
                if isinstance(own.get(section), dict | None):
                    merged[kind][name][section] = options.override(defaults[section], own.get(section) or {})
    own = {name: _mapping(given, f"runs.{name}") for name, given in tree["runs"].items()}
    merged["runs"] = with_parents(merged["runs"], own)
    return merged


def _check_names(kind: str, names: Iterable[Any]) -> None:
    for name in names:
        if not isinstance(name, str):  # 007 is 7 by now
            raise ConfigError(f"{kind}: YAML reads a name as {name}; add a letter to it")
        try:
            check_name(name)
        except ValueError as error:
            raise ConfigError(f"{kind}: {error}") from None
        if name.endswith(".h5ad"):
            raise ConfigError(f"{kind}: {name} is the name of a file; set {name.removesuffix('.h5ad')}, without .h5ad")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    return {} if value in (None, "null") else mapping(value, where)  # Snakemake's --config makes text of null


def _as_written(where: list[str], tree: dict[str, Any]) -> list[str]:
    """`where`, or the place at the top of the file that a run or corpus inherited the value from."""
    if len(where) > 2 and where[0] in ("corpora", "runs") and where[2] in tree:
        here: Any = tree[where[0]].get(where[1])
        for part in where[2:]:
            if not isinstance(here, dict) or part not in here:
                return where[2:]
            here = here[part]
    return where


class ModelFile(BaseModel):
    """Keys of config.json of an exported model that are read; it has others beside them."""

    model_config = ConfigDict(strict=True)

    family: str
    vocabulary_digest: str
    weights_sha256: str
    model: dict[str, Any]
    tokens: dict[str, Any]
    objective: dict[str, Any]
    levels: dict[str, list[str]] = {}
    supervised_by: list[str] = []


def unusable(path: Path, problem: str) -> DataError:
    return DataError(f"{path}: {problem}; export the model again (consolidate)")


def read_model_config(path: Path) -> dict[str, Any]:
    """Return the contents of config.json of a model. Raises DataError naming what is wrong."""
    config = read_json(path)
    version = config.get("format") if isinstance(config, dict) else None
    if version != WEIGHTS_FORMAT:
        raise unusable(path, f"expected a model of format {WEIGHTS_FORMAT}, got {shown(version)}")
    try:
        ModelFile.model_validate(config)
    except ValidationError as error:
        raise unusable(path, error_line(*explain(error, ModelFile))) from None
    return dict(config)
