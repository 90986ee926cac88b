"""simulate: simulated cells as an .h5ad like a user's, for trials and tests of scale."""

from pathlib import Path

from cellmill.data.counts_writer import count_dtype, write_cells
from cellmill.data.simulate import simulate


def run(*, out: Path, cells: int, genes: int, types: int, batches: int, perturbations: int, seed: int) -> None:
    """Write `cells` simulated cells to `out` (.h5ad), block by block."""
    simulation = simulate(cells, genes, types, batches, perturbations, seed)
    write_cells(out, simulation.obs, simulation.var, simulation.blocks(), None, count_dtype(0))
    print(f"{cells:,} cells x {genes:,} genes -> {out}")
