# The configuration files, read before Snakemake reads the workflow's own: its parser takes the last of two keys, names no
# line, waits for a FIFO without end, and ends in a traceback where a file is nested too deeply.
import sys
from pathlib import Path

from cellmill.config.load import read_yaml
from cellmill.errors import UserError

own = [] if workflow.config_settings.replace_workflow_config else [Path("config/config.yaml")]
try:
    for path in [*filter(Path.exists, own), *workflow.configfiles]:
        read_yaml(path)
except UserError as error:
    sys.exit(f"cellmill: {error}")
