"""Errors of `with_policy` for invalid arguments, and policies for Haiku."""

import subprocess
import sys
import types

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import mpjax
from testing import cheap_keys
from testing.measures import half_share
from testing.random_programs.evaluate import arrays_in_numpy


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda x: x, r"mpjax\.autocast\(function, policy\)"),
        (types.SimpleNamespace(module=nn.Dense(1)), r"with_policy\(model\.module, policy\)"),  # as Hugging Face's
        ({"w": 1.0}, r"\{'w': 1.0\}"),
        (nn.Dense, r"with_policy\(Dense\(...\), policy\)"),
    ],
)
def test_what_is_not_a_flax_model_is_refused_with_a_solution(model, says):
    with pytest.raises(TypeError, match=says):
        mpjax.with_policy(model, "mixed_float16")


def test_invalid_policy_is_refused():
    with pytest.raises(ValueError, match="mixed_float17"):
        mpjax.with_policy(nn.Dense(1), "mixed_float17")


def test_importing_mpjax_imports_no_flax():
    code = "import sys, mpjax; assert 'flax' not in sys.modules; assert callable(mpjax.with_policy)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_haiku_takes_a_policy(half):
    class Net(hk.Module):
        def __call__(self, x):
            return hk.nets.MLP([16, 4])(x)

    hk.mixed_precision.set_policy(Net, mpjax.get_policy(f"mixed_{half}"))
    try:
        net = hk.transform(lambda x: Net()(x))
        x = jnp.ones((2, 8))
        params = arrays_in_numpy(net.init)(cheap_keys.key(0), x)
        assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        loss = jax.value_and_grad(lambda p: net.apply(p, None, x).sum())
        assert half_share(loss, params) == 1.0
        assert jax.eval_shape(net.apply, params, None, x).dtype == jnp.float32
    finally:
        hk.mixed_precision.clear_policy(Net)
