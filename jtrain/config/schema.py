"""The config: one frozen pydantic model a section; the YAML and the flags have the same shape.

Words are Hugging Face's where they exist. The docstring under a field is its help text. Rules across fields stand in
`jtrain/config/rules.py`; they fail before any device is touched.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from jtrain.config.contrastive_section import ContrastiveConfig
from jtrain.config.section import (
    Duration,
    NotNegative,
    Positive,
    Ratio,
    Section,
    Signals,
    Strings,
    duration_value,
    held_out,
    one_or_many,
)
from jtrain.config.task_sections import DistillConfig, DpoConfig, RewardConfig, RolesConfig, SftConfig

Precision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "fp8-mixed", "64-true", "auto"]
TextMetric = Literal["bleu", "chrf", "ter", "rouge", "exact_match"]
Strategy = Literal["ddp", "zero1", "zero2", "zero3", "fsdp"]


class DistributedConfig(Section):
    coordinator_address: str | None = None
    """host:port of process 0. Detected on TPU, Slurm and GKE; needed elsewhere when there are several processes."""
    num_processes: Positive | None = None
    """Number of processes of the run. Detected on TPU, Slurm and GKE."""
    process_id: NotNegative | None = None
    """Number of this process, from 0. Detected on TPU, Slurm and GKE."""
    bind_address: str | None = None
    """host:port that the coordinator listens on; by default that of `coordinator_address` (never all interfaces)."""


class LoraConfig(Section):
    rank: NotNegative = 0
    """Rank of the adapters W + scale A B (LoRA, Hu et al. 2021) beside a frozen model; 0: none, everything trains."""
    alpha: Annotated[float, Field(gt=0.0)] = 16.0
    """The scale of the adapters is alpha / rank (rslora: alpha / sqrt(rank))."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Rate of dropout on what goes into the adapters."""
    targets: Strings = ("all-linear",)
    """Projections with an adapter: names (q_proj), patterns of their paths (layers/attention/.*), or all-linear."""
    rslora: bool = False
    """Scale alpha / sqrt(rank), which lets high ranks learn (Kalajdzievski 2023)."""
    dora: bool = False
    """Trains the length of every column of W + scale A B beside the adapters (DoRA, Liu et al. 2024)."""
    base: Literal["auto", "keep", "bf16", "int8", "nf4"] = "auto"
    """How the frozen model is stored. auto: bf16 where the step computes in bf16, else keep; keep: in the parameters'
    type; int8, nf4: the projections in 8 and in 4.13 bits a weight (QLoRA, Dettmers et al. 2023), the rest as auto."""
    path: str | None = None
    """A PEFT adapter folder that a new run begins with, beside `model.path`: rank, alpha, rslora, dora and targets are
    those that it has."""


