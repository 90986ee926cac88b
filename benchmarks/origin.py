"""Machine, commit and Python of a table."""

import platform
import subprocess
from pathlib import Path

import numpy as np


def machine() -> str:
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = [
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        model = f"{len(lines)} x {lines[0].split(': ')[1]}" if lines else model
    return f"{model}, Python {platform.python_version()}, numpy {np.__version__}"


def commit() -> str:
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        command = ["git", *words]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()

    changed = "+" if git("status", "--porcelain", "../src") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed
