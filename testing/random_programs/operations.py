"""First-order expressions of random programs: templates by the types of their operands.

Every array is float32 with one of four shapes: a scalar, a vector (3,), rows (2, 3) or a matrix (3, 3). So any program
type-checks, and a jaxpr evaluator meets few shapes.
"""

from __future__ import annotations

import enum


class Type(enum.Enum):
    """The type of a float32 variable."""

    SCALAR = ()
    VECTOR = (3,)
    ROWS = (2, 3)
    MATRIX = (3, 3)

    @property
    def smaller(self) -> tuple[Type, ...]:
        """The types that broadcast to this one."""
        return {
            Type.SCALAR: (Type.SCALAR,),
            Type.VECTOR: (Type.VECTOR, Type.SCALAR),
            Type.ROWS: (Type.ROWS, Type.VECTOR, Type.SCALAR),
            Type.MATRIX: (Type.MATRIX, Type.VECTOR, Type.SCALAR),
        }[self]


S, V, R, M = Type.SCALAR, Type.VECTOR, Type.ROWS, Type.MATRIX

# Unary operations on any type, which they preserve. Most are bounded, to keep long programs in float16's range.
UNARY = (
    "jnp.tanh({0})",
    "jnp.sin({0})",
    "{0} * 0.5",
    "{0} + 1",
    "-{0}",
    "2.0 * {0} - 0.25",
    "jnp.cos({0})",
    "jax.nn.relu({0})",
    "jax.nn.sigmoid({0})",
    "jax.nn.gelu({0})",
    "jax.nn.silu({0})",
    "jax.nn.softplus({0})",
    "jnp.exp(-{0} * {0})",
    "jnp.exp({0})",
    "jnp.expm1(-jnp.abs({0}))",
    "jnp.log1p(jnp.abs({0}))",
    "jnp.log({0} * {0} + 1)",
    "jnp.sqrt({0} * {0} + 0.5)",
    "lax.rsqrt({0} * {0} + 1.0)",
    "jnp.cbrt({0} * {0} + 1.0)",
    "1 / ({0} * {0} + 1)",
    "{0} / 3",
    "jnp.square({0})",
    "{0} ** 3",
    "{0} ** 4",
    "(jnp.abs({0}) + 0.5) ** 0.7",
    "jax.scipy.special.erf({0})",
    "jnp.abs({0})",
    "jnp.clip({0}, -1.0, 1.0)",
    "jnp.maximum({0}, 0.0)",
    "jnp.where({0} > 0, {0}, 0.1 * {0})",
    "jnp.where({0} > 1e30, -jnp.inf, {0})",
    "jnp.where({0} < -0.1, -1e38, {0}).clip(-2)",
    "lax.stop_gradient({0})",
    "{0} + lax.stop_gradient(jnp.round({0}) - {0})",
    "{0}.astype(jnp.float16).astype(jnp.float32)",
    "{0}.astype(jnp.bfloat16).astype(jnp.float32)",
    "(jnp.tanh({0}.astype(jnp.float16)) * 2).astype(jnp.float32)",
    "{0}.astype(jnp.float32)",
    "checkpoint_name({0}, 'kept')",
    "(checkpoint_name({0} * 2, 'unread'), {0})[1]",
    "marked({0})",
    "sharded({0})",
    "replicated({0})",
    "lax.reduce_precision({0}, 8, 7)",
    "{0} * n",
    "{0} + n.astype(jnp.float32)",
    "lax.optimization_barrier({0})",
    "jnp.sinc({0})",
    "{0} * jnp.arctan2({0}, 1.5)",
    "jnp.real({0} * (1 + 0j))",
    "jnp.nan_to_num({0})",
    "{0} + ARRAY.sum()",
    "jax.pure_callback(np.tanh, jax.ShapeDtypeStruct({0}.shape, {0}.dtype), lax.stop_gradient({0})) + {0}",
    "scaled_by_vmap_rule({0})",
    "jax.lax.platform_dependent({0}, cpu=jnp.sin, default=jnp.cos)",
    "lax.map(jnp.tanh, {0}[None])[0]",
    "lax.associative_scan(jnp.add, jnp.stack([{0}, {0}]))[1]",
    "jax.named_call(jnp.tanh, name='block')({0})",
    "mpjax.float_function(jnp.tanh)({0})",
    "(lambda q: q - lax.pmax(lax.stop_gradient(q), ()))({0})",
    "jax.linearize(jnp.tanh, {0})[1]({0})",
    "jax.vjp(jnp.tanh, {0})[1](lax.convert_element_type({0}, jnp.float32))[0]",
)

