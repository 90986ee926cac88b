"""The compiled loops over cells: loaded once they pay off.

Importing `data.loops.cell_loops` compiles its loops. A process does so after it has handled many
values. Until then, and where numba is not installed, numpy does the work. The main thread waits for
them: numba enters `warnings.catch_warnings` thousands of times, which is not thread-safe, and
warnings of another thread that compiles would be lost. Other threads load them in the background.
"""

import importlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# values that a process handles before the loops pay off; loading them costs 100 MB of memory, and
# about 1 s from numba's cache
MIN_VALUES = 1 << 23


class CompiledLoops:
    """The loops of this process, compiled after it has handled `min_values` values."""

    def __init__(self, min_values: int = MIN_VALUES) -> None:
        self._n_left = min_values
        self._loading: Future[Any] | None = None

    def loops_for(self, n_values: int) -> Any:
        """Return the module of loops; None without numba, or while another thread loads them.

        `n_values` is the number of values to be handled. It counts towards `min_values`.
        """
        self._n_left -= n_values
        if self._n_left > 0:
            return None
        if self._loading is None and threading.current_thread() is threading.main_thread():
            self._loading = Future()
            self._loading.set_result(load_loops())
        elif self._loading is None:
            pool = ThreadPoolExecutor(1, thread_name_prefix="cellmill-compile")
            self._loading = pool.submit(load_loops)
            pool.shutdown(wait=False)
        return self._loading.result() if self._loading.done() else None

    def expect(self, n_values: int) -> None:
        """Announce that `n_values` values will be handled. If compiling pays off, wait for it."""
        self.loops_for(n_values)
        if self._loading is not None:
            self._loading.result()


def load_loops() -> Any:
    """Import the module of loops; None without numba.

    This takes about 1 s, or some 15 s if the loops are not in numba's cache and are compiled.
    """
    try:
        return importlib.import_module("cellmill.data.loops.cell_loops")
    except ImportError:
        return None


COMPILED = CompiledLoops()
