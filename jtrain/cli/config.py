"""`jtrain config show | schema | docs`: the resolved config, the JSON schema, the reference page."""

from __future__ import annotations

import json

from jtrain.cli import args as arguments
from jtrain.config import export
from jtrain.config.names import nearest
from jtrain.errors import ConfigError

USAGE = "jtrain config show [CONFIG] [--flags] [--json] | schema | docs"
HELP = f"""usage: {USAGE}

  show     the config as it is after file, environment and flags; secrets are masked
  schema   JSON schema of a config file, for editors
  docs     every field and every accepted name, as Markdown"""


def run(args: list[str]) -> int:
    """Prints, and returns the exit code."""
    if not args or args[0] in ("-h", "--help"):
        print(HELP)
        return 0
    what, rest = args[0], args[1:]
    if what not in ("show", "schema", "docs"):
        meant = nearest(what, ("show", "schema", "docs"))
        raise ConfigError(
            f"config: {what!r} is none of show, schema, docs", f"Did you mean {meant}?" if meant else None
        )
    if arguments.wants_help(rest):
        print(HELP)
        return 0
    if what == "show":
        as_json = "--json" in rest
        rest = [arg for arg in rest if arg != "--json"]
        config = arguments.parse_config(rest, "jtrain config show [CONFIG] [--flags]", optional=True)
        print(json.dumps(export.to_dict(config), indent=2) if as_json else export.to_yaml(config), end="")
        return 0
    if rest:
        raise ConfigError(f"config {what}: {rest[0]!r} is one argument too many", f"usage: {USAGE}")
    print(json.dumps(export.json_schema(), indent=2) if what == "schema" else export.reference(), end="")
    return 0
