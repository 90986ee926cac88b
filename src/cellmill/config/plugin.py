"""Options of an interchangeable part, such as a model family, an objective or a task.

Two kinds have no options. The entry point of an `input` is a `cellmill.data.inputs.source.Format`;
the entry point of a `classifier` is a function that returns an unfitted classifier of
scikit-learn's kind.

A contract is a subclass of `Plugin`. Each choice is a subclass of the contract: one in
`config/parts`, or one in the entry-point group `cellmill.<kind>` of an installed package, which
never replaces a built-in. Validating a mapping against the contract gives the options of the choice
that the mapping names. Options are torch-free.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, ClassVar, get_args

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from cellmill.config.section import Section, description, error_line, explain
from cellmill.errors import ConfigError, did_you_mean

BUILT_IN: dict[str, dict[str, type[Plugin]]] = {"input": {}, "classifier": {}}
"""Options classes of cellmill's own choices, by kind and name; formats are rows of
`data/inputs/formats.py`.
"""


def names(kind: str) -> list[str]:
    """Every available name of `kind`, built-ins first."""
    installed = [point.name for point in entry_points(group=f"cellmill.{kind}")]
    return [*BUILT_IN[kind], *(name for name in installed if name not in BUILT_IN[kind])]


def declaring_packages(kind: str, chosen: list[str]) -> list[str]:
    """Packages whose entry points declare the names `chosen`; that of an object may be another."""
    points = entry_points(group=f"cellmill.{kind}")
    return [point.module.partition(".")[0] for point in points if point.name in chosen]


def unknown(kind: str, name: str) -> ConfigError:
    """The error about a name that no choice of `kind` has."""
    return ConfigError(f"unknown {kind} {name!r}; {did_you_mean(name, names(kind))}")


def load(kind: str, name: str, contract: Any = None) -> Any:
    """The options class `name`.

    Raise ConfigError if it is unknown, not importable, or does not fulfil `contract`.
    """
    if name in BUILT_IN[kind]:
        return BUILT_IN[kind][name]
    classes = {}
    for point in entry_points(group=f"cellmill.{kind}"):
        if point.name == name:
            package = point.dist.name if point.dist is not None else "an installed package"
            classes[f"{point.value} of {package}"] = point
    if not classes:
        raise unknown(kind, name)
    if len(classes) > 1:
        raise ConfigError(
            f"{kind} {name!r} is in {' and '.join(sorted(classes))}; remove one of the packages"
        )
    [(where, point)] = classes.items()
    try:
        options = point.load()
        problem = _misfit(options, contract, name) if contract is not None else ""
    except (Exception, SystemExit) as error:  # the user has to know the package
        problem = f"cannot be imported ({in_one_line(error)})"
    if problem:
        raise ConfigError(f"{kind} {name!r}: {where} {problem}; repair or remove the package")
    return options


def _misfit(options: Any, contract: Any, name: str) -> str:
    """Why an installed object cannot be the options class of the choice `name`; empty if it can."""
    if not isinstance(options, type) or not issubclass(options, contract) or options is contract:
        return f"is no subclass of {contract.__module__}.{contract.__name__}"
    field = options.model_fields[contract.key]  # type: ignore[attr-defined]
    if name not in get_args(field.annotation):
        return f"has options of another name: expected {contract.key}: Literal[{name!r}]"
    module, _, attribute = getattr(options, "implementation", "").partition(":")
    if not attribute:
        return "sets no `implementation`, expected 'package.module:Class'"
    if find_spec(module) is None:
        return f"has an implementation in {module}, which does not exist"
    return ""


def in_one_line(error: BaseException) -> str:
    """Type and text of an error of somebody else's code, in at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def import_object(path: str) -> Any:
    """The object at `package.module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def refuse_former_names(choice: type, names: Mapping[str, str]) -> None:
    """Raise ConfigError if a class defines an attribute by a former name.

    `names` has the new name by the former one. Ignored, such an attribute would change a training
    silently.
    """
    for former, name in names.items():
        if former in vars(choice):
            raise ConfigError(
                f"{choice.__module__}.{choice.__name__}.{former}: expected {name}, its new name; rename it"
            )


class Plugin(Section):
    """Base of every contract."""

    kind: ClassVar[str]  # kind in the registry
    key: ClassVar[str] = "name"  # option that names the choice
    default: ClassVar[str | None] = None  # choice if the key is left out; None requires the key
    implementation: ClassVar[str]  # `package.module:Class` that takes these options

    def load(self) -> Any:
        """The class named by `implementation`. Raise ConfigError if it cannot be imported."""
        try:
            return import_object(self.implementation)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self.kind} {getattr(self, self.key)!r}: {self.implementation} cannot be imported "
                f"({in_one_line(error)}); repair or remove the package"
            ) from error

    @classmethod
    def built_in(cls) -> dict[str, type[Plugin]]:
        """Options of cellmill's own choices, by name."""
        return dict(BUILT_IN[cls.kind])

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if cls.__module__.startswith("cellmill.config.parts."):
            choices = BUILT_IN.setdefault(cls.kind, {})
            # a Literal: a choice, not a contract
            if get_args(cls.model_fields[cls.key].annotation):
                # a sum derives classes of its parts
                choices.setdefault(cls.model_fields[cls.key].default, cls)

    @classmethod
    def override(cls, defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """Another choice than the one at the top inherits only the options of the contract."""
        name = defaults.get(cls.key, cls.default)
        if own.get(cls.key, name) != name:
            shared = cls.model_fields.keys() - {cls.key}
            defaults = {key: value for key, value in defaults.items() if key in shared}
        return defaults | own

    @model_validator(mode="wrap")
    @classmethod
    def _choose(cls, value: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        # a choice, or options that are validated already
        if "kind" not in cls.__dict__ or isinstance(value, cls):
            return handler(value)
        if not isinstance(value, dict):
            raise ValueError(f"expected a mapping with `{cls.key}`, got {value!r}")
        name = value.get(cls.key, cls.default)
        if name == "null":  # Snakemake's --config makes text of null
            name = cls.default
        if name is None:
            raise ValueError(
                f"expected `{cls.key}`, one of: {', '.join(names(cls.kind)) or 'none installed'}"
            )
        return validated(load(cls.kind, str(name), cls), {**value, cls.key: str(name)}, [])


def by_name(
    contract: type[Plugin], value: Any, choice: Callable[[str], type[Plugin]] | None = None
) -> Any:
    """Validated `{name: options}` of several choices of a contract.

    With `choice`, which gives the class of a choice, any name may be used if the options have
    `contract.key`.
    """
    value = {} if value in (None, "null") else value
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping of names, got {value!r}")
    chosen = {}
    for key, options in value.items():
        options = {} if options in (None, "null") else options
        if not isinstance(key, str) or not isinstance(options, dict | Plugin):
            raise ValueError(f"{key}: expected a name and a mapping of options, got {options!r}")
        given = {contract.key: key, **dict(options)}
        name = str(given[contract.key])
        if name != key and choice is None:
            raise ValueError(f"{key}: {contract.key} is {name!r}; leave it out")
        chosen[key] = validated(contract if choice is None else choice(name), given, [key])
    return chosen


def validated(model: type[Plugin], value: Any, outer: list[str]) -> Any:
    """`value` as a `model`.

    A nested ValidationError, which would print as a paragraph, becomes one line.
    """
    try:
        return model.model_validate(value)
    except KeyError as error:  # a validator of an installed package; pydantic expects ValueErrors
        raise ValueError(f"{model.__module__}.{model.__name__}: {in_one_line(error)}") from None
    except ValidationError as error:
        where, message = explain(error, model)
        if message == "is missing" and where[0] in model.model_fields:
            message += f" ({description(model, where[0]).rstrip('.')})"
        raise ValueError(error_line([*outer, *where], message)) from None
