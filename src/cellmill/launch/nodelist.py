"""Host names in SLURM's compressed form."""

import re
from collections.abc import Iterator
from itertools import product


def expand(nodelist: str) -> list[str]:
    """Return the hosts of a node list, in its order: `gpu-[01-02,7],n1` is gpu-01, gpu-02, gpu-7, n1."""
    hosts = []
    for group in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        parts = re.split(r"\[([^\]]*)\]", group)  # text, ranges, text, ranges …
        choices = [[part] if index % 2 == 0 else list(_numbers(part)) for index, part in enumerate(parts)]
        hosts += ["".join(words) for words in product(*choices)]
    return hosts


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1))
