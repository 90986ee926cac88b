"""Checked options, from YAML or as an earlier version stored them; errors name the key, the nearest one and the file.

A run's resolved options are stored in its run.json, in each checkpoint's state.json and in exported models. A version
that moves or renames an option translates it in `upgrade_options`; an option added with a default needs nothing,
because validation fills it in. A user's configuration is never translated: an old key there is an error that names its
new place.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from cellmill.config.init_from import check_parents, with_parents
from cellmill.config.options import TrainOptions
from cellmill.config.section import Section, error_line, explain, unknown_key
from cellmill.config.sweep import expand
from cellmill.config.table import check_name
from cellmill.config.workflow import Workflow, entries_of, keys_of, sections_of
from cellmill.config.yaml_text import read_yaml
from cellmill.errors import ConfigError

OBJECTIVE_KEYS = ("mask_frac", "cell_loss_weight")  # in section `model` until 0.1.0, beside `objective`
WITHOUT_BINS = ("rank", "continuous")
"""Tokenizers that had `bins` among their options, though they did not read it, before each had options of its own."""


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
        raise ConfigError(f"{source}: {error_line(_as_written(where, tree), message)}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    check_parents(checked.runs, source, upgrade_options)
    checked.check_datasets(source)
    return checked


def check_options(model: type[BaseModel], options: Any, source: str) -> Any:
    """`options` as a `model`. Raises ConfigError with one line."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"{source}: {error_line(*explain(error, model))}") from None


def upgrade_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return stored options, or some sections of them, with every key under its present name."""
    options = dict(options)
    tokens, model = options.get("tokens"), options.get("model")
    if isinstance(tokens, dict) and tokens.get("tokenizer") in WITHOUT_BINS:
        options["tokens"] = {key: value for key, value in tokens.items() if key != "bins"}
    if isinstance(model, dict) and "objective" in model:
        moved = {key: model[key] for key in OBJECTIVE_KEYS if key in model}
        options["objective"] = {"name": model["objective"], **moved}
        options["model"] = {key: value for key, value in model.items() if key not in ("objective", *OBJECTIVE_KEYS)}
    return options


def stored_options(options: dict[str, Any], source: str) -> TrainOptions:
    """Parse the options stored in `source`. Raises ConfigError if this version cannot read them."""
    return check_options(TrainOptions, upgrade_options(options), source)


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
    for key in tree:
        if key not in top_level(workflow):
            raise ConfigError(unknown_key(str(key), top_level(workflow)))
    merged: dict[str, Any] = {name: tree.get(name) or {} for name in sections_of(workflow)}
    merged |= {name: tree[name] for name in keys_of(workflow) if name in tree}
    for kind, owner in entries_of(workflow).items():
        entries = tree.get(kind)
        if not isinstance(entries, dict) or not entries:
            raise ConfigError(f"{kind}: expected a mapping with at least one name, got {entries!r}")
        _check_names(kind, entries)
        defaults = {name: _mapping(tree.get(name), name) for name in sections_of(owner)}
        merged[kind] = {name: _merge(defaults, _mapping(own, f"{kind}.{name}"), owner) for name, own in entries.items()}
    own = {name: _mapping(given, f"runs.{name}") for name, given in tree["runs"].items()}
    merged["runs"] = with_parents(merged["runs"], own, upgrade_options)
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
    if value in (None, "null"):  # Snakemake's --config makes text of null
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a mapping, got {value!r}")
    return value


def _merge(defaults: dict[str, Any], own: dict[str, Any], owner: type[Section]) -> dict[str, Any]:
    merged = defaults | own
    for name, section in sections_of(owner).items():
        if isinstance(own.get(name), dict | None):
            merged[name] = section.override(defaults[name], own.get(name) or {})
    return merged


def _as_written(where: list[str], tree: dict[str, Any]) -> list[str]:
    """`where`, or the place at the top of the file that a run or corpus inherited the value from."""
    if len(where) > 2 and where[0] in ("corpora", "runs") and where[2] in tree:
        here: Any = tree[where[0]].get(where[1])
        for part in where[2:]:
            if not isinstance(here, dict) or part not in here:
                return where[2:]
            here = here[part]
    return where
