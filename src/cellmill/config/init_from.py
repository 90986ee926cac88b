"""The model that a run starts from (`init_from`): sections that the run takes from it, and what must be equal."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from cellmill.config.family import FamilyConfig
from cellmill.config.plugin import Plugin
from cellmill.config.tokens import Tokens
from cellmill.errors import ConfigError
from cellmill.files import read_json

Tree = dict[str, Any]
SECTIONS: dict[str, type[Plugin]] = {"model": FamilyConfig, "tokens": Tokens}


def with_parents(runs: dict[str, Tree], own: Mapping[str, Tree], upgrade: Callable[[Tree], Tree]) -> dict[str, Tree]:
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
                theirs = None if parent.startswith("hf://") else stored_sections(parent, upgrade)
            done[name] = run if theirs is None else {**run, **_taken(run, own[name], theirs)}
        return done[name]

    return {name: resolved(name, ()) for name in runs}


def stored_sections(parent: str, upgrade: Callable[[Tree], Tree]) -> Tree | None:
    """Sections of config.json of a model folder, or of a model of the hub; None if it is not there (yet)."""
    folder = Path("results/hub", parent.removeprefix("hf://")) if parent.startswith("hf://") else Path(parent)
    if not (path := folder / "config.json").is_file():
        return None
    config = read_json(path)
    if not isinstance(config, dict) or any(not isinstance(config.get(key), dict) for key in SECTIONS):
        return None  # stage train says what is wrong with it
    config = upgrade(config)
    # the file of the vectors is where the model was trained; the model has them
    return {"tokens": config["tokens"], "model": {k: v for k, v in config["model"].items() if k != "gene_vectors"}}


def _taken(run: Tree, own: Tree, theirs: Tree) -> Tree:
    """The sections of `run` that must be those of the model."""
    taken = {}
    for key, contract in SECTIONS.items():
        try:
            before, now = contract.model_validate(theirs[key]), contract.model_validate(run[key])
        except (ValidationError, ConfigError):  # the check of the whole says what is wrong
            continue
        if any(value != other for _, value, other in weight_pairs(before, now)):
            taken[key] = contract.override(theirs[key], own.get(key) or {})
    return taken


def weight_pairs(before: BaseModel, now: BaseModel) -> Iterator[tuple[str, Any, Any]]:
    """Options of section model or tokens that must be equal: their names, values of the model, and of the run."""
    if isinstance(now, FamilyConfig):
        for key in dict.fromkeys(("family", *now.weight_keys)):
            yield f"model.{key}", getattr(before, key, None), getattr(now, key)
    elif isinstance(before, Tokens) and isinstance(now, Tokens):
        yield "tokens.tokenizer", before.tokenizer, now.tokenizer
        if before.value_kind == "class":  # rows of the embedding of values
            yield "tokens.bins", getattr(before, "bins", None), getattr(now, "bins", None)


def check_parents(runs: Mapping[str, Any], source: str, upgrade: Callable[[Tree], Tree]) -> None:
    """Raise ConfigError for a run whose model or tokens cannot be those of the model that it starts from."""
    for name, run in runs.items():
        parent = run.init_from
        if parent is None:
            continue
        for key, contract in SECTIONS.items():
            if parent in runs:
                before = getattr(runs[parent], key)
            elif (theirs := stored_sections(parent, upgrade)) is None:
                continue
            else:
                try:
                    before = contract.model_validate(theirs[key])
                except (ValidationError, ConfigError):  # stage train says what is wrong with it
                    continue
            for option, value, now in weight_pairs(before, getattr(run, key)):
                if value != now:
                    raise ConfigError(f"{source}: runs.{name}: {unequal(option, now, parent, value)}")


def unequal(option: str, now: Any, parent: Path | str, before: Any) -> str:
    """Message on an option of a run that must be that of the model it starts from."""
    return f"{option} is {now!r}, the model to start from ({parent}) has {before!r}; make them equal"
