"""Options of an interchangeable part: model family, objective, tokenizer, fine-tuning method, tracker, task.

A contract is a subclass of `Plugin` that sets `kind`, and `key` and `default` where they differ. Each choice is a
subclass of the contract, listed by name in `cellmill.registry` or in the entry-point group `cellmill.<kind>` of an
installed package. Validating a mapping against the contract gives the options of the choice that the mapping names.
Options are torch-free; `implementation` names the class that does the work, imported when `load` is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from cellmill import registry
from cellmill.config.section import Section, error_line, explain
from cellmill.errors import ConfigError


class Plugin(Section):
    """Base of every contract."""

    kind: ClassVar[str]  # kind in the registry
    key: ClassVar[str] = "name"  # option that names the choice
    default: ClassVar[str | None] = None  # choice if the key is left out; None requires the key
    renamed: ClassVar[dict[str, str]] = {}  # names of earlier versions, and today's
    implementation: ClassVar[str]  # `package.module:Class` that takes these options

    def load(self) -> Any:
        """The class named by `implementation`. Raises ConfigError if it cannot be imported."""
        try:
            return registry.import_object(self.implementation)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self.kind} {getattr(self, self.key)!r}: {self.implementation} cannot be imported "
                f"({registry.in_one_line(error)}); repair or remove the package"
            ) from error

    @classmethod
    def built_in(cls) -> dict[str, type[Plugin]]:
        """Options of every choice that cellmill itself has, by name."""
        return {name: registry.load(cls.kind, name) for name in registry.BUILT_IN[cls.kind]}

    @classmethod
    def override(cls, defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """Another choice than the one at the top inherits the options of the contract alone."""
        name = cls.current(defaults.get(cls.key, cls.default))
        if cls.current(own.get(cls.key, name)) != name:
            defaults = {key: value for key, value in defaults.items() if key in cls.model_fields and key != cls.key}
        return defaults | own

    @classmethod
    def current(cls, name: Any) -> Any:
        """Today's name of a choice."""
        return cls.renamed.get(name, name) if isinstance(name, str) else name

    @model_validator(mode="wrap")
    @classmethod
    def _choose(cls, value: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        if "kind" not in cls.__dict__ or isinstance(value, cls):  # a choice, or options that are validated already
            return handler(value)
        if not isinstance(value, dict):
            raise ValueError(f"expected a mapping with `{cls.key}`, got {value!r}")
        if value.get(cls.key, "null") == "null":  # Snakemake's --config makes text of null
            value = {key: option for key, option in value.items() if key != cls.key}
        name = value.get(cls.key, cls.default)
        if name is None:
            raise ValueError(f"expected `{cls.key}`, one of: {', '.join(registry.names(cls.kind)) or 'none installed'}")
        name = str(cls.current(name))
        return validated(registry.load(cls.kind, name, cls), {**value, cls.key: name}, [])


def by_name(contract: type[Plugin], value: Any, choice: Callable[[str], type[Plugin]] | None = None) -> Any:
    """`{name: options}` of several choices of one contract, each validated; options and the whole may be null.

    `choice` gives the options class of a name, by default that of the registry.
    """
    value = {} if value in (None, "null") else value
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping of names, got {value!r}")
    chosen = {}
    for name, options in value.items():
        options = {} if options in (None, "null") else options
        if not isinstance(name, str):
            raise ValueError(f"names are text, got {name!r}")
        if not isinstance(options, dict | Plugin):
            raise ValueError(f"{name}: expected a mapping of options, got {options!r}")
        if isinstance(options, dict) and options.get(contract.key, name) != name:
            raise ValueError(f"{name}: {contract.key} is {options[contract.key]!r}; leave it out")
        given = options if isinstance(options, Plugin) else {**options, contract.key: name}
        chosen[name] = validated(contract if choice is None else choice(name), given, [str(name)])
    return chosen


def validated(model: type[Plugin], value: Any, outer: list[str]) -> Any:
    """`value` as a `model`; a nested ValidationError, which would print as a paragraph, becomes one line."""
    try:
        return model.model_validate(value)
    except KeyError as error:  # a validator of an installed package; pydantic reports ValueErrors alone
        raise ValueError(f"{model.__module__}.{model.__name__}: {registry.in_one_line(error)}") from None
    except ValidationError as error:
        where, message = explain(error, model)
        raise ValueError(error_line([*outer, *where], message)) from None
