"""simulate: simulated cells or protein sequences as a file like a user's, for trials and tests of scale."""

from pathlib import Path

from cellmill.config.corpus import is_fasta
from cellmill.data.counts_writer import count_dtype, write_cells
from cellmill.data.h5_file import check_h5ad
from cellmill.data.simulate import simulate
from cellmill.data.simulate_sequences import write_sequences


def run(*, out: Path, cells: int, genes: int, types: int, batches: int, perturbations: int, seed: int) -> None:
    """Write `cells` simulated cells to `out` (.h5ad), or as many sequences of `types` families to a FASTA file."""
    if is_fasta(out):
        write_sequences(out, cells, types, seed)
        print(f"{cells:,} sequences -> {out}")
        return
    check_h5ad(out, "--out")
    simulation = simulate(cells, genes, types, batches, perturbations, seed)
    write_cells(out, simulation.obs, simulation.var, simulation.blocks(), None, count_dtype(0))
    print(f"{cells:,} cells x {genes:,} genes -> {out}")
