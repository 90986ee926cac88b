"""Write src/cellmill/data/ontology/cell_ontology.tsv.gz from an unpacked wheel; see the README.md
beside the table.

    python tools/cell_ontology.py CELLXGENE_ONTOLOGY_GUIDE_FOLDER

The same input gives the same bytes. Requires the command zstd.
"""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RELEASE = "v2026-03-26"
OUT = Path(__file__).parents[1] / "src" / "cellmill" / "data" / "ontology" / "cell_ontology.tsv.gz"


def main(folder: Path) -> None:
    source = folder / "cellxgene_ontology_guide" / "data" / f"CL-ontology-{RELEASE}.json.zst"
    text = subprocess.run(["zstd", "-dc", str(source)], check=True, capture_output=True).stdout
    rows = rows_of(json.loads(text))
    lines = ["\t".join(row) for row in [("id", "name", "parents"), *rows]]
    with (
        open(OUT, "wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as file,
    ):
        file.write(("\n".join(lines) + "\n").encode())
    print(f"{len(rows):,} terms -> {OUT} ({OUT.stat().st_size:,} bytes)")


def rows_of(terms: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Id, name and parents of each term in use; parents are the superclasses at distance 1, joined
    by |.

    Terms that reach the root through other ontologies alone (parts of cells, such as `banded
    nucleus`) are left out.
    """
    rows = []
    for term, entry in sorted(terms.items()):
        parents = sorted(above for above, distance in entry["ancestors"].items() if distance == 1)
        if not entry["deprecated"] and (parents or not entry["ancestors"]):
            rows.append((term, entry["label"], "|".join(parents)))
    return rows


if __name__ == "__main__":
    main(Path(sys.argv[1]))
