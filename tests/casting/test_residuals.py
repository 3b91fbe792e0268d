"""The backward pass never stores more than the float32 program, even at the smallest batch."""

from __future__ import annotations

import jax
import pytest

from mpjax import autocast
from testing import measures
from testing.models.zoo import REGISTRY, harness

# One for each way to hold weights; the rest of the zoo repeats these.
NAMES = """
    linen_mlp linen_cnn_batchnorm linen_transformer linen_transformer_scan_remat linen_lstm linen_gru_ctc
    haiku_attention equinox_recurrent scan_lstm scan_accumulator nnx_scanned_attention embedding_tied moe_einsum
    moe_ragged conv_pooling custom_vjp_linear cond_branches jit_nested checkpoint_policies
""".split()


def of_one_example(batch):
    """A batch of abstract arrays with one example."""
    size = next(x.shape[0] for x in jax.tree.leaves(batch) if x.ndim)
    return jax.tree.map(lambda x: x.update(shape=(1, *x.shape[1:])) if x.ndim and x.shape[0] == size else x, batch)


@pytest.mark.parametrize("name", NAMES)
def test_backward_pass_of_one_example_stores_no_more_than_in_float32(name):
    # With one example, the weights are most of what is stored.
    program, (loss_fn, params, batch) = REGISTRY[name], harness.abstract(name)
    args = params, of_one_example(batch)
    with program.context():
        kept, in_float32 = (
            measures.residual_bytes(fun, *args, has_aux=program.has_aux)
            for fun in (autocast(loss_fn, "mixed_float16"), loss_fn)
        )
    # A backward loop reads the half copies of its kernels, which were made before the forward loop.
    copies = sum(p.size * 2 for p in jax.tree.leaves(params) if p.ndim == 2) if name == "scan_lstm" else 0
    assert kept <= in_float32 + copies
