"""YAML of a configuration file, refused where PyYAML would lose a part of it or end in a traceback."""

from pathlib import Path
from typing import Any

import yaml

from cellmill.errors import ConfigError
from cellmill.files import refuse_special


class _Loader(yaml.SafeLoader):
    """Loader that refuses a key that a mapping has twice, of which PyYAML keeps the last, and 010, 0x10 and 1:30."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                raise ConfigError(f"line {key.start_mark.line + 1}: key {key.value!r} is there twice; remove one")
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        value = self.construct_yaml_int(node)
        digits = node.value.replace("_", "").lstrip("+-")
        if not digits.isdigit() or int(digits) != abs(value):
            raise ConfigError(
                f"line {node.start_mark.line + 1}: {node.value} is {value} in YAML 1.1; write {value}, or "
                f"'{node.value}' in quotes for text"
            )
        return int(value)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def read_yaml(path: Path) -> Any:
    """The tree in a YAML file. Raises ConfigError, or DataError for a FIFO, with one line."""
    refuse_special(path)
    try:
        # a subclass of SafeLoader, which makes texts, numbers, lists and mappings alone
        return yaml.load(Path(path).read_text(encoding="utf-8-sig"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
