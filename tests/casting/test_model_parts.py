"""Autocast of a part of a Linen or Haiku model that runs: it may compute, but not write to the model's variables."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import mpjax

KEY, X = jax.random.key(0), jnp.ones((4, 8))
WRITES = "autocast traces .* as jax.jit does, but it writes '{}' .*mpjax.with_policy"


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))


class Decorated(Layers):
    @mpjax.autocast
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))


class Computing(nn.Module):
    @nn.compact
    def __call__(self, x):
        return mpjax.autocast(jnp.dot)(x, self.param("w", nn.initializers.ones, (8, 4)))


def layers(x):
    return hk.BatchNorm(True, True, 0.9)(hk.Linear(4)(x), True)


def test_a_linen_method_that_creates_parameters_or_changes_statistics_is_refused():
    with pytest.raises(TypeError, match=WRITES.format("batch_stats/BatchNorm_0/mean")):
        Decorated().init(KEY, X)
    with pytest.raises(TypeError, match=WRITES.format("batch_stats/BatchNorm_0/mean")):
        Decorated().apply(Layers().init(KEY, X), X, mutable=["batch_stats"])


@pytest.mark.standard_promotion  # moving averages of hk.BatchNorm
def test_a_haiku_function_that_creates_parameters_or_changes_statistics_is_refused():
    plain, decorated = (hk.transform_with_state(fun) for fun in (layers, mpjax.autocast(layers)))
    with pytest.raises(TypeError, match=WRITES.format("batch_norm/offset")):
        decorated.init(KEY, X)
    with pytest.raises(TypeError, match=WRITES.format("batch_norm/~/mean_ema/average")):
        decorated.apply(*plain.init(KEY, X), None, X)


def test_a_part_that_only_computes_runs_in_half():
    variables = Computing().init(KEY, X)
    assert mpjax.audit(Computing().apply, variables, X).flops == {"float16": 256}
