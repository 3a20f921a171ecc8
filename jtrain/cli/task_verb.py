"""What the verbs of tasks share: `jtrain sft [CONFIG] [--flags]` is `train` with that task, and needs no file."""

from __future__ import annotations

from jtrain.cli import args as arguments
from jtrain.cli.train import start
from jtrain.config import flags, load
from jtrain.config.layers import Layer
from jtrain.config.schema import Config
from jtrain.config.task_defaults import defaults_of
from jtrain.errors import ConfigError


def run(args: list[str], task: str) -> int:
    """Trains and returns the exit code.

    Raises:
      ConfigError: CONFIG, or a flag, names another task.
    """
    usage = f"jtrain {task} [CONFIG] [--flags]"
    if arguments.wants_help(args):
        arguments.print_help(args, usage, task)
        return 0
    given, weaker, file = arguments.settings(args, usage, optional=True, defaults={"task": task})
    whole = flags.to_layer(given).over(weaker)
    named = whole.values["task"]
    if named != task:
        raise ConfigError(
            f"{whole.origin['task']}: {named}, and the verb is {task}",
            f"Write jtrain train{'' if file is None else f' {file}'}.",
        )
    config = flags.parse(given, weaker) if given else load.build(weaker)
    if file is None:
        for line in chosen(config, whole):
            print(line, flush=True)
    return start(config)


def chosen(config: Config, whole: Layer) -> list[str]:
    """What the task chose for a run without a config file, and why: a line each, for the console.

    Args:
      config: of the run.
      whole: what was said by flags and environment.
    """
    rows = [(default.path, _shown(default.value), default.why) for default in defaults_of(whole)]
    if not rows:
        return []
    if config.model.path is None:
        rows.insert(0, ("model.preset", config.model.preset, "random weights: model.path begins with a model"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {path:<{widths[0]}}  {value:<{widths[1]}}  {why}" for path, value, why in rows]
    return [f"task {config.task}, no config file; chosen (a flag changes it):", *lines]


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
