"""Calls of SLURM's commands."""

import os
import re
import subprocess

ANSWER_WITHIN_S = 60
NO_PROCESS = "this host allows no further process (ulimit -u); end others of yours, or use another login node"
_FILTERS = ("SQUEUE_", "SCANCEL_", "SACCT_", "SINFO_")  # a job they filter out would seem to be gone


class CommandError(Exception):
    """A command of SLURM is missing, failed or gave no usable answer; the text begins with its name."""


def call(command: list[str], within_s: float | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the filters of the user's environment.

    Raises CommandError if it is missing or does not answer within `within_s` (default: `ANSWER_WITHIN_S`).
    """
    within_s = within_s or ANSWER_WITHIN_S
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal must not cut an answer short
            env={name: value for name, value in os.environ.items() if not name.startswith(_FILTERS)} | environment,
        )
    except FileNotFoundError:
        raise CommandError(f"{command[0]}: not on PATH") from None
    except BlockingIOError:
        raise CommandError(f"{command[0]}: {NO_PROCESS}") from None
    except OSError as error:
        raise CommandError(f"{command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise CommandError(f"{command[0]}: no answer within {within_s:g} s") from None


def ask(command: list[str], within_s: float | None = None, **environment: str) -> str:
    """Output of a command, as `call`. Raises CommandError also if it fails."""
    done = call(command, within_s, **environment)
    if done.returncode:
        complaint = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
        raise CommandError(f"{command[0]}: {complaint.removeprefix(f'{command[0]}: ').removeprefix('error: ')}")
    return done.stdout


def seconds(text: str) -> float | None:
    """Seconds in SLURM's `[[days-]hours:]minutes:seconds`, with or without a fraction; None if it is none."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+(?:\.\d+)?)", text)
    if match is None:
        return None
    days, hours, minutes, rest = (float(part or 0) for part in match.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + rest
