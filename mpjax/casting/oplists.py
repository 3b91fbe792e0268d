"""The default lists: which primitives run in half, which in float32, and which follow their inputs.

The division is that of TensorFlow's automatic mixed precision (`auto_mixed_precision_lists.h`: allow,
deny, infer, clear) and of `torch.autocast`'s op reference, carried over to JAX's primitives. It is
finer than theirs in one way: in JAX the backward pass is derived from the program that autocast
writes, so an operation *whose derivative is a sum* must run in float32 too, or the sum is in half.
"""

from __future__ import annotations

import enum


class Op(enum.Enum):
    """What a primitive asks of its floating inputs and outputs."""

    ALLOW = "allow"  # Tensor Core work: half.
    DENY = "deny"  # needs float32's range or mantissa.
    INFER = "infer"  # computes in what its activations are.
    WIDE = "wide"  # float32 only because its derivative is a sum; its result counts as its input did.
    MOVE = "move"  # moves elements about; the derivative has no sum: any dtype will do.
    READ = "read"  # the result is no float (a comparison): reads the best there is.
    CONVERT = "convert"  # a cast that the user or jax.numpy wrote.
    ENTER = "enter"  # has a program inside.
    OPAQUE = "opaque"  # can't be looked into: called with the dtypes it was traced for.


ALLOW = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})

DENY = frozenset(
    # exponentials, logarithms, powers: range
    """exp exp2 expm1 log log1p log2 pow integer_pow sqrt rsqrt cbrt polynomial erf erfc erf_inv lgamma
    digamma polygamma zeta igamma igammac igamma_grad_a random_gamma random_gamma_grad rng_uniform
    regularized_incomplete_beta bessel_i0e bessel_i1e sin cos tan asin acos atan atan2 sinh cosh asinh
    acosh atanh nextafter reduce_sum reduce_prod cumsum cumprod cumlogsumexp psum psum_invariant
    reduce_scatter unreduced_psum scatter-add scatter-sub scatter-mul scatter_add scatter_mul
    select_and_scatter_add select_and_gather_add symmetric_product fft lu qr geqrf ormqr
    householder_product eig eigh svd schur hessenberg cholesky cholesky_update tridiagonal
    tridiagonal_solve triangular_solve reduce_precision bitcast_convert_type real imag complex conj
    """.split()
)

# Small whole powers are products of the input with itself and no wider than `mul`.
HARMLESS_POWERS = frozenset({2, 3})

WIDE = frozenset(
    """broadcast_in_dim gather reduce_max reduce_min reduce_window_sum cummax cummin sort top_k
    approx_top_k scatter scatter-max scatter-min scatter_max scatter_min all_gather all_gather_invariant
    all_gather_reduced pvary pbroadcast pmax pmin div tile
    """.split()
)

MOVE = frozenset(
    """reshape transpose squeeze slice dynamic_slice rev copy copy_p name stop_gradient sharding_constraint
    device_put expand_dims ppermute all_to_all split reshard relayout layout_constraint
    optimization_barrier reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p
    with_memory_space_constraint unstack pin unpin reduce_window_max reduce_window_min
    """.split()
)

INFER = frozenset(
    """add add_any sub mul neg abs sign max min clamp select_n rem round floor ceil square logistic tanh
    concatenate pad dynamic_update_slice stack one_minus_square tie iota empty empty2
    """.split()
)

READ = frozenset("eq ne lt le gt ge eq_to lt_to le_to argmax argmin is_finite".split())

ENTER = frozenset(
    """jit pjit closed_call call core_call remat2 checkpoint scan while cond custom_jvp_call
    custom_vjp_call shard_map
    """.split()
)

# Join arrays without arithmetic: where only half is read of the result, casting before is casting after.
JOINS = frozenset({"concatenate", "pad", "dynamic_update_slice", "stack"})

# Their derivatives (1 - y², y - y²) lose what is left of y near saturation. Where float32 arithmetic costs no
# memory, because the backward pass computes it again, they run in float32.
SATURATING = frozenset({"tanh", "logistic"})

# Elementwise operations of several operands, which JAX lets mix arrays with scalars: the derivative
# with respect to the scalar is a sum over the array.
ELEMENTWISE = frozenset("add add_any sub mul div max min rem clamp select_n atan2 pow nextafter".split())

DEFAULTS: dict[str, Op] = {
    **dict.fromkeys(ALLOW, Op.ALLOW),
    **dict.fromkeys(DENY, Op.DENY),
    **dict.fromkeys(INFER, Op.INFER),
    **dict.fromkeys(WIDE, Op.WIDE),
    **dict.fromkeys(MOVE, Op.MOVE),
    **dict.fromkeys(READ, Op.READ),
    **dict.fromkeys(ENTER, Op.ENTER),
    "convert_element_type": Op.CONVERT,
}

# Not even a region of half functions takes these to half: XLA has no kernels, or the bits mean something.
NEVER_HALF = frozenset(
    """fft lu qr geqrf ormqr householder_product eig eigh svd schur hessenberg cholesky cholesky_update
    tridiagonal tridiagonal_solve triangular_solve reduce_precision bitcast_convert_type real imag
    complex conj random_gamma random_gamma_grad regularized_incomplete_beta igamma igammac igamma_grad_a
    zeta polygamma nextafter pvary pbroadcast polynomial
    """.split()
)
