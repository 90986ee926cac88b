"""A genome of a few genes, and reads of single cells from it, with a fixed seed: the truth of what
programs count.

Reads are those of 10x v3: 16 bases of a barcode and 12 of a UMI, and a read of the transcript. Each
molecule gives one to three reads. Spliced molecules give reads of exons, unspliced ones reads
within the intron.
"""

import gzip
import random
from pathlib import Path
from typing import NamedTuple

GENES = [f"ENSG{number:011d}" for number in range(1, 13)]
SYMBOLS = [f"TINY{number}" for number in range(1, 13)]
_EXON = 400
_INTRON = 300
_READ = 90
Counts = dict[tuple[str, str], int]


class TinyGenome(NamedTuple):
    """Files, and counts of molecules by cell and gene."""

    fasta: Path
    gtf: Path
    barcodes: Path  # every barcode of a cell, one a line
    reads: tuple[Path, Path]
    spliced: Counts
    unspliced: Counts
    cells: list[str]

    @property
    def total(self) -> Counts:
        """Spliced and unspliced molecules."""
        every = sorted({*self.spliced, *self.unspliced})
        return {key: self.spliced.get(key, 0) + self.unspliced.get(key, 0) for key in every}


def write_genome(folder: Path, with_introns: bool = False, seed: int = 0) -> TinyGenome:
    """Write the genome, its annotation, and reads of 20 cells."""
    draw = random.Random(seed)

    def bases(n: int) -> str:
        return "".join(draw.choice("ACGT") for _ in range(n))

    exons = {gene: (bases(_EXON), bases(_EXON)) for gene in GENES}
    introns = {gene: "GT" + bases(_INTRON - 4) + "AG" for gene in GENES}
    spacers = [bases(500) for _ in range(len(GENES) + 1)]
    chromosome = spacers[0]
    lines = []
    for gene, symbol, spacer in zip(GENES, SYMBOLS, spacers[1:]):
        start = len(chromosome) + 1
        first, second = exons[gene]
        chromosome += first + introns[gene] + second
        end = len(chromosome)
        parts = [("gene", start, end), ("transcript", start, end)]
        parts += [("exon", start, start + _EXON - 1), ("exon", end - _EXON + 1, end)]
        for kind, low, high in parts:
            about = f'gene_id "{gene}"; gene_version "1"; transcript_id "{gene}T"; transcript_version "1"; '
            about += f'gene_name "{symbol}"; gene_biotype "protein_coding"; transcript_biotype "protein_coding";'
            lines.append("\t".join(["1", "tiny", kind, str(low), str(high), ".", "+", ".", about]))
        chromosome += spacer
    folder.mkdir(parents=True, exist_ok=True)
    fasta = folder / "genome.fa"
    gtf = folder / "genes.gtf"
    barcodes = folder / "barcodes.txt"
    fasta.write_text(
        ">1\n" + "\n".join(chromosome[at : at + 60] for at in range(0, len(chromosome), 60)) + "\n"
    )
    gtf.write_text("\n".join(lines) + "\n")
    cells = sorted({bases(16) for _ in range(20)})
    barcodes.write_text("".join(f"{cell}\n" for cell in cells))
    spliced: Counts = {}
    unspliced: Counts = {}
    pairs = []
    for cell in cells:
        for gene in GENES:
            for kind, counts, most in (
                ("mature", spliced, 6),
                ("nascent", unspliced, 3 if with_introns else 0),
            ):
                n_molecules = draw.randint(0, most)
                if n_molecules:
                    counts[cell, gene] = n_molecules
                for _ in range(n_molecules):
                    umi = bases(12)
                    for _ in range(draw.randint(1, 3)):
                        source = "".join(exons[gene]) if kind == "mature" else introns[gene]
                        at = draw.randrange(len(source) - _READ + 1)
                        pairs.append((cell + umi, source[at : at + _READ]))
    draw.shuffle(pairs)
    reads = folder / "R1.fastq.gz", folder / "R2.fastq.gz"
    for side, path in enumerate(reads):
        text = "".join(
            f"@r{n}\n{pair[side]}\n+\n{'I' * len(pair[side])}\n" for n, pair in enumerate(pairs)
        )
        path.write_bytes(gzip.compress(text.encode()))
    return TinyGenome(fasta, gtf, barcodes, reads, spliced, unspliced, cells)
