"""What is to be run: CONFIG with its flags, checked before anything is started."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jtrain.config import load_config, paths
from jtrain.config.schema import Config
from jtrain.errors import ConfigError


@dataclass(frozen=True)
class Job:
    """A run as it was typed.

    Attributes:
      source: CONFIG: a file or the name of a recipe.
      flags: the flags of the config, as they were typed.
      config: both together with the environment, checked.
    """

    source: str
    flags: tuple[str, ...]
    config: Config

    @property
    def file(self) -> Path | None:
        """The file of CONFIG; None: it is a recipe, which every installation has."""
        return None if self.source in paths.recipes() else Path(self.source).expanduser()

    @property
    def is_url(self) -> bool:
        """Whether the run directory is a URL (gs://…), which outlives the machines."""
        return "://" in self.config.run_dir

    def command(self, python: str, *more: str, source: str | None = None) -> list[str]:
        """The command of one process.

        Args:
          python: the interpreter.
          *more: further flags, which win.
          source: CONFIG where the process runs, if it is another path there.
        """
        return [python, "-m", "jtrain", "train", source or self.source, *self.flags, *more]

    def changed(self, *flags: str) -> Config:
        """The config with further flags.

        Raises:
          ConfigError: they don't fit.
        """
        return load_config(self.source, [*self.flags, *flags])

    def check_elastic(self, least: int, most: int) -> None:
        """Sees that the global batch does not follow from the number of hosts, which may change.

        Raises:
          ConfigError: it does, or the devices can't be divided over the hosts.
        """
        config = self.config
        if isinstance(config.devices, int) and config.devices % most:
            raise ConfigError(
                f"devices: {config.devices} over --hosts {least}:{most} leave a remainder",
                f"Write devices: {-(-config.devices // most) * most}, those of {most} hosts; or auto.",
            )
        if config.per_device_batch_size is None or config.global_batch_size is not None:
            return
        rows = config.per_device_batch_size * (config.gradient_accumulation_steps or 1)
        product = f"{config.per_device_batch_size} x {config.gradient_accumulation_steps or 1} = {rows} rows"
        raise ConfigError(
            f"--hosts {least}:{most} with per_device_batch_size and no global_batch_size: {product} a data-parallel "
            f"rank, so {least} hosts would train with {least}/{most} of the batch of {most}",
            f"Write global_batch_size, which stays when hosts go ({rows} x the ranks of {most} hosts), "
            "and leave per_device_batch_size out.",
        )

    def check_data(self, kept: Callable[[str], bool], remedy: str) -> None:
        """Sees that the sources of data and of the model are found where the run runs.

        Args:
          kept: whether a path or URL is there.
          remedy: what to write where it is not.

        Raises:
          ConfigError: one is not.
        """
        config = self.config
        held_out = config.data.eval if isinstance(config.data.eval, tuple | list) else ()
        fields = {"data.train": config.data.train, "data.eval": held_out, "data.tokenizer": (config.data.tokenizer,),
                  "model.path": (config.model.path,)}  # fmt: skip
        for field, values in fields.items():
            for value in map(str, filter(None, values or ())):
                everywhere = value.startswith("hf:") or (field, value) == ("data.tokenizer", "bytes")
                everywhere |= Path(value).is_relative_to(paths.recipe_folder())  # every installation has them
                everywhere |= field == "model.path" and paths.is_hub_name(value) and not os.path.exists(value)
                if not everywhere and not kept(value):
                    raise ConfigError(f"{field}: {value} is on this machine alone", remedy)


def make_job(source: str, flags: Sequence[str]) -> Job:
    """Checks CONFIG and its flags, and that the run can be started again.

    Raises:
      ConfigError: what `load_config` raises; a flag that the launcher sets itself; a run that can't go on.
    """
    for flag in flags:
        name = flag.lstrip("-").partition("=")[0].replace("-", "_")
        if flag.startswith("--") and name.startswith("distributed"):
            raise ConfigError(f"{flag}: the launcher sets where the processes meet", "Leave it out.")
    config = load_config(source, flags)
    resume = config.checkpoint.resume
    restarts = config.faults.max_restarts or config.faults.max_infra_restarts
    if resume != "auto" and restarts and not config.fast_dev_run:
        raise ConfigError(
            f"checkpoint.resume: {resume}, and a launched run is started again from its newest checkpoint",
            "Write checkpoint.resume: auto; or --max-restarts 0 --max-infra-restarts 0.",
        )
    return Job(source, tuple(flags), config)


def shell(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """A command as it may be typed in a shell."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items()),
                     shlex.join(command)])  # fmt: skip


def need_program(name: str, remedy: str) -> str:
    """The path of a program.

    Raises:
      ConfigError: it is not on PATH.
    """
    import shutil

    found = shutil.which(name)
    if found is None:
        raise ConfigError(f"{name} is not on PATH ({os.environ.get('PATH', '')[:60]}…)", remedy)
    return found
