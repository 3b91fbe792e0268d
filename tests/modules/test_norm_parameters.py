"""Which parameters level O2 keeps in float32: those of normalisation layers, by their class where it is known."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from testing import cheap_keys
from testing.random_programs.evaluate import arrays_in_numpy
from tests.modules.flax_models import of_nnx

F16, F32 = jnp.dtype("float16"), jnp.dtype("float32")
X = np.ones((2, 8), np.float32)


def dtypes(tree):
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x.dtype for p, x in jax.tree.leaves_with_path(tree)}


class Block(nn.Module):
    def setup(self):
        self.ln_1, self.ln_f, self.rms = nn.LayerNorm(), nn.GroupNorm(2), nn.RMSNorm()
        self.normalizer = nn.Dense(8)  # its name says norm, its class does not

    def __call__(self, x):
        return self.normalizer(self.ln_f(self.rms(self.ln_1(x))))


def test_linen_norms_are_known_by_their_class():
    model = mpjax.with_policy(nn.Sequential([nn.Dense(8), nn.LayerNorm(), Block()]), "O2")
    found = dtypes(jax.eval_shape(model.init, jax.random.key(0), X)["params"])
    norms = ("layers_1/", "layers_2/ln_1/", "layers_2/ln_f/", "layers_2/rms/")
    assert found == {path: F32 if path.startswith(norms) else F16 for path in found}
    assert jax.eval_shape(model.init_with_output, jax.random.key(0), X)[0].dtype == F32


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.ln_f, self.normalizer = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.normalizer(self.ln_f(x))


def nnx_model():
    rngs = nnx.Rngs(cheap_keys.key(0))
    return nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.RMSNorm(8, rngs=rngs), NnxBlock(rngs))


@pytest.mark.parametrize("convert", [lambda m: mpjax.with_policy(m, "O2"), mpjax.get_policy("O2").cast_to_param])
def test_nnx_norms_are_known_by_their_class(convert):
    found = dtypes(nnx.to_pure_dict(nnx.state(convert(of_nnx(nnx_model)), nnx.Param)))
    assert found == {p: F32 if p.startswith(("layers/1/", "layers/2/ln_f/")) else F16 for p in found}


def test_equinox_norms_are_known_by_their_class():
    linear = arrays_in_numpy(lambda key: eqx.nn.Linear(4, 4, key=key))(cheap_keys.key(0))
    model = eqx.nn.Sequential([linear, eqx.nn.LayerNorm(4)])
    found = dtypes(eqx.filter(mpjax.get_policy("O2").cast_to_param({"net": model}), eqx.is_array))
    assert set(found.values()) == {F16, F32}
    assert {p for p in found if found[p] == F32} == {"net/layers/1/weight", "net/layers/1/bias"}


NORM_NAMES = ["LayerNorm_0", "batch_norm", "norm1", "bn", "bn_2", "ln_1", "ln_f", "rms", "gn3"]


@pytest.mark.parametrize("name", NORM_NAMES)
def test_in_a_plain_tree_norms_are_known_by_their_names(name):
    tree = {name: {"scale": jnp.ones(2)}, "Dense_0": jnp.ones(2), "balance": jnp.ones(2), "lnet": jnp.ones(2)}
    found = dtypes(mpjax.get_policy("O2").cast_to_param(tree))
    assert found == {path: F32 if path.startswith(name) else F16 for path in found}


def test_the_pattern_for_norms_is_accepted_and_part_of_the_string():
    policy = mpjax.Policy("float32", "float16", "float32", [("<norm>", "float32"), ("*/head", "float32")])
    assert mpjax.get_policy(str(policy)) == policy
    assert mpjax.get_policy(str(mpjax.get_policy("O2"))) == mpjax.get_policy("O2")
    model = mpjax.with_policy(nn.Sequential([nn.Dense(8), nn.LayerNorm()]), mpjax.get_policy("p=f16;<norm>=>float32"))
    found = dtypes(jax.eval_shape(model.init, jax.random.key(0), X)["params"])
    assert found == {path: F32 if path.startswith("layers_1/") else F16 for path in found}
