# The configuration that jobs of stages were submitted with. A job of a cluster parses the workflow when it starts, and the
# configuration and the tables of datasets may have been edited while it waited. So the process that submits jobs writes the
# configuration to a file, with copies of the tables, and names it to them; undocumented.smk has how, and what a job finds,
# as `submitted`. A job that finds no such file reads the configuration as it is when the job starts.
import json
from pathlib import Path

from cellmill.config import check_config
from cellmill.files import digest, write_json, write_text

config.update(submitted)  # rules of a user's own read it too


def check_submitted(config, source):
    """Check the configuration that this job was submitted with, or else `config`."""
    return check_config(submitted or config, source)


def write_submitted(config, corpora):
    """Write the configuration for the jobs that this process submits, once."""
    if submitted:
        return
    submitted.update(config)
    folder = Path("results/options/submitted")
    try:
        tree = json.loads(json.dumps(config, allow_nan=False))
    except (TypeError, ValueError):  # JSON has no dates or infinite numbers
        tree = None
    if tree != config:  # nor keys that are numbers
        name_submitted("")
        return
    for name, corpus in corpora.items():
        table = Path(corpus.table).read_text(encoding="utf-8")
        copy = folder / f"{digest(table)[:12]}.tsv"
        if not copy.exists():
            write_text(copy, table)
        written = tree["corpora"][name]
        tree["corpora"][name] = (written if isinstance(written, dict) else {}) | {"table": str(copy)}
    path = folder / f"{digest(tree)[:12]}.json"
    if not path.exists():
        write_json(path, tree)
    name_submitted(path)
