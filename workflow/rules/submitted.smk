# The configuration that jobs of stages were submitted with. A job of a cluster parses the workflow when it starts, and the
# configuration and the tables of datasets may have been edited while it waited. So the process that submits jobs writes the
# configuration to a file, with copies of the tables, and names it to them; undocumented.smk has how, and what a job finds,
# as `submitted`. A job that finds no such file reads the configuration as it is when the job starts.
import sys
from pathlib import Path

import yaml

from cellmill.config import check_config
from cellmill.files import digest, write_text

config.update(submitted)  # rules of a user's own read it too


def check_submitted(config, source):
    """Check the configuration that this job was submitted with, or else `config`."""
    return check_config(submitted or config, source)


class Dumper(yaml.SafeDumper):
    """Dumper for the mappings of a JSON file too, which Snakemake reads in a type of its own."""


Dumper.add_multi_representer(dict, Dumper.represent_dict)


def write_submitted(config, corpora):
    """Write the configuration for the jobs that this process submits, once. It is YAML: JSON makes texts of keys that are
    numbers, and has no dates or infinite numbers."""
    if submitted:
        return
    submitted.update(config)
    folder = Path("results/options/submitted")
    tree = dict(config, corpora=dict(config["corpora"]))
    for name, corpus in corpora.items():
        table = Path(corpus.table).read_text(encoding="utf-8")
        copy = folder / f"{digest(table)[:12]}.tsv"
        if not copy.exists():
            write_text(copy, table)
        written = tree["corpora"][name]
        tree["corpora"][name] = (written if isinstance(written, dict) else {}) | {"table": str(copy)}
    text = ""
    try:
        text = yaml.dump(tree, Dumper=Dumper, sort_keys=False)
    except yaml.YAMLError:
        pass
    if not text or yaml.safe_load(text) != tree:
        print(
            "cellmill: config has values that YAML cannot keep, so jobs read the configuration when they start: do not"
            " edit it while they wait",
            file=sys.stderr,
        )
        name_submitted("")
        return
    path = folder / f"{digest(text)[:12]}.yaml"
    if not path.exists():
        write_text(path, text)
    name_submitted(path)
