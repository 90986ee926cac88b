"""translate: a configuration of scModelForge as one of cellmill, with a line on each of its keys."""

from pathlib import Path

import yaml

from cellmill.config.scmodelforge import check_translation, translate
from cellmill.config.yaml_text import read_yaml
from cellmill.errors import ConfigError
from cellmill.files import write_text


def run(*, file: Path, out: Path) -> None:
    """Write the configuration `out`, and its table of datasets beside it as .tsv. Raises ConfigError."""
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{out}: expected a name that ends in .yaml; its table is beside it as .tsv")
    table = out.with_suffix(".tsv")
    for path in (out, table):
        if path.exists():
            raise ConfigError(f"{path} exists; choose another --out")
    made = translate(read_yaml(file), table)
    write_text(table, made.table)
    try:
        check_translation(made, str(file))
    except ConfigError:
        table.unlink()  # or the next try would find it there
        raise
    write_text(out, yaml.safe_dump(made.config, sort_keys=False))
    print("\n".join([*made.lines, f"{file} -> {out}, {table}"]), flush=True)