# Binary operations on a type and one that broadcasts to it.
BINARY = (
    "{0} + {1}",
    "{0} * {1}",
    "{0} - {1}",
    "{1} - {0}",
    "jnp.maximum({0}, {1})",
    "jnp.minimum({1}, {0})",
    "{0} / (1 + {1} * {1})",
    "jnp.where({1} > 0, {0}, {1})",
    "jnp.where({0} < {1}, 1.0, {0})",
    "jnp.logaddexp({0}, {1})",
    "jnp.hypot({0}, {1} + 2.0)",
    "jnp.power(jnp.abs({0}) + 1, {1})",
    "0.5 * {0} + 0.5 * {1}",
    "jnp.arctan2({0}, {1} + 3.0)",
    "jnp.mod({0}, jnp.abs({1}) + 1.0)",
)

# Products, mostly of rows or a matrix with a matrix: the operations that autocast runs in half, with exceptions
# (inner products, an explicit precision, int8, complex numbers).
MATMULS = (
    (R, (R, M), "{0} @ {1}"),
    (M, (M, M), "{0} @ {1}"),
    (V, (V, M), "{0} @ {1}"),
    (V, (M, V), "{0} @ {1}"),
    (S, (V, V), "{0} @ {1}"),
    (M, (R, R), "{0}.T @ {1}"),
    (R, (R, M), "jnp.einsum('bi,oi->bo', {0}, {1})"),
    (V, (R, R), "jnp.einsum('bi,bi->i', {0}, {1})"),
    (M, (V, V), "jnp.outer({0}, {1})"),
    (R, (R, M), "jnp.dot({0}, {1}, preferred_element_type=jnp.float32)"),
    (R, (R, M), "jnp.dot({0}, {1}, precision='highest')"),
    (M, (M, M), "lax.dot({0}, {1}, precision=lax.DotAlgorithmPreset.F32_F32_F32)"),
    (R, (R, M), "(lambda q: jax.nn.softmax(q @ q.T) @ {0})({0} @ {1})"),
    (
        R,
        (R, M),
        "lax.conv_general_dilated({0}[None], {1}[None], (1,), 'SAME', dimension_numbers=CHANNELS_LAST)[0]",
    ),
    (R, (R, M), "lax.conv_general_dilated({0}.T[None], jnp.stack([{1}] * 2, -1), (1,), 'SAME')[0].T"),
    (R, (R, M), "jnp.dot({0}.astype(jnp.float16), {1}.astype(jnp.float16)).astype(jnp.float32)"),
    (R, (R, M), "jnp.dot({0}.astype(jnp.bfloat16), {1}.astype(jnp.bfloat16), preferred_element_type=jnp.float32)"),
    (R, (R, M), "{0} @ {1} + CONSTANT[0]"),
    (R, (R,), "{0} @ CONSTANT"),
    (M, (M,), "CONSTANT @ {0}"),
    (R, (R,), "{0} @ ARRAY"),
    (R, (R, M), "jnp.matmul({0}[:, None], jnp.stack([{1}, {1}]))[:, 0]"),
    (R, (R, M), "jax.nn.dot_product_attention(*(({0} @ {1})[None, :, None],) * 3)[0, :, 0]"),
    (R, (R, M), "lax.ragged_dot({0}, jnp.stack([{1}, {1}]), jnp.array([1, 1]))"),
    (R, (R, M), "lax.conv_transpose({0}[None], {1}[None], (1,), 'SAME', dimension_numbers=CHANNELS_LAST)[0]"),
    (R, (R, M), "int8_matmul({0}, {1})"),
    (R, (R, M), "({0} @ {1}).astype(jnp.bfloat16).astype(jnp.float32)"),
    (R, (R, M), "jnp.real(({0} * 1j) @ ({1} * 1j))"),
    (R, (R, M), "jnp.dot({0}, {1}, precision=lax.DotAlgorithmPreset.DEFAULT)"),
    (M, (M, M), "lax.dot({0}, {1}, precision=lax.Precision.HIGH)"),
)

