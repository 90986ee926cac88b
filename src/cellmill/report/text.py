"""Values and keys as text of the page."""

from collections.abc import Iterator, Mapping
from typing import Any

from cellmill.files import span
from cellmill.track.follow import flat as values_by_path

UNKNOWN = "–"


def to_words(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


def to_text(value: Any) -> str:
    """A value as text.

    Integers have commas, and numbers from 10,000 on no digits after the point; other numbers have
    four significant digits. None is a dash, and a mapping is its pairs of key and value.
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {to_text(item)}" for key, item in value.items()) or UNKNOWN
    return str(value)


def to_duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else span(seconds)


def to_percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.0f} %"


def abbreviate(name: str) -> str:
    """The name of a method with abbreviations."""
    return name.replace("logistic regression", "LR")


def flatten(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) pairs of nested options in their order; lists are joined by commas."""
    for name, value in values_by_path(tree).items():
        if isinstance(value, list):
            yield name, ", ".join(map(to_text, value)) or "none"
        else:
            yield name, value
