"""The config: schema, files, environment, flags, recipes, and the rules that need no device."""

from jtrain.config.differences import Difference, differences
from jtrain.config.export import to_dict, to_yaml
from jtrain.config.load import load_config
from jtrain.config.schema import Config

__all__ = ["Config", "Difference", "differences", "load_config", "to_dict", "to_yaml"]
