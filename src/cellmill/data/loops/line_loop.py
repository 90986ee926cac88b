"""Loop over lines of three numbers, compiled by numba on import."""

from typing import Any

import numpy as np

from cellmill.data.loops.jit import compiled

_POWERS = 10.0 ** np.arange(23)  # the powers of ten that a double holds exactly


@compiled(
    *(
        f"int64(uint8[::1], int32[::1], int32[::1], {values}[::1], int64, int64, bool)"
        for values in ("int32", "float64")
    )
)
def parse_triples(
    text: Any, rows: Any, columns: Any, values: Any, n_rows: int, n_columns: int, whole: bool
) -> int:
    """Number of lines; -1 if pandas must parse the text.

    The text ends with a line feed, at which each of the loops stops.
    """
    position = 0
    line = 0
    size = len(text)
    while position < size:
        row = 0
        start = position
        while 48 <= text[position] <= 57:
            row = row * 10 + text[position] - 48
            position += 1
        if (
            row < 1
            or row > n_rows
            or position - start > 10
            or (text[position] != 32 and text[position] != 9)
        ):
            return -1
        while text[position] == 32 or text[position] == 9:
            position += 1
        column = 0
        start = position
        while 48 <= text[position] <= 57:
            column = column * 10 + text[position] - 48
            position += 1
        if (
            column < 1
            or column > n_columns
            or position - start > 10
            or (text[position] != 32 and text[position] != 9)
        ):
            return -1
        while text[position] == 32 or text[position] == 9:
            position += 1
        rows[line] = row - 1
        columns[line] = column - 1
        number = 0
        start = position
        exponent = 0
        n_digits = 0
        while 48 <= text[position] <= 57:
            number = number * 10 + text[position] - 48
            position += 1
        n_digits = position - start
        if not whole and text[position] == 46:
            position += 1
            start = position
            while 48 <= text[position] <= 57:
                number = number * 10 + text[position] - 48
                position += 1
            n_digits += position - start
            exponent = start - position
        if n_digits == 0 or n_digits > (9 if whole else 15):
            return -1
        if not whole and (text[position] == 101 or text[position] == 69):
            position += 1
            is_small = text[position] == 45
            if text[position] == 43 or text[position] == 45:
                position += 1
            power = 0
            start = position
            while 48 <= text[position] <= 57:
                power = power * 10 + text[position] - 48
                position += 1
            if position == start or position - start > 3:
                return -1
            exponent += -power if is_small else power
        while text[position] == 32 or text[position] == 9 or text[position] == 13:
            position += 1
        if text[position] != 10 or exponent < -22 or exponent > 22:
            return -1
        position += 1
        if exponent == 0:
            values[line] = number
        elif exponent > 0:
            values[line] = number * _POWERS[exponent]
        else:
            values[line] = number / _POWERS[-exponent]
        line += 1
    return line
