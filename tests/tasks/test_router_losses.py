import jax.numpy as jnp
import numpy as np

from jtrain.models.presets import preset
from jtrain.models.router import RouterFigures
from jtrain.tasks.router_losses import router_losses


def figures(balance, z):
    rows = len(balance)
    return RouterFigures(jnp.array(balance), jnp.array(z), jnp.full((rows, 4, 8), 3.0), jnp.arange(rows) * 1.0)


def test_a_row_counts_as_much_as_it_has_targets():
    config = preset("moe-tiny", router_aux_loss_coef=0.5, router_z_loss_coef=0.1)
    added, metrics = router_losses(config, figures([4.0, 8.0, 100.0], [1.0, 2.0, 100.0]), jnp.array([10, 30, 0]))
    # A row without a target has no part, as in the cross-entropy: (10 * 4 + 30 * 8) and (10 * 1 + 30 * 2).
    np.testing.assert_allclose(added, 0.5 * 280 + 0.1 * 70, rtol=1e-6)
    np.testing.assert_allclose(metrics["aux_loss"], (280 / 4, 40))  # four layers
    np.testing.assert_allclose(metrics["router_z_loss"], (70 / 4, 40))
    assert "dropped_tokens" not in metrics


def test_rows_in_two_parts_add_up_to_the_rows_together():
    config = preset("moe-tiny", router_aux_loss_coef=0.5, expert_capacity_factor=1.0)
    count = jnp.array([10, 30])
    whole, metrics = router_losses(config, figures([4.0, 8.0], [1.0, 2.0]), count)
    parts = [router_losses(config, figures([b], [z]), count[i : i + 1])[0] for i, (b, z) in enumerate([(4, 1), (8, 2)])]
    np.testing.assert_allclose(sum(parts), whole)
    np.testing.assert_allclose(metrics["dropped_tokens"], (1.0, 2 * 4 * 8 * 3))
