"""The shape every configuration section has: frozen, no unknown keys, a sentence for each field.

YAML as Snakemake loads it gives `3e-4` as a string, so numbers are accepted as text, and so is `null` where null is
allowed; a yes/no is not a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from cellmill.errors import did_you_mean


class Section(BaseModel):
    """Base of every section; see the fields' descriptions for meaning, unit and default."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_not_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if annotation in (int, float, int | None, float | None):
                raise ValueError("a number is wanted, not yes/no")
        if value == "null" and info.field_name is not None and cls._may_be_null(info.field_name):
            return None  # what Snakemake makes of `--config 'train={clip_norm: null}'`
        return value

    @classmethod
    def _may_be_null(cls, field: str) -> bool:
        return type(None) in get_args(cls.model_fields[field].annotation)


def explain(error: ValidationError, model: type[BaseModel]) -> tuple[list[str], str]:
    """Where the first problem of `error` lies and what it is, in one line; `model` is what was validated."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        return where[:-1], unknown_key(where[-1], _fields_at(model, where[:-1]))
    if first["type"] == "missing":
        return where, "is missing"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] != "value_error" and not isinstance(first["input"], dict):
        message += f", not {first['input']!r}"
    return where, message[0].lower() + message[1:]


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The message for a key that does not exist, with the nearest that does."""
    return f"unknown key {key!r}; {did_you_mean(key, known)}"


def _fields_at(model: Any, where: list[str]) -> list[str]:
    for part in where:
        if get_origin(model) is dict:
            model = get_args(model)[1]
        else:
            model = model.model_fields[part].annotation
    return list(model.model_fields)