class ModelConfig(Section):
    preset: str = "llama-tiny"
    """Named shape; every field below that is set replaces the preset's value."""
    path: str | None = None
    """A model to begin with, in place of a preset: a Hugging Face folder, org/name[@revision] of its hub, a GGUF file,
    a run, or what `jtrain import` made. It says the shape, and brings its weights and its tokenizer."""
    remat: Literal[
        "none", "full", "minimal", "save_dots", "save_qkv", "save_attention", "save_out", "offload", "offload_dots"
    ] = "full"
    """What the backward pass recomputes. none: nothing; full: every layer; the others keep or offload named values."""
    attention: Literal["auto", "xla", "splash", "cudnn"] = "auto"
    """Attention kernel; auto chooses by platform and logs its choice. A kernel that would ignore a mask is refused."""
    vocab_size: Positive | None = None
    """Rows of the embedding; by default the tokenizer's size."""
    hidden_size: Positive | None = None
    """Width D of the residual stream."""
    intermediate_size: Positive | None = None
    """Width F of the feed-forward."""
    num_hidden_layers: Positive | None = None
    """Number of layers."""
    num_attention_heads: Positive | None = None
    """Number of query heads."""
    num_key_value_heads: Positive | None = None
    """Number of key and value heads; fewer than query heads is grouped-query attention."""
    head_dim: Positive | None = None
    """Width of a head; by default hidden_size / num_attention_heads."""
    max_position_embeddings: Positive | None = None
    """Longest row that the model takes; `max_length` may not exceed it."""
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary position embedding."""
    tie_word_embeddings: bool | None = None
    """Whether the output head is the embedding table."""
    norm: Literal["rmsnorm", "layernorm"] | None = None
    """Kind of normalisation."""
    norm_eps: Annotated[float, Field(gt=0)] | None = None
    """Added to the variance before its root."""
    activation: Literal["swiglu", "geglu", "gelu"] | None = None
    """Feed-forward: gated (swiglu, geglu) or plain (gelu)."""
    attention_bias: bool | None = None
    """Biases on the query, key, value and output projections."""
    mlp_bias: bool | None = None
    """Biases on the feed-forward projections."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Rate of dropout on the embedding and on both residual branches."""
    initializer_range: Annotated[float, Field(gt=0)] | None = None
    """Standard deviation of the initial weights."""
    num_experts: NotNegative | None = None
    """Routed experts E of a layer; 0: a dense feed-forward."""
    num_experts_per_tok: Positive | None = None
    """Experts that a token goes through, beside the shared ones."""
    moe_intermediate_size: Positive | None = None
    """Width of an expert; by default intermediate_size."""
    n_shared_experts: NotNegative | None = None
    """Experts that every token goes through: one feed-forward of this many times the width of an expert."""
    scoring_func: Literal["softmax", "sigmoid"] | None = None
    """How router logits become scores: over all experts, or each by itself."""
    norm_topk_prob: bool | None = None
    """Whether the scores of a token's experts are divided by their sum."""
    routed_scaling_factor: Annotated[float, Field(gt=0)] | None = None
    """What the sum of the routed experts is multiplied by."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the load-balancing loss of every layer."""
    router_z_loss_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the router z-loss of every layer, which keeps the router's logits small."""
    router_bias_update_rate: Annotated[float, Field(ge=0)] | None = None
    """Step of the bias that balances without a loss (DeepSeek-V3: 0.001); 0: there is none."""
    first_k_dense_replace: NotNegative | None = None
    """Leading layers with a dense feed-forward of intermediate_size."""
    expert_capacity_factor: Annotated[float, Field(ge=0)] | None = None
    """Tokens of a row that an expert takes, relative to an even share (others are dropped); 0: all of them."""
    expert_kernel: Literal["auto", "blocks", "ragged_dot", "megablox"] = "auto"
    """Kernel of dropless experts; auto chooses by platform and shape and logs its choice."""
    lora: LoraConfig = LoraConfig()


