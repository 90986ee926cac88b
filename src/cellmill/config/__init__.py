"""Every option of cellmill: types, defaults, a sentence each, and the checks between them. Torch-free."""

from cellmill.config.load import check_config, check_options, load_config
from cellmill.config.options import OPTIONS
from cellmill.config.pipeline import Workflow

__all__ = ["OPTIONS", "Workflow", "check_config", "check_options", "load_config"]
