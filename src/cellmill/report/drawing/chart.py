"""A chart: a table and the Vega-Lite specification that draws it.

Names of columns are our own. Users' texts are only values and titles, which Vega-Lite draws
literally. Lines and texts have `currentColor`, so that charts follow the theme of the page.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from itertools import chain
from typing import Any

Spec = dict[str, Any]
"""A Vega-Lite specification, or a part of one."""
ChartRow = dict[str, Any]
"""Row of a chart's table, by column."""


def read_template(name: str) -> Any:
    """A copy of a specification in vega.json, or of the settings `config` that all charts share."""
    text = files("cellmill.report.drawing").joinpath("vega.json").read_text(encoding="utf-8")
    return json.loads(text)[name]


CONFIG = read_template("config")
PALETTE: list[str] = CONFIG["range"]["category"]
"""Twenty colours that can be told apart on a light and a dark background."""


@dataclass(frozen=True)
class Chart:
    """A table and the Vega-Lite specification that draws it."""

    title: str  # in words: read by screen readers, and the name of its files
    rows: Sequence[ChartRow]  # all that is drawn
    spec: Spec  # without the data
    is_umap: bool = False  # its thousands of marks are drawn as a bitmap
    # For each column whose rows have codes, its texts in the order of the codes. Code -1 is the last
    # one, as in Python's indexing.
    texts_by_code: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @cached_property
    def columns(self) -> dict[str, list[Any]]:
        """Values of the table by column; None if a row has no value."""
        names = dict.fromkeys(chain.from_iterable(self.rows))
        return {name: [row.get(name) for row in self.rows] for name in names}

    @property
    def csv_columns(self) -> dict[str, list[Any]]:
        """The columns with texts in place of codes."""
        columns = dict(self.columns)
        for name, texts in self.texts_by_code.items():
            columns[name] = [texts[code] for code in columns[name]]
        return columns

    @property
    def full_spec(self) -> Spec:
        """The specification with the settings that all charts share."""
        return self.spec | {"config": CONFIG, "autosize": {"type": "fit-x", "contains": "padding"}}


def colour(number: int) -> str:
    """Colour of class or run `number`. Colours repeat after the last of PALETTE."""
    return PALETTE[number % len(PALETTE)]


def make_colour_channel(names: Sequence[str], legend_names: Sequence[str]) -> Spec:
    """Vega-Lite's `color` channel: a colour for each name, and a legend if there are several.

    The legend lists only `legend_names`.
    """
    colours = [*map(colour, range(len(names)))]
    legend = {"values": legend_names} if len(names) > 1 else None
    return {"scale": {"domain": names, "range": colours}, "legend": legend}


def to_five_digits(value: float) -> float:
    """The value with five significant digits."""
    return float(f"{value:.5g}")
