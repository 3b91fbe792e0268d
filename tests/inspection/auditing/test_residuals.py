"""What `audit` says is kept for the backward pass, against JAX's own list of what it saves."""

import collections
import math
import re

import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

import mpjax
from testing.models.zoo import REGISTRY, harness

# JAX lists arrays that hold one constant (the zeros of a `where`, of relu's rule, an initial carry), which XLA makes
# where they are read, and what its rules save and never read. It counts whole arrays where `audit` counts one device's.
_ONE_CONSTANT = re.compile(r"output of (broadcast_in_dim|select_n|mul|jitted function '_?\w+')")
OF_ONE_DEVICE = {"shard_map_data", "shard_map_tensor", "pmap_replicas"}
# Its own gradient is a part of the loss: `audit` shows what that gradient keeps.
DIFFERENTIATES = {"gradient_penalty"}
COMPARED = [n for n, program in REGISTRY.items() if program.differentiable and n not in OF_ONE_DEVICE | DIFFERENTIATES]
QUICK = "linen_mlp nnx_mlp linen_cnn_batchnorm linen_lstm equinox_recurrent checkpoint_policies moe_ragged".split()


def saved(lines):
    """The bytes of each array that JAX saves, apart from arguments and constants, with JAX's words."""
    for line in lines:
        found = re.match(r"([a-z]+)(\d*)\[([\d,]*)\] ((output of|named) .*)", line)
        if found:
            kind, bits, shape, what, _ = found.groups()
            size = 8 if kind == "bool" else int(bits or 8)
            yield math.prod(map(int, filter(None, shape.split(",")))) * size // 8, what


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in COMPARED])
def test_what_is_kept_is_what_jax_saves(name, capsys):
    program, (loss, params, batch) = REGISTRY[name], harness.concrete(name)
    with program.context():
        fun = (lambda *args: loss(*args)[0]) if program.has_aux else loss
        print_saved_residuals(lambda params: fun(params, batch), params)
        theirs = [*saved(capsys.readouterr().out.splitlines())]
        report = mpjax.audit(fun, params, batch)
    kept = collections.Counter({row: row.count for row in report.kept})
    assert sum(row.bytes for row in kept) == sum(report.residuals.values())
    difference = sum(size for size, _ in theirs) - sum(report.residuals.values())
    # What JAX saves beside it is of one constant: some of such arrays make up the difference.
    sizes = {0}
    for size in (size for size, what in theirs if _ONE_CONSTANT.match(what)):
        sizes |= {before + size for before in sizes}
    assert difference in sizes, (difference, theirs, report.kept)


def test_a_state_of_nnx_is_differentiated_like_any_first_argument():
    loss, params, batch = harness.abstract("nnx_mlp")
    assert mpjax.audit(loss, params, batch).residuals == {"float32": 279552, "int32": 1028, "bool": 256}


def test_what_a_checkpoint_saves_is_named_by_the_operation_that_made_it():
    import jax

    def loss(w, x, policy):
        layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=policy)
        return jnp.sum(layer(w, layer(w, x)))

    w = x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    policies = jax.checkpoint_policies
    for policy, op in ((policies.dots_saveable, "dot_general"), (policies.everything_saveable, "tanh")):
        kept = mpjax.audit(jax.grad(lambda w, x, policy=policy: loss(w, x, policy)), w, x).kept
        assert op in {row.op for row in kept}
        assert "reduce_precision" not in {row.op for row in kept}