# Masks of the shape (3, 3), or one that broadcasts to it, in which every row has an entry.
MASKS = (
    "jnp.tri(3, dtype=bool)",
    "jnp.tril(jnp.ones((3, 3), bool))",
    "~jnp.triu(jnp.ones((3, 3), bool), 1)",
    "jax.jit(lambda: jnp.tril(jnp.ones((3, 3), bool)))()",
    "(jnp.tril(jnp.ones((3, 3))) == 1)",
    "(jnp.arange(3)[:, None] >= jnp.arange(3))",
    "(jnp.abs(jnp.arange(3)[:, None] - jnp.arange(3)) < 2)",
    "jax.vmap(lambda row: jnp.arange(3) <= row)(jnp.arange(3))",
    "(jnp.arange(3) <= n % 3)",
    "((jnp.array([0, 0, 1])[:, None] == jnp.array([0, 0, 1])) & jnp.tri(3, dtype=bool))",
    "flax.linen.make_causal_mask(jnp.ones(3), dtype=bool)[0]",
    "(jax.random.bernoulli(KEY, 0.5, (3, 3)) | jnp.eye(3, dtype=bool))",
)

# Ways to apply a mask {1} to a matrix {0}.
MASKED = (
    "jnp.where({1}, {0}, -1e9)",
    "jnp.where({1}, {0}, 0.0)",
    "jnp.where({1}, {0}, -jnp.inf)",
    "jnp.where({1}, {0}, jnp.finfo(jnp.float32).min)",
    "lax.select(jnp.broadcast_to({1}, (3, 3)), {0}, jnp.full((3, 3), -1e30))",
    "({0} + jnp.where({1}, 0.0, -1e9))",
    "({0} + (1.0 - {1}.astype(jnp.float32)) * -1e4)",
    "jnp.where({1}, jnp.tanh({0} / 5.0) * 5.0, -2.3819763e38)",
    "({0} * {1})",
)

