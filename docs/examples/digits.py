"""A classifier of handwritten digits: a Flax model and a loss of your own, on a mesh of eight devices."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jtrain


class Classifier(nnx.Module):
    """64 pixels, one hidden layer, 10 classes. The names of the axes let a mesh divide the parameters."""

    def __init__(self, rngs: nnx.Rngs, width: int = 128):
        draw = nnx.initializers.lecun_normal()
        self.up = nnx.Param(draw(rngs.params(), (64, width)), out_sharding=("embed", "mlp"))
        self.bias = nnx.Param(jnp.zeros(width), out_sharding=("mlp",))
        self.down = nnx.Param(draw(rngs.params(), (width, 10)), out_sharding=("mlp", "embed"))

    def __call__(self, image):
        pixels = image.reshape(-1, 64)
        return nnx.relu(pixels @ self.up[...] + self.bias[...]) @ self.down[...]


def loss_fn(model, batch, rng):
    """Cross-entropy as a sum and a count: the step divides, once, over all micro-batches and devices."""
    logprobs = jax.nn.log_softmax(model(batch["image"]))
    loss = -jnp.take_along_axis(logprobs, batch["label"][:, None], axis=1)[:, 0]
    right = logprobs.argmax(axis=1) == batch["label"]
    weight = batch["row_weight"]  # 1; 0 for rows that fill up the last batch of an evaluation
    count = weight.sum()
    return jtrain.Loss((weight * loss).sum(), count, {"accuracy": ((weight * right).sum(), count)})


def digits():
    """1,498 images to train on, and every sixth of the 1,797, which is held out."""
    with np.load(Path(__file__).parent / "digits8x8.npz") as file:
        image, label = file["images"].astype(np.float32) / 16, file["labels"].astype(np.int32)
    held_out = np.arange(len(label)) % 6 == 5
    return ({"image": image[part], "label": label[part]} for part in (~held_out, held_out))


def trainer(**changes):
    """Keywords are fields and sections of the config, or an optax chain as `optimizer`."""
    train_data, eval_data = digits()
    config = {
        "run_dir": "runs/digits",
        "accelerator": "cpu",
        "devices": 8,
        "mesh": "data=2,fsdp=2,tensor=2",
        "precision": "32-true",
        "max_steps": 200,
        "global_batch_size": 100,
        "optimizer": {"learning_rate": 1e-2},
        "eval": {"eval_steps": 100},
        "checkpoint": {"best": "eval_accuracy", "best_mode": "max"},
        "logging": {"log_every_n_steps": 20},
    }
    return jtrain.Trainer(
        config,
        model=Classifier,
        loss_fn=loss_fn,
        train_data=train_data,
        eval_data=eval_data,
        predict_fn=lambda model, batch: model(batch["image"]).argmax(axis=1),
        **changes,
    )


if __name__ == "__main__":
    trainer().fit()
