"""Training of reward models: a decoder with one score in place of its head, on pairs (Bradley-Terry)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.config.schema import Config
from jtrain.errors import ConfigError
from jtrain.models.decoder import Decoder
from jtrain.tasks.preference import Batch, halves
from jtrain.tasks.preference_losses import bradley_terry
from jtrain.tasks.preference_trainer import PreferenceTrainer
from jtrain.tasks.router_losses import router_losses
from jtrain.tasks.source import ModelSource
from jtrain.train.evaluation import Sums
from jtrain.train.loss import Loss, LossFn, Metric


class RewardTrainer(PreferenceTrainer):
    """Trains a reward model on pairs (see `jtrain/data/pairs.py`), which may have a `margin`.

    The reward of a text is the score at its last token that is not the padding token, as in transformers' sequence
    classifiers: `jtrain export` writes such a model. `model.path` may name a language model, whose head is then left
    out, or a reward model. The other arguments are `LanguageTrainer`'s; without a config the defaults are TRL's.
    Metrics have TRL's names: accuracy, margin, {min,mean,max}_reward.
    """

    task = "reward"
    left_out = "longer than max_length"

    def adapt(self, source: ModelSource) -> None:
        if source.decoder.num_labels > 1:
            raise ConfigError(
                f"model.path: {source.config.model.path} is a classifier with {source.decoder.num_labels} labels",
                "name a language model, or a reward model (one label)",
            )
        source.decoder = source.decoder.replace(num_labels=1)

    def make_loss(self, config: Config) -> LossFn:
        return reward_loss(self.tokenizer.pad_id, config.reward.center_rewards_coefficient)

    def figures_of(self, sums: Sums) -> dict[str, float]:
        return {}

    def prediction(self, model: nnx.Module, batch: Batch) -> dict[str, jax.Array]:
        """For `predict`: chosen_rewards and rejected_rewards [b]."""
        rewards, _, _ = pair_rewards(model, batch, self.tokenizer.pad_id, None)
        return dict(zip(("chosen_rewards", "rejected_rewards"), halves(rewards), strict=True))

    def generate(self, prompts: Any, **options: Any) -> Any:
        raise ConfigError("generate: a reward model writes no text", "use predict, which gives rewards")

    def summary(self) -> list[str]:
        return [*super().summary(), *self.source_lines()]


def reward_loss(pad_id: int, center_rewards_coefficient: float = 0.0) -> LossFn:
    """The loss: a sum over pairs, and their number; `bradley_terry` with the rows' margins."""

    def loss_fn(model: nnx.Module, batch: Batch, rng: jax.Array | None) -> Loss:
        rewards, live_R, router = pair_rewards(model, batch, pad_id, rng)
        chosen, rejected = halves(rewards)
        live = halves(live_R)[0] & halves(live_R)[1]
        margin = batch["margin"].astype(chosen.dtype) if "margin" in batch else None
        per_pair = bradley_terry(chosen, rejected, margin, center_rewards_coefficient)
        loss, count = jnp.where(live, per_pair, 0.0).sum(), live.sum(dtype=jnp.int32)

        def over(x: jax.Array) -> Metric:
            return jnp.where(live, x, 0).astype(jnp.float32).sum(), count

        # TRL's: the mean, over micro-batches, of the least and of the largest reward.
        filled = live.any()
        once = filled.astype(jnp.int32)
        metrics = {
            "accuracy": over(chosen > rejected),
            "margin": over(chosen - rejected),
            "mean_reward": over((chosen + rejected) / 2),
            "min_reward": (jnp.where(filled, jnp.where(live, jnp.minimum(chosen, rejected), jnp.inf).min(), 0.0), once),
            "max_reward": (
                jnp.where(filled, jnp.where(live, jnp.maximum(chosen, rejected), -jnp.inf).max(), 0.0),
                once,
            ),
        }
        metrics = jax.tree.map(jax.lax.stop_gradient, metrics)
        if rng is not None and router is not None and isinstance(model, Decoder):
            added, figures = router_losses(model.config, router, jnp.repeat(live, 2) * 0.5)
            loss, metrics = loss + added.astype(loss.dtype), metrics | figures
        return Loss(loss, count, metrics)

    return loss_fn


def pair_rewards(
    model: nnx.Module, batch: Batch, pad_id: int, rng: jax.Array | None
) -> tuple[jax.Array, jax.Array, Any]:
    """Rewards of chosen and rejected halves in turn [2 b], which of them are rows and not filling, and the routers."""
    assert isinstance(model, Decoder)

    def both(name: str) -> jax.Array:
        x = jnp.stack([batch[f"chosen_{name}"], batch[f"rejected_{name}"]], axis=1)
        return x.reshape(-1, x.shape[-1])

    ids, segments = both("input_ids"), both("segment_ids")
    row = (2 * batch["row"][:, None] + jnp.arange(2, dtype=batch["row"].dtype)).reshape(-1)
    hidden, router = model.hidden_and_router(
        ids,
        position_ids=both("position_ids"),
        segment_ids=segments,
        rng=rng,
        row=row,
        deterministic=rng is None,
    )
    places = jnp.arange(ids.shape[1])
    last = jnp.where((segments > 0) & (ids != pad_id), places, -1).max(1)
    at_last = places == jnp.maximum(last, 0)[:, None]
    # A sum over one place instead of a gather: it stays on the device that holds the token.
    rewards = jnp.where(at_last, model.scores(hidden)[..., 0], 0.0).sum(1)
    return rewards, last >= 0, router
