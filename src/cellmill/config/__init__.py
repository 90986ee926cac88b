"""Every option of cellmill: types, defaults, a sentence each, and the checks between them. Torch-free."""

from cellmill.config.load import check_config, check_options, load_config
from cellmill.config.options import OPTIONS
from cellmill.config.pipeline import Pipeline

__all__ = ["OPTIONS", "Pipeline", "check_config", "check_options", "load_config"]
