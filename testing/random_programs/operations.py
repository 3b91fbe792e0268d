"""First-order expressions of random programs: templates by the types of their operands.

Every array has one of four shapes, so that any program type-checks and a jaxpr evaluator meets few shapes:
a scalar, a vector (3,), rows (2, 3) and a matrix (3, 3), all float32.
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

# Of any type, which they keep. Most are bounded, so that a long program stays in the range of float16.
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
    "lax.reduce_precision({0}, 8, 7)",
    "{0} * n",
    "{0} + n.astype(jnp.float32)",
    "lax.optimization_barrier({0})",
    "jnp.sinc({0})",
    "{0} * jnp.arctan2({0}, 1.5)",
    "jnp.real({0} * (1 + 0j))",
    "jnp.nan_to_num({0})",
)

# Of a type and one that broadcasts to it.
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

# Rows (or a matrix) by a matrix, and the result; these are what autocast is for.
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
)

# Results and operands of fixed types: sums, statistics, moving of elements, indices.
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
    (V, (V, V), "jnp.where(jnp.any({0} > 0), {0}, {1})"),
    (V, (V,), "jnp.fft.irfft(jnp.fft.rfft({0}), 3)"),
    (V, (V,), "lax.cumlogsumexp({0})"),
    (V, (M, V), "jnp.linalg.solve({0} / 4 + 2 * jnp.eye(3), {1})"),
    (S, (V,), "lax.reduce({0}, -jnp.inf, lax.max, (0,))"),
    (R, (R,), "lax.reduce_window({0}, 0.0, lax.add, (1, 2), (1, 1), 'SAME')"),
    (R, (R,), "lax.reduce_window({0}, -jnp.inf, lax.max, (1, 2), (1, 1), 'SAME')"),
)
