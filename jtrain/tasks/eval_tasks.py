"""Tasks of lm-eval on a loaded model (`pip install 'jtrain[eval]'`)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from jtrain.config.names import nearest
from jtrain.errors import ConfigError, DataError, JtrainError
from jtrain.tasks.loaded import LoadedModel
from jtrain.tasks.text_scores import needed


class TaskResults(NamedTuple):
    """What lm-eval found.

    Attributes:
      results: task or group -> lm-eval's own name of the figure (`acc,none`) -> number, None where there is none.
      table: the same for people.
    """

    results: dict[str, dict[str, float | None]]
    table: str


def open_tasks(tasks: Sequence[str], include_path: str | None = None) -> Any:
    """lm-eval's task manager, which knows these tasks.

    Args:
      tasks: names of tasks, groups or tags; * and ? stand for any letters.
      include_path: a folder with further tasks (.yaml).

    Raises:
      ConfigError: lm-eval is not installed, or knows no such task.
    """
    harness = needed("lm_eval.tasks", "a task")

    class Manager(harness.TaskManager):  # type: ignore[name-defined]
        """Says what went wrong with a task's data."""

        def load(self, spec: Any) -> Any:
            try:
                return super().load(spec)
            except JtrainError:
                raise
            except Exception as error:  # whatever datasets, a hub or a task's own code raise
                text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                raise DataError(
                    f"the tasks {', '.join(tasks)} can't be loaded: {text}",
                    "see that their data can be reached (dataset_path, data_files; a hub needs the network)",
                ) from error

    with contextlib.redirect_stdout(sys.stderr):
        manager = Manager(include_path=include_path)
    for task in tasks:
        if not manager.match_tasks([task]):
            meant = nearest(task, manager.all_tasks)
            remedy = "tasks of your own need --include-path DIR; `lm-eval ls tasks` lists lm-eval's"
            raise ConfigError(
                f"{task!r} is no task of lm-eval", f"Did you mean {meant}? Else: {remedy}" if meant else remedy
            )
    return manager


def evaluate_tasks(
    model: LoadedModel,
    tasks: Sequence[str],
    *,
    manager: Any = None,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    apply_chat_template: bool = False,
    chat_template: str | None = None,
    system_instruction: str | None = None,
) -> TaskResults:
    """Runs tasks of lm-eval.

    Args:
      model: from `load_model`.
      tasks, include_path: see `open_tasks`.
      manager: what `open_tasks` returned.
      num_fewshot: examples before each question; None: as each task has it.
      limit: documents of each task, the first ones; None: all.
      batch_size, max_length, chat_template: see `JtrainLM`.
      apply_chat_template: questions go through the chat template, examples as turns of their own.
      system_instruction: the system's message, or what stands before everything.

    Raises:
      ConfigError: lm-eval is not installed, an unknown task, or a model that does not fit.
      DataError: a task's data can't be loaded.
    """
    manager = open_tasks(tasks, include_path) if manager is None else manager
    from lm_eval import simple_evaluate
    from lm_eval.utils import make_table

    from jtrain.tasks.lm_eval_model import JtrainLM

    # lm-eval's bootstrap would fork a process that has JAX's threads in it.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    language_model = JtrainLM(model, batch_size=batch_size, max_length=max_length, chat_template=chat_template)
    if apply_chat_template:
        language_model.chat_template(True)  # what is wrong with it is said before the tasks are loaded
    with contextlib.redirect_stdout(sys.stderr):
        found = simple_evaluate(
            model=language_model,
            tasks=manager.match_tasks(list(tasks)),
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            batch_size=batch_size,
            apply_chat_template=apply_chat_template,
            system_instruction=system_instruction,
            log_samples=False,
        )
    results = {
        task: {
            name: value if isinstance(value, int | float) else None for name, value in figures.items() if "," in name
        }
        for task, figures in found["results"].items()
    }
    return TaskResults(results, make_table(found))