# Operations with fixed operand and result types: sums, statistics, data movement, indexing.
OTHERS = (
    (S, (R,), "{0}.mean()"),
    (S, (V,), "{0}.sum()"),
    (S, (R,), "({0} * {0}).mean()"),
    (V, (R,), "{0}.sum(0)"),
    (V, (R,), "{0}.mean(axis=0)"),
    (V, (M,), "{0}.max(1)"),
    (V, (M,), "jnp.linalg.norm({0} + 2.0, axis=0)"),
    (V, (R,), "jnp.prod({0}, 0)"),
    (S, (V,), "{0}.var()"),
    (S, (R,), "jax.scipy.special.logsumexp({0})"),
    (R, (R,), "jax.nn.softmax({0})"),
    (R, (R,), "jax.nn.log_softmax({0}, 0)"),
    (R, (R,), "jax.nn.standardize({0}, epsilon=0.1)"),
    (R, (R, V), "({0} - {0}.mean(-1, keepdims=True)) * lax.rsqrt({0}.var(-1, keepdims=True) + 0.1) * {1}"),
    (R, (R,), "jnp.cumsum({0}, 0)"),
    (V, (V,), "lax.cummax({0})"),
    (V, (V,), "jnp.sort({0})"),
    (V, (V,), "lax.top_k({0}, 3)[0]"),
    (R, (V,), "jnp.broadcast_to({0}, (2, 3))"),
    (M, (S,), "jnp.full((3, 3), {0})"),
    (R, (V, V), "jnp.stack([{0}, {1}])"),
    (M, (R, V), "jnp.concatenate([{0}, {1}[None]])"),
    (R, (M,), "{0}[:2]"),
    (V, (R,), "{0}[1]"),
    (V, (M,), "{0}[:, 0]"),
    (S, (V,), "{0}[2]"),
    (M, (M,), "{0}.T"),
    (R, (R,), "{0}[::-1]"),
    (R, (R,), "{0}.reshape(3, 2).reshape(2, 3)"),
    (M, (R,), "jnp.pad({0}, ((0, 1), (0, 0)))"),
    (V, (V,), "jnp.roll({0}, 1)"),
    (V, (R,), "{0}[n % 2]"),
    (V, (M,), "lax.dynamic_index_in_dim({0}, n, 0, keepdims=False)"),
    (R, (R, V), "{0}.at[0].set({1})"),
    (M, (M, V), "{0}.at[n % 3].add({1})"),
    (M, (M, V), "{0}.at[jnp.array([0, 0, 1])].add({1})"),
    (M, (M, V), "lax.dynamic_update_slice({0}, {1}[None], (1, 0))"),
    (R, (M,), "jnp.take({0}, jnp.array([2, 0]), axis=0)"),
    (R, (R,), "jnp.take_along_axis({0}, jnp.argsort({0}, 1), 1)"),
    (R, (R,), "jax.nn.one_hot(jnp.argmax({0}, 1), 3)"),
    (S, (R,), "optax.softmax_cross_entropy_with_integer_labels({0}, jnp.array([0, 2])).mean()"),
    (R, (R,), "{0} * jax.random.bernoulli(KEY, 0.5, (2, 3))"),
    (R, (R,), "{0} + 0.1 * jax.random.normal(KEY, (2, 3))"),
    (M, (), "jnp.eye(3)"),
    (R, (), "jnp.zeros((2, 3))"),
    (V, (), "jnp.arange(3.0)"),
    (V, (), "CONSTANT[1]"),
    (S, (), "jnp.float32(0.5)"),
    (S, (S,), "jax.random.uniform(jax.random.fold_in(KEY, n)) * {0}"),
    (R, (R,), "lax.scan(lambda k, r: (jax.random.split(k)[0], r * jax.random.uniform(k)), KEY, {0})[1]"),
    (R, (R,), "lax.scan(lambda c, r: ({{'sum': c['sum'] + r.sum()}}, c['sum'] * r), {{'sum': 0.0}}, {0})[1]"),
    (M, (V,), "jax.jacfwd(lambda v: jnp.tanh(v) * v.sum())({0})"),
    (M, (V,), "jax.jacrev(lambda v: jnp.tanh(v) * v.sum())({0})"),
    (M, (V, M), "jax.hessian(lambda v: jnp.tanh(v @ {1}).sum())({0})"),
    (V, (V,), "jnp.convolve({0}, jnp.array([0.5, 0.25]), mode='same')"),
    (R, (R,), "jnp.where(jnp.isfinite({0}), {0}, 0)"),
    (V, (R,), "jnp.median({0}, axis=0)"),
    (V, (M,), "jnp.diagonal({0})"),
    (M, (M,), "jnp.tril({0})"),
    (S, (M,), "jnp.trace({0})"),
    (S, (M,), "jnp.linalg.slogdet({0} / 4 + 2 * jnp.eye(3))[1]"),
    (M, (M,), "jnp.linalg.cholesky({0} @ {0}.T + jnp.eye(3))"),
    (V, (V,), "optax.safe_norm({0}, 0.1) * {0}"),
    (R, (R,), "flax_norm({0})"),
    (R, (R,), "optax.losses.huber_loss({0})"),
    (S, (V,), "optax.losses.sigmoid_binary_cross_entropy({0}, jnp.array([0.0, 1.0, 1.0])).sum()"),
    (V, (R,), "jax.ops.segment_sum({0}.ravel(), jnp.array([0, 0, 1, 1, 2, 2]), 3)"),
    (V, (V, V), "jnp.where(jnp.any({0} > 0), {0}, {1})"),
    (V, (V,), "jnp.fft.irfft(jnp.fft.rfft({0}), 3)"),
    (V, (V,), "lax.cumlogsumexp({0})"),
    (M, (M,), "jax.scipy.linalg.expm({0} / 4)"),
    (V, (M, V), "jnp.linalg.solve({0} / 4 + 2 * jnp.eye(3), {1})"),
    (S, (V,), "lax.reduce({0}, -jnp.inf, lax.max, (0,))"),
    (R, (R,), "lax.reduce_window({0}, 0.0, lax.add, (1, 2), (1, 1), 'SAME')"),
    (R, (R,), "lax.reduce_window({0}, -jnp.inf, lax.max, (1, 2), (1, 1), 'SAME')"),
)
