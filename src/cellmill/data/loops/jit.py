"""Compilation by numba; imported only where numba is installed."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(*signatures: str) -> Callable[[Any], Any]:
    """Decorator that compiles a function, into numba's cache where that can be written."""

    def compile_function(function: Any) -> Any:
        try:
            return njit(list(signatures), nogil=True, cache=True)(function)
        except (OSError, RuntimeError):  # a full disk, or no folder for the cache
            return njit(list(signatures), nogil=True)(function)

    return compile_function
