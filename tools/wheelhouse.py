"""Wheels for a machine without a package index: `make wheelhouse`, then `make install WHEELHOUSE=…`
there.

    python tools/wheelhouse.py FOLDER --python 3.12 --platform manylinux_2_28_x86_64 --without torch numpy --set gpu

Versions are those of envs/requirements.lock; it runs in the environment that `make install` made of
it. `--without` names what the other machine has: these packages, and what only they need, are left
out. FOLDER/requirements.txt lists the wheels.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "envs" / "requirements.lock"
TRAIN = (
    "h5py",
    "numpy",
    "psutil",
    "pydantic",
    "pyyaml",
    "safetensors",
    "submitit",
    "threadpoolctl",
    "torch",
)
TEST = ("pytest", "pytest-timeout", "setuptools")  # setuptools installs cellmill itself
SETS: dict[str, tuple[str, ...]] = {
    "all": ("cellmill[demo,dev,hvg]", "setuptools"),
    "run": ("cellmill", "setuptools"),
    "shards": ("anndata", "pandas", "scipy", *TRAIN, *TEST),
    "gpu": (*TRAIN, *TEST),
}
"""`all`: the lock. `run`: every stage, without demo and tests. `shards`: from files to a training.
`gpu`: training on shards, benchmarks/gpu.py and the tests that need a GPU.
"""


def locked() -> dict[str, str]:
    """Versions of the lock by canonical name."""
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def closure(roots: Iterable[str], without: Iterable[str], python: str) -> set[str]:
    """Canonical names of what `roots` need on this Python, without `without` and what only these
    need.
    """
    found: set[tuple[str, str]] = set()
    left_out = {canonicalize_name(name) for name in without} | {"cellmill"}
    waiting = [Requirement(root) for root in roots]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in found or (name in left_out and name != "cellmill"):
                continue
            found.add((name, extra))
            marked = {
                "extra": extra,
                "python_version": python,
                "python_full_version": f"{python}.0",
            }
            needs = map(Requirement, requires(name) or [])
            waiting += [
                need for need in needs if need.marker is None or need.marker.evaluate(marked)
            ]
    return {name for name, _ in found} - left_out


def platforms(newest: str) -> list[str]:
    """`manylinux_2_28_x86_64` and the older platforms whose wheels run there too: pip takes each
    name as it is.
    """
    match = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", newest)
    if match is None:
        raise SystemExit(f"expected a PLATFORM such as manylinux_2_28_x86_64, got {newest}")
    glibc = int(match[1])
    machine = match[2]
    aliases = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    older = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc, 4, -1)]
    return older + [f"{alias}_{machine}" for minor, alias in aliases.items() if minor <= glibc]


def collect(folder: Path, pins: list[str], python: str, platform: str) -> None:
    """Download the wheels; build those of packages that publish only pure Python source."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    target = ["--implementation", "cp", "--python-version", python, "--dest", str(folder)]
    target += [word for name in platforms(platform) for word in ("--platform", name)]
    subprocess.run([*pip, "download", "--quiet", "--no-deps", *target, *pins], check=True)
    torch = [pin for pin in pins if pin.startswith("torch==")]
    if torch:  # CUDA libraries, which the lock does not have
        words = ["--only-binary=:all:", "--constraint", str(LOCK)]
        subprocess.run([*pip, "download", "--quiet", *words, *target, *torch], check=True)
    for source in folder.glob("*.tar.gz"):
        words = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
        subprocess.run([*pip, *words], check=True)
        source.unlink()


def main() -> None:
    """Fill the folder, and print what it takes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--python", default=".".join(map(str, sys.version_info[:2])), help="version, such as 3.12"
    )
    parser.add_argument("--platform", default="manylinux_2_28_x86_64")
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="PACKAGE", help="what the machine has"
    )
    parser.add_argument("--set", choices=SETS, default="all")
    given = parser.parse_args()
    if given.folder.exists() and any(given.folder.iterdir()):
        raise SystemExit(
            f"{given.folder} is not empty: remove it, or set WHEELHOUSE to another folder"
        )
    versions = locked()
    names = closure(SETS[given.set], given.without, given.python)
    missing = sorted(names - versions.keys())
    if missing:
        raise SystemExit(
            f"envs/requirements.lock has no {', '.join(missing)}, needed on Python {given.python}"
        )
    collect(
        given.folder,
        [f"{name}=={versions[name]}" for name in sorted(names)],
        given.python,
        given.platform,
    )
    wheels = sorted(given.folder.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    foreign = [
        wheel.name
        for wheel in wheels
        if f"-linux_{given.platform.rpartition('_')[2]}" in wheel.name
    ]
    if foreign:
        raise SystemExit(
            f"{', '.join(foreign)}: no wheel for {given.platform}, and built here it runs only here"
        )
    pins = sorted("{}=={}".format(*parse_wheel_filename(wheel.name)) for wheel in wheels)
    about = f"# {given.set} for Python {given.python} on {given.platform}"
    about += f", without {' '.join(given.without)}" if given.without else ""
    (given.folder / "requirements.txt").write_text("\n".join([about, *pins, ""]), encoding="utf-8")
    mib = [wheel.stat().st_size / 2**20 for wheel in wheels]
    largest = ", ".join(
        f"{wheel.name.split('-')[0]} {size:.0f}" for wheel, size in zip(wheels[:5], mib)
    )
    print(f"{given.folder}: {len(wheels)} wheels, {sum(mib):.1f} MiB ({largest})")


if __name__ == "__main__":
    main()
