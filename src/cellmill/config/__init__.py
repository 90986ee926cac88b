"""Every option of cellmill: types, defaults, descriptions, and the checks across sections.
Torch-free.
"""

from cellmill.config.load import check_config, check_options, load_config
from cellmill.config.options import OPTIONS
from cellmill.config.workflow import Workflow

__all__ = ["OPTIONS", "Workflow", "check_config", "check_options", "load_config"]
