"""From YAML to a checked `Workflow`, with errors that name the key, the nearest right one and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from cellmill.config.pipeline import CORPUS_SECTIONS, RUN_SECTIONS, CorpusConfig, RunConfig, Workflow, sections_of
from cellmill.config.plugin import Plugin
from cellmill.config.section import explain, unknown_key
from cellmill.errors import ConfigError

CHOICES = {
    name: section
    for owner in (CorpusConfig, RunConfig)
    for name, section in sections_of(owner).items()
    if issubclass(section, Plugin)
}
"""Sections whose options depend on a choice, and the contract of that choice."""
TOP = (*CORPUS_SECTIONS, *RUN_SECTIONS, "report", "corpora", "runs")


def load_config(path: Path) -> Workflow:
    """The configuration in a YAML file. Raises ConfigError with one line that names the key."""
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return check_config(tree, str(path))


def check_config(tree: Any, source: str = "config/config.yaml") -> Workflow:
    """The configuration in a tree of dicts, as Snakemake loads it. Raises ConfigError naming the key in `source`."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: a mapping of sections is wanted, not {type(tree).__name__}")
    for key in tree:
        if key not in TOP:
            raise ConfigError(f"{source}: {unknown_key(str(key), TOP)}")
    merged = {
        "report": tree.get("report") or {},
        "corpora": _with_defaults(tree, "corpora", CORPUS_SECTIONS, source),
        "runs": _with_defaults(tree, "runs", RUN_SECTIONS, source),
    }
    try:
        pipeline = Workflow.model_validate(merged)
        for corpus in pipeline.corpora:
            pipeline.trained_on(corpus)
        for run in pipeline.runs:
            pipeline.evaluated_on(run)
    except ValidationError as error:
        where, message = explain(error, Workflow)
        raise ConfigError(f"{source}: {_line(_as_written(where, tree), message)}") from None
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    return pipeline


def check_options(model: type[BaseModel], options: Any, source: str) -> Any:
    """`options` as a `model`. Raises ConfigError with one line."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_line(*explain(error, model))}") from None


def _line(where: list[str], message: str) -> str:
    return f"{'.'.join(where)}: {message}" if where else message


def _as_written(where: list[str], tree: dict[str, Any]) -> list[str]:
    """A default that every run inherits is reported where it was written: at the top, not in the run."""
    if len(where) > 2 and where[0] in ("corpora", "runs") and where[2] in tree:
        here: Any = {str(name): entry for name, entry in tree[where[0]].items()}.get(where[1])
        for part in where[2:]:
            if not isinstance(here, dict) or part not in here:
                return where[2:]
            here = here[part]
    return where


def _with_defaults(tree: dict[str, Any], kind: str, sections: tuple[str, ...], source: str) -> dict[str, Any]:
    entries = tree.get(kind)
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"{source}: {kind}: at least one is wanted, as a mapping of names")
    defaults = {section: tree.get(section) or {} for section in sections}
    for section, value in defaults.items():
        if not isinstance(value, dict):
            raise ConfigError(f"{source}: {section}: a mapping is wanted, not {value!r}")
    merged = {}
    for name, own in entries.items():
        if own is not None and not isinstance(own, dict):
            raise ConfigError(f"{source}: {kind}.{name}: a mapping is wanted, not {own!r}")
        merged[str(name)] = _merge(defaults, own or {})
    return merged


def _merge(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    merged = dict(defaults)
    for key, value in own.items():
        base = merged.get(key)
        if isinstance(base, dict) and isinstance(value, dict):
            base = dict(base)
            # a length given by the run takes the place of the default's, and another choice shares no option
            if key == "train" and {"steps", "epochs"} & {k for k, v in value.items() if v is not None}:
                base.pop("steps", None)
                base.pop("epochs", None)
            if (contract := CHOICES.get(key)) is not None:
                before = base.get(contract.key, contract.default)
                if value.get(contract.key, before) != before:
                    base = {}
            merged[key] = base | value
        else:
            merged[key] = value
    return merged
