"""The training loop by hand, from the verbs that the Trainer is made of. Start it again, and it resumes."""

import optax
from digits import Classifier, digits, loss_fn

import jtrain
from jtrain.data import ArrayRows
from jtrain.parallel.processes import start


def train(**fields):
    """The loss of every step made by this call."""
    config = jtrain.load_config(
        {
            "run_dir": "runs/loop",
            "accelerator": "cpu",
            "devices": 8,
            "mesh": "data=2,fsdp=2,tensor=2",
            "max_steps": 200,
            "global_batch_size": 100,
        }
        | fields
    )
    mesh = jtrain.make_mesh(config.mesh, devices=start(config))
    model = jtrain.functional_model(Classifier)
    tx = optax.adamw(1e-2)
    plan = jtrain.plan_state(model, tx, mesh, precision="32-true")
    train_step = jtrain.make_train_step(model, loss_fn, tx, plan, seed=config.seed, max_grad_norm=1.0)
    train_data, _ = digits()
    rows = ArrayRows(train_data, seed=config.seed)

    losses = []
    with (
        jtrain.Checkpoints(config.run_dir) as checkpoints,
        jtrain.DataLoader(rows, global_batch_size=config.global_batch_size, sharding=plan.batch_sharding) as loader,
    ):
        if checkpoints.steps():
            state, _, first = checkpoints.restore(plan.abstract)
        else:
            state, first = jtrain.init_state(model, tx, plan, seed=config.seed), 0
        for step in range(first, config.max_steps):
            state, metrics = train_step(state, loader[step])
            if losses:
                losses[-1] = float(losses[-1])  # figures are read one step late: the next step is already running
            losses.append(metrics["loss"])
            if (step + 1) % 50 == 0:
                print(f"step {step + 1} | loss {float(losses[-1]):.4f}")
                checkpoints.save(step + 1, state, {"seed": config.seed})
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    train()
