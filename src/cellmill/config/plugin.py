"""Options of something interchangeable: a model family, an objective, a tokenizer, a tracker, a task, a method.

A contract is a subclass of `Plugin` that sets `kind`, `key` and `default`. Each choice is a subclass of the contract,
listed under its name in `cellmill.registry` or in the entry-point group `cellmill.<kind>` of an installed package.
Validating a mapping against the contract gives the options of the choice that the mapping names. Options are
torch-free; `implementation` names the class that does the work, imported when `load` is called.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from cellmill import registry
from cellmill.config.section import Section, explain
from cellmill.errors import ConfigError


class Plugin(Section):
    """Base of every contract; see the module."""

    kind: ClassVar[str]
    """Kind in the registry."""
    key: ClassVar[str] = "name"
    """Option that names the choice."""
    default: ClassVar[str | None] = None
    """Choice where the key is left out; None requires the key."""
    implementation: ClassVar[str]
    """`package.module:Class`, made from these options."""

    def load(self) -> Any:
        """The class named by `implementation`."""
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(module), name)

    @model_validator(mode="wrap")
    @classmethod
    def _choose(cls, value: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        if "kind" not in cls.__dict__ or isinstance(value, cls):  # a choice itself, or chosen already
            return handler(value)
        if not isinstance(value, dict):
            raise ValueError(f"expected a mapping with `{cls.key}`, got {value!r}")
        name = value.get(cls.key, cls.default)
        if name is None:
            raise ValueError(f"expected `{cls.key}`, one of: {', '.join(registry.names(cls.kind)) or 'none installed'}")
        try:
            choice = registry.load(cls.kind, str(name))
            return choice.model_validate(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        except ValidationError as error:  # one nested in another would be reported as a paragraph
            where, message = explain(error, choice)
            raise ValueError(f"{'.'.join(where)}: {message}" if where else message) from None


def by_name(contract: type[Plugin], value: Any) -> Any:
    """`{name: options}` of several choices of one contract, each validated; options may be null."""
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping of names, got {value!r}")
    chosen = {}
    for name, options in value.items():
        if isinstance(options, Plugin):
            chosen[name] = options
            continue
        if not isinstance(options, dict | None):
            raise ValueError(f"{name}: expected a mapping of options, got {options!r}")
        try:
            chosen[name] = contract.model_validate({**(options or {}), contract.key: name})
        except ValidationError as error:
            where, message = explain(error, contract)
            raise ValueError(f"{'.'.join([str(name), *where])}: {message}") from None
    return chosen
