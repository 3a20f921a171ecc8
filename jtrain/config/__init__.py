"""The config: schema, files, environment, flags, recipes, and the rules that need no device."""

from jtrain.config.load import load_config
from jtrain.config.schema import Config

__all__ = ["Config", "load_config"]