def split_sources(sources: list[Any] | tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Paths and weights of `[{path: a.txt, weight: 2}, ...]`; plain paths have no weights.

    Raises:
      ValueError: a source of another form, or weights for some only.
    """
    if not any(isinstance(source, dict) for source in sources):
        return tuple(sources), ()
    for source in sources:
        if not isinstance(source, dict) or set(source) - {"path", "weight"} or "path" not in source:
            raise ValueError(f"{source!r} is not {{path: ..., weight: ...}}")
    weights = tuple(source["weight"] for source in sources if source.get("weight") is not None)
    if weights and len(weights) != len(sources):
        raise ValueError("weights for some of the sources only")
    return tuple(source["path"] for source in sources), weights


class DataConfig(Section):
    train: Strings = ()
    """Paths, globs or URLs: .txt, .jsonl, .parquet, .array_record (contrastive: .npz, too); or
    hf:org/name[@revision][:split] of the hub. Several sources are a mixture."""
    weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Weight of each entry of `train`; empty: proportional to size (one pass over everything is an epoch)."""
    eval: Annotated[Annotated[float, Field(gt=0.0, lt=1.0)] | tuple[str, ...] | None, BeforeValidator(held_out)] = None
    """Paths, or a fraction of the training data held out from its end."""
    tokenizer: str | None = None
    """bytes, or the path of a Hugging Face tokenizer.json (or a folder that holds one) or a SentencePiece .model. By
    default that of `model.path`, else bytes."""
    text_field: str = "text"
    """Field of a JSONL, Parquet or ArrayRecord (JSON) record that holds the text."""
    append_eos: bool = True
    """Ends every document with the tokenizer's end-of-sequence token, and trains it."""
    prepend_bos: bool = False
    """Begins every document with the tokenizer's begin-of-sequence token."""
    packing: Literal["best_fit", "best_fit_split", "concat", "none"] = "best_fit"
    """best_fit: whole documents share rows (a longer one is cut into pieces; an example is truncated); best_fit_split:
    examples that are too long are cut into pieces, too; concat: one stream cut into rows (held-out data as best_fit or
    best_fit_split has it); none: one document a row."""
    truncation: Literal["keep_start", "keep_end"] = "keep_start"
    """Which part stays of an example that is longer than max_length."""
    chat_template: str | None = None
    """Name of one of the tokenizer's chat templates, or the path of a .jinja file; by default the tokenizer's usual."""
    buckets: tuple[Positive, ...] = ()
    """Lengths that the batches of `packing: none` are padded to, each one program; by default 128, 256, 512, ..."""
    shuffle: bool = True
    """A new permutation of the rows in every epoch."""
    cache_dir: str | None = None
    """Where tokenised data is kept, memory-mapped; by default a per-user cache folder (JTRAIN_CACHE_DIR)."""
    on_bad_record: Literal["fail", "skip"] = "fail"
    """What a record that can't be read does: ends the run, or is written to a quarantine file."""
    max_bad_records: NotNegative = 100
    """More bad records than this end the run under `on_bad_record: skip`."""
    num_workers: Positive | None = None
    """Processes that tokenise; by default the number of cores."""
    prefetch: NotNegative = 2
    """Batches that are read ahead of the step."""

    @model_validator(mode="before")
    @classmethod
    def _sources_with_weights(cls, data: Any) -> Any:
        """`train: [{path: a.txt, weight: 2}, ...]` is `train` and `weights`."""
        if not isinstance(data, dict) or not isinstance(data.get("train"), list | tuple):
            return data
        paths, weights = split_sources(data["train"])
        if weights and data.get("weights"):
            raise ValueError("weights stand either beside the paths or in `weights`")
        return {**data, "train": paths, "weights": weights or data.get("weights", ())}


class MeshConfig(Section):
    data: int = -1
    """Copies of the model: rows are divided, parameters are not. -1 takes the devices that are left."""
    fsdp: int = 1
    """Rows and parameters are divided (ZeRO-3)."""
    pipeline: int = 1
    """Layers are divided into stages."""
    context: int = 1
    """The sequence is divided."""
    tensor: int = 1
    """Heads, feed-forward and vocabulary are divided, and the sequence between blocks."""
    expert: int = 1
    """Experts are divided."""
    slices: Positive = 1
    """TPU slices or GPU islands; the slow network between them carries `data` (or, where it fits, `fsdp`)."""


class PipelineConfig(Section):
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved"] = "auto"
    """Order of work. auto: interleaved with virtual stages, else 1f1b (gpipe where it holds as little: M <= stages)."""
    microbatches: Literal["auto"] | Positive = "auto"
    """Micro-batches M that each accumulation micro-batch is split into. auto: the fewest that are at least 4 x stages
    and divide the rows of a data-parallel rank (one row each where there are fewer)."""
    virtual_stages: Positive = 1
    """Chunks of layers V on each stage: the bubble is (S - 1) / (M V + S - 1)."""
    residuals: Literal["recompute", "save"] = "recompute"
    """recompute: keeps a chunk's input and computes its forward again; save: keeps what `model.remat` keeps."""


class ContextConfig(Section):
    method: Literal["auto", "ring", "ulysses"] = "auto"
    """How tokens of a row that lie on several devices meet. ring: keys and values go round; ulysses: whole rows of some
    heads; auto: ulysses where the heads can be dealt out and rows have at most 32,768 tokens, else ring."""
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    """ring: which tokens a device holds. zigzag: an early and a late chunk of every row, so that all do the same work;
    contiguous: neighbours, of which the last ones do the most."""


class ShardingConfig(Section):
    rules: dict[str, Strings] = {}  # noqa: RUF012  pydantic copies it
    """Overrides of the table logical axis -> mesh axes, e.g. `{mlp: [tensor], embed: [fsdp]}`."""
    optimizer_axes: Strings = ()
    """Mesh axes that divide the optimizer state beyond the parameters' own (zero1: data)."""
    gradient_axes: Strings = ()
    """Mesh axes that divide the accumulated gradients beyond the parameters' own (zero2: data)."""
    offload_optimizer: bool = False
    """Optimizer state lives in host memory (pinned_host) between steps. TPU and GPU."""
    offload_parameters: bool = False
    """Parameters live in host memory (pinned_host) between steps. TPU and GPU."""


class DcnConfig(Section):
    compression: Literal["none", "bf16", "int8", "powersgd"] = "none"
    """How gradients are sent between slices. none: float32; bf16, int8: rounded, 2 and 3.9 times fewer bytes;
    powersgd: as matrices of low rank (Vogels et al. 2019). Needs mesh.data = mesh.slices."""
    rank: Positive = 4
    """powersgd: rank of the matrices."""
    error_feedback: bool = True
    """What a compressed sum leaves out is kept, a gradient's size a device, and added to the next one."""
    local_steps: Positive = 1
    """H: updates that every slice makes by itself between two exchanges of parameters (DiLoCo, Douillard et al. 2023);
    1: slices meet in every update."""
    outer_learning_rate: Annotated[float, Field(gt=0.0)] = 0.7
    """local_steps: rate of the outer update, SGD on the change of the parameters (0.7 in the paper)."""
    outer_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """local_steps: momentum of the outer update (0.9 in the paper)."""
    outer_nesterov: bool = True
    """local_steps: Nesterov's momentum, as in the paper, or the plain one."""


class LossConfig(Section):
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the target that is spread evenly over the vocabulary."""
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of log(Z)^2, which keeps the logits' scale in place (PaLM: 1e-4)."""
    chunk_size: Positive | None = None
    """Tokens of a row whose logits exist at one time; by default chosen by size."""


class OptimizerConfig(Section):
    name: Literal["adamw", "adafactor", "lion", "muon", "sgd"] = "adamw"
    """Kind of optimizer."""
    learning_rate: Annotated[float, Field(ge=0.0)] = 3.0e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled weight decay; `decay_rules` say where."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """First-moment decay (momentum, for sgd and muon)."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Second-moment decay; lion: that of its momentum. Not read by sgd, nor by adafactor (its exponent stays 0.8)."""
    eps: Annotated[float, Field(gt=0.0)] = 1.0e-8
    """Added to the root of the second moment (adamw, and what muon leaves to it)."""
    max_grad_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """Gradients are scaled down to this global norm; 0: not clipped."""
    decay_rules: tuple[tuple[str, float], ...] = ((r".*(norm|bias).*", 0.0), (r".*", 1.0))
    """Pattern of a parameter's path -> multiple of weight_decay. The first match counts; every parameter must match."""
    freeze: Strings = ()
    """Patterns of parameter paths that are not trained. Each must match a parameter."""
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Decay of an exponential moving average of the parameters, kept beside them; 0: none."""


class ScheduleConfig(Section):
    name: Literal["constant", "linear", "cosine", "wsd", "rsqrt"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: Duration = 0.05
    """Update k of the first w uses learning_rate * k / w. A number below 1 is a ratio of the run."""
    min_ratio: Ratio = 0.1
    """The last update's learning rate, as a ratio of the peak (rsqrt: its least; constant: not read)."""
    decay_steps: Duration = 0.2
    """wsd: length of the decay at the end."""


class CheckpointConfig(Section):
    save_steps: Duration = 100
    """Distance of saves. The last step is always saved; 0 saves only that one."""
    save_minutes: Annotated[float, Field(gt=0.0)] | None = None
    """Also saves when this much time has passed since the last save."""
    save_total_limit: Positive | None = 3
    """Checkpoints kept; the newest and the best always are."""
    best: str | None = "eval_loss"
    """Evaluation metric whose best checkpoint is kept."""
    best_mode: Literal["min", "max"] = "min"
    """Whether the best is the smallest or the largest."""
    keep_best: Positive = 1
    """How many of the best are kept."""
    resume: Literal["auto", "never"] | NotNegative = "auto"
    """auto: from the newest verified checkpoint of run_dir, if there is one; never; or a step."""
    init_from: str | None = None
    """A run or checkpoint directory whose parameters a new run starts from (optimizer, step and data start anew)."""
    async_save: bool = True
    """Saves are written while training goes on."""
    backup: str | None = None
    """A second place, a folder or URL (gs://, s3://), which gets a copy of each durable checkpoint in the background; a
    run whose directory is gone or damaged goes on from there."""


class EvalConfig(Section):
    eval_steps: Duration = 100
    """Distance of evaluations; 0: only at the end."""
    batch_size: Positive | None = None
    """Rows of an evaluation batch, over all devices; by default that of a training micro-batch."""
    max_batches: Positive | None = None
    """Evaluates this many batches at most; by default all of them."""
    use_ema: bool = True
    """Evaluates the moving average where `optimizer.ema_decay` keeps one."""
    early_stopping_patience: NotNegative = 0
    """Ends the run after this many evaluations in a row without a better `checkpoint.best`; 0: never."""
    early_stopping_threshold: Annotated[float, Field(ge=0.0)] = 0.0
    """What counts as better."""
    metrics: Annotated[tuple[TextMetric, ...], BeforeValidator(one_or_many)] = ()
    """Scores of answers to held-out prompts, generated at every evaluation with temperature 0, against those of the
    data (sft, distill): bleu, chrf, ter, rouge, exact_match. Needs the extra `eval`."""
    metric_examples: Positive = 100
    """Prompts that are answered for `metrics`: the first ones, as many of each source."""
    max_new_tokens: Positive = 128
    """Tokens of such an answer."""
    num_samples: NotNegative = 0
    """Answers that are shown at every evaluation, with prompt and reference: console, events.jsonl, trackers."""
    sample_prompts: Strings = ()
    """Texts that are continued and printed when the run ends."""
    sample_tokens: Positive = 64
    """Tokens of such a continuation."""
    sample_temperature: Annotated[float, Field(ge=0.0)] = 0.7
    """Temperature of such a continuation; 0: the likeliest token."""


class LoggingConfig(Section):
    log_every_n_steps: Positive = 10
    """Distance of log lines; also the first and the last step are logged."""
    trackers: Annotated[tuple[Literal["tensorboard"], ...], BeforeValidator(one_or_many)] = ("tensorboard",)
    """Beside metrics.jsonl, which is always written."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is shown."""


class FaultsConfig(Section):
    nonfinite: Literal["skip", "stop", "warn"] = "skip"
    """A step whose loss or gradient norm is not finite: is skipped and counted; ends the run; or is applied.
    Under 16-mixed an overflow of the gradients alone is always skipped: the loss scale is halved."""
    max_consecutive_skips: Positive = 20
    """Skipped steps in a row that take the run back to its newest checkpoint, and end it (exit 15) when it can't go
    back."""
    spike: Literal["off", "skip", "rollback"] = "off"
    """A step whose loss or gradient norm jumps far above its rolling median: is skipped and counted; or takes the run
    back to its newest checkpoint, from where it goes on behind the batches up to the spike."""
    spike_window: Annotated[int, Field(ge=4)] = 128
    """Updates that the median is of; looked at once half of them were made."""
    spike_threshold: Annotated[float, Field(gt=0.0)] = 8.0
    """How far is far, in robust standard deviations (1.4826 x the median distance to the median)."""
    max_rollbacks: NotNegative = 3
    """Rollbacks in a row with no new durable checkpoint between; one more ends the run (exit 15). 0: none at all."""
    rollback_margin: NotNegative = 0
    """Batches behind the spike that a rollback leaves out, too."""
    bundle_step: NotNegative = 0
    """Update that is kept in RUN/bundles, to be run again by `jtrain replay`; 0: only one that ends the run."""
    check_replicas_every_n_steps: NotNegative = 0
    """Compares the copies of everything that several devices hold, bit by bit, also before every save; devices that
    differ end the run (exit 15). 0: never."""
    replay_every_n_steps: NotNegative = 0
    """Makes every n-th update twice and compares the bits; a difference ends the run (exit 15). Needs memory for a
    second state. 0: never."""
    watchdog_minutes: Annotated[float, Field(gt=0.0)] = 15.0
    """A step, a wait for data or a batch of an evaluation that takes longer is taken for hung (exit 13). The limits of
    the other phases stand in docs/launch.md."""
    preemption_signals: Signals = ("SIGTERM", "SIGUSR1", "SIGUSR2")
    """Signals that ask the run to save and to leave (exit 10); one that comes later again ends it at once (exit 11)."""
    preemption_grace_seconds: Annotated[float, Field(gt=0.0)] = 240.0
    """Once it was asked, a run whose save takes longer leaves without it (exit 11)."""
    maintenance_notices: Literal["auto", "off"] = "auto"
    """auto: on Google Cloud, also the end of a spot machine and a maintenance of its host ask the run to leave."""
    max_restarts: NotNegative = 10
    """Times that `jtrain launch` starts the run again after an error of its own (exit 70)."""
    max_infra_restarts: NotNegative = 20
    """Times in a row that `jtrain launch` starts it again after lost machines, hangs or full disks (exits 12 to 14, a
    killed process) with no new durable checkpoint between. A preemption counts for nothing."""


class Config(Section):
    task: Literal["pretrain", "sft", "dpo", "reward", "distill", "contrastive"] = "pretrain"
    """What is trained."""
    run_dir: Annotated[str, Field(min_length=1)] = "runs/pretrain"
    """Where the run's config, metrics, events and checkpoints stand."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the initial parameters, the order of the data and dropout."""
    max_steps: Annotated[int | float | str | None, BeforeValidator(duration_value)] = None
    """Optimizer updates of the run; also `2 epochs` or `1e9 tokens`."""
    num_train_epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training data, instead of max_steps (default 1 where neither is given)."""
    max_length: Positive = 1024
    """Tokens of a row."""
    global_batch_size: Positive | None = None
    """Rows of an optimizer step, over all devices and micro-batches (default 32)."""
    per_device_batch_size: Positive | None = None
    """Rows of a micro-batch on one data-parallel rank."""
    gradient_accumulation_steps: Positive | None = None
    """Micro-batches of an optimizer step (default 1)."""
    fast_dev_run: bool | NotNegative = False
    """true or n: n (1) training and evaluation batches, no checkpoint, no tracker."""
    precision: Precision = "bf16-mixed"
    """mixed: computes in that type with float32 parameters (fp8: the products of projections, all else in bf16); true:
    everything in it; auto: bf16-mixed where the hardware has it, else 32-true."""
    fp8: Literal["native", "emulate"] = "native"
    """fp8-mixed on hardware without fp8 products. native: it is refused; emulate: the same numbers, slower."""
    deterministic: bool = False
    """GPU: deterministic kernels and fixed autotuning. CPU and TPU are deterministic anyway."""
    strategy: Strategy | None = None
    """Shorthand for a mesh and sharding: ddp, zero1, zero2, zero3 (= fsdp) over all devices."""
    accelerator: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """Kind of device; auto takes the fastest that is there."""
    devices: Literal["auto"] | Positive = "auto"
    """Devices of the whole run; n processes hold devices / n each. On cpu that many are made."""
    overlap: Literal["auto", "off"] = "auto"
    """Collectives that run while something is computed. auto: compiler options for GPU and TPU (asynchronous and
    pipelined collectives, collective matmul; `jtrain/parallel/xla.py` lists them); off: the compiler's own."""
    xla_options: dict[str, bool | int | float | str] = {}  # noqa: RUF012
    """Further compiler options, over ours, e.g. `{xla_gpu_autotune_level: 0}`."""
    compile_cache: str = "auto"
    """Folder of compiled programs (private: it holds native code); auto: a per-user folder; empty: none."""
    distributed: DistributedConfig = DistributedConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    context: ContextConfig = ContextConfig()
    pipeline: PipelineConfig = PipelineConfig()
    sharding: ShardingConfig = ShardingConfig()
    dcn: DcnConfig = DcnConfig()
    sft: SftConfig = SftConfig()
    dpo: DpoConfig = DpoConfig()
    reward: RewardConfig = RewardConfig()
    distill: DistillConfig = DistillConfig()
    contrastive: ContrastiveConfig = ContrastiveConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    logging: LoggingConfig = LoggingConfig()
    faults: FaultsConfig = FaultsConfig()
    roles: RolesConfig = RolesConfig()
