"""Filters of cells: conditions on obs columns in the language of `pandas.DataFrame.query`, checked without pandas.

Comparisons of columns with texts, numbers and lists, joined by and, or, not. Nothing else passes: no attribute, call,
index or `@`, with which pandas would run a user's text as Python. pandas gets the condition written anew, with columns
as c0, c1, ... (`data/obs_columns.py`).
"""

import ast
import re
from typing import NamedTuple

_PARTS = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|`([^`]+)`|([&|])""")
_PLACEHOLDER = "__column_{}"
_OPERATORS = {"&": " and ", "|": " or "}  # as pandas reads them
EXAMPLE = """is_primary_data and assay == "10x 3' v3" """.strip()


class ObsFilter(NamedTuple):
    """A condition on the columns c0, c1, ..."""

    expression: str
    columns: tuple[str, ...]  # obs columns, in the order of their numbers


def parse_filter(text: str) -> ObsFilter:
    """The condition of a filter. Raises ValueError for anything but comparisons of obs columns."""
    quoted: list[str] = []

    def plain(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        if match[3]:
            return _OPERATORS[match[3]]
        quoted.append(match[2])
        return _PLACEHOLDER.format(len(quoted) - 1)

    try:
        tree = ast.parse(_PARTS.sub(plain, text).strip(), mode="eval").body
        columns: dict[str, int] = {}
        names = {_PLACEHOLDER.format(i): name for i, name in enumerate(quoted)}
        condition = _condition(tree, names, columns)
        return ObsFilter(ast.unparse(condition), tuple(columns))
    except SyntaxError as error:
        raise ValueError(f"cannot be read ({error.msg}); expected a condition such as {EXAMPLE}") from None
    except (RecursionError, MemoryError):
        raise ValueError("is nested too deeply; shorten it") from None


def _condition(node: ast.expr, names: dict[str, str], columns: dict[str, int]) -> ast.expr:
    """The same condition over c0, c1, ...; adds its columns to `columns`."""
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(node.op, [_condition(value, names, columns) for value in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        return ast.UnaryOp(ast.Not(), _condition(node.operand, names, columns))
    if isinstance(node, ast.Compare):
        sides = [_side(side, names, columns) for side in (node.left, *node.comparators)]
        for operator, left, right in zip(node.ops, sides, sides[1:]):
            if isinstance(operator, ast.In | ast.NotIn) and not (
                isinstance(left, ast.Name) and isinstance(right, ast.List)
            ):
                raise ValueError("expected a column before `in` and a list of values after it")
        return ast.Compare(sides[0], node.ops, sides[1:])
    if isinstance(node, ast.Name):
        return _column(node, names, columns)
    raise _not_allowed(node)


def _side(node: ast.expr, names: dict[str, str], columns: dict[str, int]) -> ast.expr:
    if isinstance(node, ast.Name):
        return _column(node, names, columns)
    if isinstance(node, ast.List | ast.Tuple):
        return ast.List([_value(value) for value in node.elts], ast.Load())
    return _value(node)


def _column(node: ast.Name, names: dict[str, str], columns: dict[str, int]) -> ast.expr:
    number = columns.setdefault(names.get(node.id, node.id), len(columns))
    return ast.Name(f"c{number}", ast.Load())


def _value(node: ast.expr) -> ast.expr:
    sign = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    plain = node.operand if isinstance(node, ast.UnaryOp) and sign else node
    if not isinstance(plain, ast.Constant) or not isinstance(plain.value, str | int | float):
        raise _not_allowed(node)
    if isinstance(plain.value, str):
        if sign or "`" in plain.value:
            raise _not_allowed(node)
        return plain
    return node


def _not_allowed(node: ast.expr) -> ValueError:
    return ValueError(
        f"has {ast.unparse(node)[:60]!r}; expected comparisons of obs columns with texts, numbers and lists, joined by "
        f"and, or, not, such as {EXAMPLE}"
    )
