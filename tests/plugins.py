"""The toy plug-ins of tests/plugin, installed by pip as any package is, but into a folder of the test session's own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).resolve().parent / "plugin"


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of processes that find the toys through their entry points; this process does not."""
    folder = tmp_path_factory.mktemp("plugins")
    source, target = folder / "source", folder / "site"
    shutil.copytree(PLUGIN, source, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "build"))
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    words = [sys.executable, "-m", "pip", "install", *flags, "--target", str(target), str(source)]
    # pip warns of itself
    quiet = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    subprocess.run(words, check=True, env=quiet)
    path = os.pathsep.join(part for part in (str(target), os.environ.get("PYTHONPATH", "")) if part)
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
