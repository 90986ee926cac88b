"""A chart: a table, and the Vega-Lite specification that draws it.

The columns of a table have names that cellmill chooses. Texts of users are only values and titles.
Vega-Lite draws them literally, and does not read them as expressions. Axes and texts have the colour
`currentColor`, so that charts follow the theme of the page.
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
"""Row of a chart's table: values by column."""


def read_template(name: str) -> Any:
    """Read an entry of vega.json. Each call returns a new copy, which the caller may change.

    An entry is the specification of a kind of chart, or `config`, the settings that all charts share.
    """
    text = files("cellmill.report.drawing").joinpath("vega.json").read_text(encoding="utf-8")
    return json.loads(text)[name]


CONFIG = read_template("config")
"""Settings of Vega-Lite that all charts share."""
PALETTE: list[str] = CONFIG["range"]["category"]
"""Twenty colours that can be told apart on a light and a dark background."""


@dataclass(frozen=True)
class Chart:
    """A table and the Vega-Lite specification that draws it."""

    title: str  # in words; screen readers read it, and files are named after it
    rows: Sequence[ChartRow]  # the table
    spec: Spec  # the specification, without the table
    is_umap: bool = False  # True for a UMAP; its thousands of marks are drawn as a bitmap
    # Some columns have codes in place of texts. Each of these columns has its texts here, in the
    # order of the codes. Code -1 stands for the last text, as in Python's indexing.
    texts_by_column: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @cached_property
    def columns(self) -> dict[str, list[Any]]:
        """Values of the table by column. A value is None if its row lacks the column."""
        names = dict.fromkeys(chain.from_iterable(self.rows))
        return {name: [row.get(name) for row in self.rows] for name in names}

    @property
    def csv_columns(self) -> dict[str, list[Any]]:
        """Values of the table by column, with texts in place of codes."""
        columns = dict(self.columns)
        for name, texts in self.texts_by_column.items():
            columns[name] = [texts[code] for code in columns[name]]
        return columns

    @property
    def full_spec(self) -> Spec:
        """The specification, with the settings that all charts share."""
        return self.spec | {"config": CONFIG, "autosize": {"type": "fit-x", "contains": "padding"}}


def choose_colour(number: int) -> str:
    """Choose the colour of class or run `number`, from 0. Colours repeat after the last of PALETTE."""
    return PALETTE[number % len(PALETTE)]


def make_colour_channel(names: Sequence[str], legend_names: Sequence[str]) -> Spec:
    """Make Vega-Lite's channel `color`, which gives each of `names` a colour.

    The chart has a legend if there are several names. The legend lists only `legend_names`.
    """
    colours = [*map(choose_colour, range(len(names)))]
    legend = {"values": legend_names} if len(names) > 1 else None
    return {"scale": {"domain": names, "range": colours}, "legend": legend}


def to_five_digits(value: float) -> float:
    """Round the value to five significant digits."""
    return float(f"{value:.5g}")
