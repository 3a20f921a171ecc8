"""Names of fields: one table of aliases, the nearest right name for a wrong one, and what a field takes."""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from jtrain.config.schema import Config
from jtrain.config.section import Section
from jtrain.errors import ConfigError


@functools.cache
def sections() -> dict[str, type[Section]]:
    """Dotted name of every section -> its model; a section's own sections follow it (`model`, `model.lora`)."""
    found: dict[str, type[Section]] = {}

    def walk(model: type[Section], prefix: str) -> None:
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                found[prefix + name] = field.annotation
                walk(field.annotation, f"{prefix}{name}.")

    walk(Config, "")
    return found


@functools.cache
def fields() -> dict[str, FieldInfo]:
    """Dotted path of every field that holds a value -> its description; in the order of the schema."""
    flat: dict[str, FieldInfo] = {}

    def walk(model: type[Section], prefix: str) -> None:
        for name, field in model.model_fields.items():
            if prefix + name in sections():
                walk(sections()[prefix + name], f"{prefix}{name}.")
            else:
                flat[prefix + name] = field

    walk(Config, "")
    return flat


class Alias(NamedTuple):
    """A name from another trainer: the field it stands for, and how its value is translated."""

    name: str
    target: str
    origin: str
    convert: Callable[[Any], Any] | None = None
    note: str = ""


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "false": False, "1": True, "0": False, "none": False, "yes": True, "no": False}
    if str(value).lower() not in words:
        raise ConfigError(f"{name}: {value!r} is neither true nor false", f"Write `{name}: true` or leave it out.")
    return words[str(value).lower()]


def _precision(name: str, precision: str) -> Callable[[Any], Any]:
    return lambda value: precision if _flag(name, value) else None


def _base(name: str, base: str) -> Callable[[Any], Any]:
    return lambda value: base if _flag(name, value) else None


def _remat(value: Any) -> str:
    return "full" if _flag("gradient_checkpointing", value) else "none"


def _resume(value: Any) -> Any:
    if value is None or str(value).lower() in ("true", "false"):
        return "auto" if str(value).lower() == "true" else "never"
    return value


def _trackers(value: Any) -> Any:
    if value is None or value == "none" or value == ["none"]:
        return []
    return ["tensorboard"] if value == "all" else value


_SCHEDULES = {
    "constant_with_warmup": "constant",
    "inverse_sqrt": "rsqrt",
    "warmup_stable_decay": "wsd",
    "cosine_with_min_lr": "cosine",
}


def _schedule(value: Any) -> Any:
    return _SCHEDULES.get(value, value) if isinstance(value, str) else value


_PACKINGS = {"bfd": "best_fit", "bfd_split": "best_fit_split", "wrapped": "concat"}


def _packing(value: Any) -> Any:
    """TRL's switch, or the name of one of its strategies; our own words stay."""
    if isinstance(value, bool):
        return "best_fit" if value else "none"
    return _PACKINGS.get(value, value) if isinstance(value, str) else value


