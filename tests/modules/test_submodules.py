"""The policy of a model applies to its parts, however a user accesses them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from testing import cheap_keys
from testing.measures import half_share
from testing.random_programs.evaluate import arrays_in_numpy

X = np.ones((2, 8), np.float32)


class EncoderDecoder(nn.Module):
    inner: nn.Module

    def setup(self):
        self.encoder = nn.Dense(8)
        self.decoder = nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.Dense(4)])
        self.heads = [nn.Dense(2), nn.Dense(2)]

    def __call__(self, x):
        return [head(self.decoder(self.inner(self.encoder(x)))) for head in self.heads]


def model_and_variables(policy="mixed_float16"):
    model = mpjax.with_policy(EncoderDecoder(nn.Dense(8)), policy)
    return model, jax.eval_shape(model.init, jax.random.key(0), X)


PARTS = {
    "a submodule of setup": lambda m, x: m.decoder(x),
    "a part of a submodule": lambda m, x: m.decoder.layers[0](x),
    "a submodule in a list": lambda m, x: m.heads[1](x[:, :4]),
    "a field": lambda m, x: m.inner(x),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_bound_linen_model_runs_in_half(name):
    model, variables = model_and_variables()
    part = PARTS[name]
    for function in (lambda v, x: part(model.bind(v), x), nn.apply(part, model)):
        assert half_share(function, variables, X) == 1
        assert jax.eval_shape(function, variables, X).dtype == jnp.float32  # the output dtype, as for any method


def test_an_unbound_part_keeps_the_policy_and_its_path():
    policy = mpjax.Policy("float32", "float16", "float32", [("decoder/layers_2", "float32")])
    model = mpjax.with_policy(EncoderDecoder(nn.Dense(8)), policy)
    decoder, variables = model.bind(arrays_in_numpy(model.init)(cheap_keys.key(0), X)).decoder.unbind()
    # Of the two Dense layers the override keeps the second in float32: 8 × 4 of 8 × 8 + 8 × 4 multiplications.
    assert half_share(decoder.apply, variables, X) == pytest.approx(2 / 3)


def test_a_part_within_the_model_is_cast_once():
    model, variables = model_and_variables()
    plain = EncoderDecoder(nn.Dense(8))
    assert jax.tree.structure(variables) == jax.tree.structure(jax.eval_shape(plain.init, jax.random.key(0), X))
    assert half_share(model.apply, variables, X) == 1


def test_a_part_keeps_its_own_policy():
    class Outer(nn.Module):
        def setup(self):
            self.first = nn.Dense(8)
            self.last = mpjax.with_policy(nn.Dense(8), "float32")

        def __call__(self, x):
            return self.last(self.first(x))

    model = mpjax.with_policy(Outer(), "mixed_float16")
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    assert half_share(model.apply, variables, X) == 0.5
    assert half_share(lambda v, x: model.bind(v).last(x), variables, X) == 0
