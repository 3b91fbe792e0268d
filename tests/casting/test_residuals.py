"""What the backward pass stores, at the smallest batch: nowhere more than the float32 program."""

from __future__ import annotations

import jax
import pytest

from mpjax import autocast
from testing import measures
from testing.zoo import REGISTRY, harness

# Their batch must divide over devices, or is bound to other arrays.
FIXED_BATCH = {"jit_shardings", "shard_map_data", "shard_map_tensor", "nnx_cnn_batchnorm"}
# The matmul in its derivative rule is linear in a tangent, and JAX stores the half of the weight that it reads.
IN_A_RULE = {"custom_jvp_wrong"}
NAMES = [name for name, program in REGISTRY.items() if program.differentiable and name not in FIXED_BATCH | IN_A_RULE]


def of_one_example(batch):
    """A batch of abstract arrays with one example."""
    size = next(x.shape[0] for x in jax.tree.leaves(batch) if x.ndim)
    return jax.tree.map(lambda x: x.update(shape=(1, *x.shape[1:])) if x.ndim and x.shape[0] == size else x, batch)


@pytest.mark.parametrize("name", NAMES)
def test_backward_pass_of_one_example_keeps_no_more_than_in_float32(name):
    # With one example, the weights are what there is to store.
    program, (loss_fn, params, batch) = REGISTRY[name], harness.abstract(name)
    args = params, of_one_example(batch)
    with program.context():
        kept, in_float32 = (
            measures.residual_bytes(fun, *args, has_aux=program.has_aux)
            for fun in (autocast(loss_fn, "mixed_float16"), loss_fn)
        )
    assert kept <= in_float32