_HF, _PEFT, _TRL, _LIGHTNING, _SHORT = "Hugging Face", "PEFT", "TRL", "Lightning", "short"
ALIASES: dict[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias("output_dir", "run_dir", _HF),
        Alias("per_device_train_batch_size", "per_device_batch_size", _HF),
        Alias("max_seq_length", "max_length", _HF),
        Alias("learning_rate", "optimizer.learning_rate", _HF),
        Alias("weight_decay", "optimizer.weight_decay", _HF),
        Alias("adam_beta1", "optimizer.beta1", _HF),
        Alias("adam_beta2", "optimizer.beta2", _HF),
        Alias("adam_epsilon", "optimizer.eps", _HF),
        Alias("max_grad_norm", "optimizer.max_grad_norm", _HF),
        Alias(
            "lr_scheduler_type", "schedule.name", _HF, _schedule, "inverse_sqrt is rsqrt, warmup_stable_decay is wsd"
        ),
        Alias("warmup_steps", "schedule.warmup_steps", _HF),
        Alias("warmup_ratio", "schedule.warmup_steps", _HF),
        Alias("label_smoothing_factor", "loss.label_smoothing", _HF),
        Alias("bf16", "precision", _HF, _precision("bf16", "bf16-mixed"), "true is bf16-mixed"),
        Alias("fp16", "precision", _HF, _precision("fp16", "16-mixed"), "true is 16-mixed"),
        Alias("gradient_checkpointing", "model.remat", _HF, _remat, "true is full, false is none"),
        Alias("logging_steps", "logging.log_every_n_steps", _HF),
        Alias("report_to", "logging.trackers", _HF, _trackers, "none is an empty list"),
        Alias("eval_steps", "eval.eval_steps", _HF),
        Alias("save_steps", "checkpoint.save_steps", _HF),
        Alias("save_total_limit", "checkpoint.save_total_limit", _HF),
        Alias("resume_from_checkpoint", "checkpoint.resume", _HF, _resume, "true is auto, false is never"),
        Alias("r", "model.lora.rank", _PEFT),
        Alias("lora_alpha", "model.lora.alpha", _PEFT),
        Alias("lora_dropout", "model.lora.dropout", _PEFT),
        Alias("target_modules", "model.lora.targets", _PEFT),
        Alias("use_rslora", "model.lora.rslora", _PEFT),
        Alias("use_dora", "model.lora.dora", _PEFT),
        Alias("load_in_8bit", "model.lora.base", _HF, _base("load_in_8bit", "int8"), "true is int8"),
        Alias("load_in_4bit", "model.lora.base", _HF, _base("load_in_4bit", "nf4"), "true is nf4"),
        Alias("accumulate_grad_batches", "gradient_accumulation_steps", _LIGHTNING),
        Alias("gradient_clip_val", "optimizer.max_grad_norm", _LIGHTNING),
        Alias("max_epochs", "num_train_epochs", _LIGHTNING),
        Alias("log_every_n_steps", "logging.log_every_n_steps", _LIGHTNING),
        Alias("max_restarts", "faults.max_restarts", _SHORT),
        Alias("max_infra_restarts", "faults.max_infra_restarts", _SHORT),
        Alias("init_from", "checkpoint.init_from", _SHORT),
        Alias("resume", "checkpoint.resume", _SHORT),
        Alias("model_name_or_path", "model.path", _TRL),
        Alias("packing", "data.packing", _TRL, _packing, "true is best_fit, false none; bfd, bfd_split, wrapped"),
        Alias("truncation_mode", "data.truncation", _TRL),
        Alias("dataset_text_field", "data.text_field", _TRL),
        Alias("dataset_num_proc", "data.num_workers", _TRL),
        Alias("chat_template_path", "data.chat_template", _TRL),
        Alias("completion_only_loss", "sft.completion_only_loss", _TRL),
        Alias("assistant_only_loss", "sft.assistant_only_loss", _TRL),
        Alias("center_rewards_coefficient", "reward.center_rewards_coefficient", _TRL),
        Alias("neftune_noise_alpha", "sft.neftune_noise_alpha", _HF),
        *(
            Alias(name, f"dpo.{name}", _TRL)
            for name in (
                "loss_type",
                "loss_weights",
                "beta",
                "ld_alpha",
                "f_divergence_type",
                "f_alpha_divergence_coef",
                "use_weighting",
                "discopop_tau",
                "simpo_gamma",
                "cpo_alpha",
                "desirable_weight",
                "undesirable_weight",
                "ref_model",
                "precompute_ref_log_probs",
                "precompute_ref_batch_size",
                "sync_ref_model",
                "ref_model_mixup_alpha",
                "ref_model_sync_steps",
                "disable_dropout",
            )
        ),
        Alias("teacher_model_name_or_path", "distill.teacher", _TRL),
        Alias("lmbda", "distill.on_policy_fraction", _TRL),
        Alias("seq_kd", "distill.seq_kd", _TRL),
        Alias("max_completion_length", "distill.max_completion_length", _TRL),
        Alias("lr", "optimizer.learning_rate", _SHORT),
        Alias("preset", "model.preset", _SHORT),
    )
}

NOT_BUILT = {
    "task": ("grpo", "ppo"),
    "strategy": ("auto",),
    "mesh": ("auto",),
}
"""Values that the words of the config foresee and that do not exist yet."""


