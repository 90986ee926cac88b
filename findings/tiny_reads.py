"""A genome of four genes and reads of five cells of 10x v3, for the scripts of this folder: tiny_reads.py FOLDER.

Every molecule has one read. `mature` ones are from the two exons, `nascent` ones from within the intron.
"""

import random
import sys
from pathlib import Path

draw = random.Random(1)


def bases(n: int) -> str:
    return "".join(draw.choice("ACGT") for _ in range(n))


folder = Path(sys.argv[1])
chromosome, lines, sources = bases(500), [], []
for number in range(1, 5):
    first, intron, second = bases(400), "GT" + bases(296) + "AG", bases(400)
    start = len(chromosome) + 1
    chromosome += first + intron + second
    end = len(chromosome)
    about = f'gene_id "ENSG{number:011d}"; gene_version "1"; transcript_id "T{number}"; transcript_version "1"; '
    about += f'gene_name "G{number}"; gene_biotype "protein_coding"; transcript_biotype "protein_coding";'
    for kind, low, high in (
        ("gene", start, end),
        ("transcript", start, end),
        ("exon", start, start + 399),
        ("exon", end - 399, end),
    ):
        lines.append("\t".join(["1", "tiny", kind, str(low), str(high), ".", "+", ".", about]))
    sources.append({"mature": first + second, "nascent": intron})
    chromosome += bases(500)
cells = [bases(16) for _ in range(5)]
reads = []
for cell in cells:
    for source in sources:
        for kind, n in (("mature", 20), ("nascent", 5)):
            for _ in range(n):
                at = draw.randrange(len(source[kind]) - 89)
                reads.append((cell + bases(12), source[kind][at : at + 90]))
(folder / "genome.fa").write_text(f">1\n{chromosome}\n")
(folder / "genes.gtf").write_text("\n".join(lines) + "\n")
(folder / "barcodes.txt").write_text("\n".join(cells) + "\n")
for side in (0, 1):
    text = "".join(
        f"@r{n}\n{pair[side]}\n+\n{'I' * len(pair[side])}\n" for n, pair in enumerate(reads)
    )
    (folder / f"R{side + 1}.fastq").write_text(text)
print(f"{5 * 4 * 20} mature and {5 * 4 * 5} nascent molecules")
