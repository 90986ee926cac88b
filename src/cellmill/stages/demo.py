"""demo: 700 real blood cells from the scanpy package, as an .h5ad like a user's."""

from pathlib import Path

from cellmill.data.counts_writer import count_dtype, write_cells
from cellmill.data.demo import read_demo, shipped_file


def run(*, out: Path) -> None:
    """Write the demo cells to `out` (.h5ad)."""
    obs, var, counts = read_demo(shipped_file())
    write_cells(out, obs, var, [counts], counts.nnz, count_dtype(int(counts.data.max())))
    print(f"{len(obs):,} cells x {len(var):,} genes -> {out}")