def plain(name: str) -> str:
    """The name as the schema spells it: underscores."""
    return name.replace("-", "_")


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` most likely means, or None."""
    choices = list(choices)
    lowered = {choice.lower(): choice for choice in reversed(choices)}
    begun = [choice for choice in choices if len(word) > 1 and choice.lower().startswith(word.lower())]
    if begun:
        return begun[0]
    found = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def nearest_name(name: str) -> str | None:
    """The field, section or alias that a wrong dotted name most likely means.

    A leaf that stands in another section counts too: `fsdp` is `mesh.fsdp`.
    """
    section, _, leaf = name.rpartition(".")
    exact = [field for field in fields() if field.rpartition(".")[2] == leaf]
    if exact:
        return exact[0]
    if section in sections():
        own = nearest(leaf, sections()[section].model_fields)
        return f"{section}.{own}" if own else nearest_leaf(leaf)
    return nearest(name, [*fields(), *sections(), *ALIASES]) or nearest_leaf(leaf)


def nearest_leaf(leaf: str) -> str | None:
    """The field whose last word is nearest to `leaf`."""
    leaves = {field.rpartition(".")[2]: field for field in reversed(fields())}
    found = nearest(leaf, leaves)
    return leaves[found] if found else None


def parts(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, without `Annotated` around the union; other annotations are their own only member."""
    if get_origin(annotation) is Annotated:
        inner = get_args(annotation)[0]
        if get_origin(inner) in (Union, types.UnionType, Annotated):
            return parts(inner)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for member in get_args(annotation) for part in parts(member))
    return (annotation,)


def core(annotation: Any) -> Any:
    """The type under `Annotated`."""
    return core(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def is_duration(path: str) -> bool:
    """Whether the field holds a length of training."""
    return {int, float, str} <= set(members(path))


def members(path: str) -> tuple[Any, ...]:
    """The types that the field takes, without their constraints."""
    return tuple(core(part) for part in parts(fields()[path].annotation))


def choices(path: str) -> tuple[str, ...]:
    """The words of the field's Literal types; empty when it has none."""
    found: list[str] = []
    for member in members(path):
        if get_origin(member) is tuple:
            member = core(get_args(member)[0])
        if get_origin(member) is Literal:
            found.extend(str(word) for word in get_args(member))
    return tuple(found)


def optional(path: str) -> bool:
    """Whether the field may be blank."""
    return type(None) in members(path)


def many(path: str) -> bool:
    """Whether the field holds a list."""
    return any(get_origin(member) is tuple for member in members(path))


def takes(path: str, kind: type) -> bool:
    """Whether one of the field's types is `kind` (bool, str, int, float, dict)."""
    return any(member is kind or get_origin(member) is kind for member in members(path))


def expected(path: str) -> str:
    """What the field takes, in words: `a whole number above 0, or auto`."""
    if path == "max_steps":
        return "steps (1000), `2 epochs` or `1e9 tokens`"
    if is_duration(path):
        return "steps (100), a ratio below 1 (0.05), `5%`, `2 epochs` or `1e9 tokens`"
    field = fields()[path]
    words = [_in_words(part, field.metadata) for part in parts(field.annotation) if core(part) is not type(None)]
    text = ", or ".join(dict.fromkeys(word for word in words if word))
    return text + (", or leave it out" if optional(path) else "")


_KINDS = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}


def _in_words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    kind = core(annotation)
    if get_origin(kind) is Literal:
        words = [str(word) for word in get_args(kind)]
        return words[0] if len(words) == 1 else "one of " + ", ".join(words)
    if get_origin(kind) is tuple:
        items = get_args(kind)
        if items[-1] is Ellipsis:
            return f"a list of: {_in_words(items[0])}"
        return "[" + ", ".join(_in_words(item) for item in items) + "]"
    if get_origin(kind) is dict:
        return "a mapping like {mlp: [tensor]}"
    bounds = [*metadata, *_constraints(annotation)] if kind in (int, float, str) else []
    return _KINDS.get(kind, str(kind)) + " and".join(dict.fromkeys(filter(None, map(_bound, bounds))))


def _constraints(annotation: Any) -> list[Any]:
    found: list[Any] = []
    while get_origin(annotation) is Annotated:
        annotation, *metadata = typing.get_args(annotation)
        for item in metadata:
            found.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return found


def _bound(constraint: Any) -> str:
    for name, words in (("gt", "above"), ("ge", "of at least"), ("lt", "below"), ("le", "of at most")):
        limit = getattr(constraint, name, None)
        if limit is not None:
            return f" {words} {limit:.10g}"
    return " that is not empty" if getattr(constraint, "min_length", 0) else ""
