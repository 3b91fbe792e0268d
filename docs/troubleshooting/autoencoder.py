"""A deep autoencoder of handwritten digits, whose first layers' gradients underflow float16.

Sigmoid layers shrink the gradient on its way back, as in Hinton and Salakhutdinov, "Reducing the Dimensionality of Data
with Neural Networks", Science 2006. Adam compensates for small gradients, but not for zeros.

    python -m mpjax parity autoencoder.py:make --policies mixed_float16 "static 1" --seeds 5
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mpjax

SIZES = (64, 64, 48, 32, 8, 32, 48, 64, 64)
EPOCHS, BATCH, TRAIN = 80, 128, 1437
DIGITS = (load_digits().data / 16).astype(np.float32)  # [1797, 64]


def network(params, x):
    """The reconstruction of images [batch, 64]."""
    for i, (w, b) in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = x @ w + b
            x = jax.nn.sigmoid(x) if i < len(params) - 1 else x
    return x


def mean_squared_error(params, x):
    return jnp.mean((network(params, x) - x) ** 2)


@functools.cache
def compiled(policy, overrides, loss_scale):
    """The parts that all seeds of a policy share: the optimizer, the loss and the step."""
    precision = mpjax.get_policy("mixed_float16" if policy == "static 1" else policy)
    inner = optax.adam(1e-2)
    if loss_scale is not None:
        tx = mpjax.dynamic_loss_scale(inner, init_scale=loss_scale)
    elif policy == "static 1":
        tx = mpjax.static_loss_scale(inner, 1.0)
    else:
        tx = mpjax.loss_scale_for(inner, precision)
    rules = mpjax.Rules(deny=[pattern for pattern, _ in overrides])
    loss = mpjax.autocast(mean_squared_error, precision, rules=rules)

    @jax.jit
    def step(state, x):
        params, opt_state = state
        value, grads = mpjax.value_and_grad(loss, opt_state)(params, x)
        return mpjax.apply_gradients(tx, grads, opt_state, params), value

    return tx, loss, step


@jax.jit
def test_error(params):
    return mean_squared_error(params, DIGITS[TRAIN:])


def explained_variance(state):
    """The share of the variance of test images that the reconstruction has."""
    return 1 - float(test_error(state[0])) / DIGITS[TRAIN:].var(axis=0).mean()


def make(policy, seed, *, overrides=(), loss_scale=None):
    """A training for `mpjax.parity`."""
    tx, loss, step = compiled(policy, tuple(overrides), loss_scale)
    rng = np.random.default_rng(seed)
    params = [
        (rng.normal(0, 1.3 / n**0.5, (n, m)).astype(np.float32), np.zeros(m, np.float32))
        for n, m in itertools.pairwise(SIZES)
    ]
    order = [rng.permutation(TRAIN)[: TRAIN // BATCH * BATCH].reshape(-1, BATCH) for _ in range(EPOCHS)]
    batches = [DIGITS[rows] for epoch in order for rows in epoch]
    state = params, tx.init(params)
    return mpjax.inspection.Training(
        state, step, batches, explained_variance, loss, metric_name="explained variance", percent=True
    )
