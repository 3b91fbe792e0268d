"""Calls that are easily written wrong: a decorator works, an error says what to write, and types accept and refuse."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax

W, X = jnp.ones((4, 4)), jnp.ones((2, 4))
tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


@mpjax.autocast(policy="mixed_bfloat16")
def decorated(w, x):
    """A loss."""
    return loss(w, x)


@mpjax.autocast
def plain(w, x):
    return loss(w, x)


@mpjax.autocast(policy="mixed_bfloat16", rules=mpjax.Rules(deny=["*/head"]))
def ruled(w, x):
    with jax.named_scope("head"):
        y = x @ w
    return loss(w, y)


def test_autocast_is_a_decorator_with_and_without_arguments():
    for fun, dtypes in ((decorated, {"bfloat16"}), (plain, {"float16"}), (ruled, {"bfloat16", "float32"})):
        assert set(mpjax.audit(fun, W, X).flops) == dtypes
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "A loss.")
    assert jax.grad(decorated)(W, X).dtype == jnp.float32


def test_a_default_in_a_signature_is_readable():
    for name in mpjax.__all__:
        if callable(value := getattr(mpjax, name)) and not (isinstance(value, type) and issubclass(value, Exception)):
            assert " object at " not in str(inspect.signature(value)), name


@pytest.mark.parametrize(
    "call",
    [
        lambda: mpjax.autocast(nn.Dense(4)),
        lambda: mpjax.value_and_grad(nn.Dense(4), policy="mixed_float16"),
        lambda: nn.Sequential([lambda x: mpjax.autocast(nn.Dense(4))(x)]).init(jax.random.key(0), X),
    ],
)
def test_a_linen_model_is_not_a_function(call):
    with pytest.raises(TypeError, match=r"autocast\(Dense\(\.\.\.\)\).*model\.apply.*with_policy"):
        call()


@pytest.mark.parametrize("policy", ["mixed_bfloat16", mpjax.get_policy("mixed_bfloat16")])
def test_a_policy_in_place_of_the_function_or_the_state_is_named(policy):
    with pytest.raises(TypeError, match=r"@mpjax.autocast\(policy="):
        mpjax.autocast(policy)
    with pytest.raises(ValueError, match="is a policy: give it by its name, policy="):
        mpjax.value_and_grad(loss, policy)


@pytest.mark.parametrize("optimizer", [tx, optax.adam(1e-3), optax.MultiSteps(tx, 2), optax.chain(tx)])
@pytest.mark.parametrize(
    "call",
    [
        lambda tx: mpjax.value_and_grad(loss, tx),
        lambda tx: mpjax.grad(loss, tx),
        lambda tx: mpjax.scale_loss(loss, tx),
        lambda tx: mpjax.true_cotangents(loss, tx),
        lambda tx: mpjax.unscale(W, tx),
        lambda tx: mpjax.keep_if_finite(tx, W, W),
        mpjax.check_progress,
    ],
)
def test_the_optimizer_in_place_of_its_state_is_named(call, optimizer):
    with pytest.raises(ValueError, match=r"the optimizer itself: give its state, opt_state = tx.init\(params\)"):
        call(optimizer)
