"""Arrays kept for the backward pass in eight bits: int8 or float8, and a power of two for each block of a row.

float8 has five bits of mantissa in the two largest of its seven binades, four in the next two and three in the others,
no infinity and no NaN, and is stored as uint8. The exponents of blocks have the range, and most of the norm of a block
is in its two largest binades: three bits of exponent and four of mantissa round these twice as coarsely.

A function whose derivative reads packed operands computes its results from the operands themselves, so the forward pass
is the same bit for bit. The derivative unpacks them under `jax.checkpoint`: only the packed form is stored.

Source: block scaling with powers of two, "OCP Microscaling Formats (MX)", 2023; activations stored in float8,
"COAT: Compressing Optimizer States and Activations for Memory-Efficient FP8 Training", ICLR 2025.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import Primitive

from mpjax.kernels import staging, weight_gradients
from mpjax.kernels.derivatives import define, set_derivative, set_no_derivative
from mpjax.kernels.rounding import integers, mixed, random_bits
from mpjax.program import compat

_SHORTEST_ROW = 16
_LONGEST_BLOCK = 32  # A longer one loses small elements beside a large one.
_LEAST, _MOST = np.int32(-126), np.int32(127)
_BIAS = np.int32(127)  # of float32's exponent
_MANTISSA_BITS = np.int32(23)
_SIGN = 128
# A float8, as the bits of a float16 that is 2^12 times smaller, is the least of lines: the larger it is, the fewer bits
# of mantissa are dropped. Of each line, these bits and the start.
_FLOAT16, _LINES = np.float32(2.0**12), ((7, 0), (6, 2048), (5, 4096))


class Packing(NamedTuple):
    """A format of packed arrays.

    Args:
        dtype: The dtype of elements.
        top: The largest element of a block is from 2 to this power to twice that; with stochastic rounding, up to 3%
            less.
        most: The largest number, which is less than twice that.
        stochastic: Whether elements are rounded up or down at random, so that gradients have no bias.
    """

    dtype: np.dtype
    top: int
    most: float
    stochastic: bool = False


# float8 rounds each element by up to 1/64 of its value (of small ones, 1/16); int8 rounds all of a block by up to 1/128
# of the largest.
PACKINGS = {"float8": Packing(np.dtype(np.uint8), 4, 31.5), "int8": Packing(np.dtype(np.int8), 6, 127)}
PACKINGS |= {f"{name}_stochastic": packing._replace(stochastic=True) for name, packing in PACKINGS.items()}
_WORDS = np.array([0x9E3779B9, 0x85EBCA6B], np.uint32)  # any two


class Packed(NamedTuple):
    """An array in eight bits.

    Args:
        elements: The shape of the array, in the dtype of a packing.
        exponents: int8, one for each block of the last axis: elements are multiplied by 2 to this power.
    """

    elements: Any
    exponents: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kept"], meta_fields=["dtypes", "fun", "index"])
@dataclasses.dataclass(frozen=True)
class Recomputed:
    """An array as a result of a function of arrays that are kept anyway: it is not kept itself.

    Args:
        kept: What is kept of each argument: the array, its packed form, or its half copy in a tuple.
        dtypes: The dtypes of the arguments.
        fun: The function.
        index: The number of its result.
    """

    kept: Sequence[Any]
    dtypes: tuple[Any, ...]
    fun: Callable[..., Sequence[Any]]
    index: int

    def array(self) -> Any:
        """The array, from what is kept."""
        return self.fun(*map(_widened, self.kept, self.dtypes))[self.index]


def _widened(kept: Any, dtype: Any) -> Any:
    if isinstance(kept, Packed):
        return unpack(kept, dtype)
    return kept[0].astype(dtype) if isinstance(kept, tuple) else kept


def can_pack(shape: Sequence[Any]) -> bool:
    """Whether arrays of a shape have rows long enough to be packed.

    Example:
        >>> can_pack((8, 64)), can_pack((8, 3)), can_pack(())
        (True, False, False)
    """
    return bool(shape) and all(isinstance(n, int) for n in shape) and shape[-1] >= _SHORTEST_ROW


def block_of(n: int) -> int:
    """The size of the blocks of rows: the largest divisor from 16 to 32, or the row if there is none.

    On a TPU, it is the row.

    Example:
        >>> block_of(768), block_of(1000), block_of(50257), block_of(101)
        (32, 25, 29, 101)
    """
    if compat.platform() == "tpu":  # Its rows are tiles of 128 elements: blocks would be copied to another layout.
        return n
    return next((size for size in range(_LONGEST_BLOCK, _SHORTEST_ROW - 1, -1) if n % size == 0), n)


def pack(x: Any, packing: Packing) -> Packed:
    """An array in eight bits; it has no derivative.

    Zeros and signs stay exact, and equal elements stay equal. Finite numbers stay finite. Numbers that are not finite
    become infinite.

    Args:
        x: float16 or bfloat16, shape (..., n).
        packing: One of `PACKINGS`.

    Example:
        >>> x = jnp.array([[0, 1, -3, 2.1] * 16], jnp.bfloat16)
        >>> both = PACKINGS["float8"], PACKINGS["int8"]
        >>> [unpack(pack(x, each), x.dtype)[0, :4].astype(float).tolist() for each in both]
        [[0.0, 1.0, -3.0, 2.125], [0.0, 1.0, -3.0, 2.09375]]
    """
    exponents = packed_exponents.bind(x, block=block_of(x.shape[-1]), packing=packing)
    return Packed(packed_elements.bind(x, exponents, packing=packing), exponents)


def _exponents(x: Any, *, block: int, packing: Packing) -> Any:
    largest = jnp.max(_in_blocks(_magnitude(x)[0], x.shape[-1] // block), axis=-1)
    largest = lax.bitcast_convert_type(largest, x.dtype).astype(np.float32)
    if packing.stochastic:  # There is no number to round up to.
        larger = largest * np.float32(2.0 ** (packing.top + 1) / packing.most)
        largest = jnp.where(larger > np.float32(compat.finfo(x.dtype).max), largest, larger)
    exponents = lax.shift_right_logical(lax.bitcast_convert_type(largest, np.int32), _MANTISSA_BITS) - _BIAS
    return jnp.clip(exponents - np.int32(packing.top), _LEAST, _MOST).astype(np.int8)


def _magnitude(x: Any) -> tuple[Any, Any]:
    """The bits of an array's magnitudes, which have their order, and whether its elements are negative.

    A rounding to half is one before its bits are read. XLA leaves out other ones, and would write float32 for packing.
    """
    dtype = np.dtype(f"uint{8 * x.dtype.itemsize}")
    word, most = lax.bitcast_convert_type(x, dtype), dtype.type(np.iinfo(dtype).max >> 1)
    return word & most, word > most


def _exponents_abstract_eval(x: Any, *, block: int, packing: Packing) -> Any:
    return x.update(shape=(*x.shape[:-1], x.shape[-1] // block), dtype=np.dtype(np.int8), weak_type=False)


def _elements(x: Any, exponents: Any, *, packing: Packing) -> Any:
    magnitude, is_negative = _magnitude(x)
    sizes = lax.bitcast_convert_type(magnitude, x.dtype).astype(np.float32)
    bits = _bits(sizes) if packing.stochastic else None
    sizes = sizes * _powers_of_two(-exponents.astype(np.int32), x.shape)
    if packing.dtype == np.uint8:
        word = lax.bitcast_convert_type((sizes / _FLOAT16).astype(np.float16), np.uint16).astype(np.float32)
        steps = [(word - np.float32(start)) / np.float32(1 << shift) for shift, start in _LINES]
        sizes = functools.reduce(jnp.maximum, steps)
    else:  # NaN becomes the largest number of a block whose other elements are 0, which unpacks to infinity.
        sizes = jnp.where(jnp.isnan(sizes), np.float32(_SIGN), sizes)
    sizes = jnp.round(sizes) if bits is None else integers(sizes, bits)
    elements = jnp.minimum(sizes, np.float32(_SIGN - 1)).astype(packing.dtype)
    negative = elements | _SIGN if packing.dtype == np.uint8 else -elements
    return jnp.where(is_negative & (elements != 0), negative, elements)


packed_exponents = Primitive("packed_exponents")
packed_elements = Primitive("packed_elements")
define(packed_exponents, _exponents, _exponents_abstract_eval)
define(packed_elements, _elements, lambda x, exponents, packing: x.update(dtype=packing.dtype, weak_type=False))
set_no_derivative(packed_exponents)
set_no_derivative(packed_elements)


def _bits(x: Any) -> Any:
    """Random bits for each element: a hash of its index and its value, so that a resumed run draws the same."""
    return mixed(random_bits(_WORDS, x.shape) ^ lax.bitcast_convert_type(x, np.uint32), _WORDS[::-1])


def unpack(packed: Packed, dtype: Any) -> Any:
    """The array of a packed one, in a dtype."""
    elements = packed.elements
    if elements.dtype == np.uint8:
        # Few operations: XLA writes float32 in place of fusing many with their readers. The factor is no constant, by
        # which XLA would multiply a power of two first, to infinity.
        size = (elements & (_SIGN - 1)).astype(np.int16)
        word = functools.reduce(jnp.minimum, [(size << shift) + np.int16(start) for shift, start in _LINES])
        factor = jnp.where(elements < _SIGN, _FLOAT16, -_FLOAT16)
        numbers = lax.bitcast_convert_type(word, np.float16).astype(np.float32) * factor
    else:
        numbers = elements.astype(np.float32)
    return (numbers * _powers_of_two(packed.exponents.astype(np.int32), elements.shape)).astype(dtype)


def _in_blocks(x: Any, count: int) -> Any:
    return x.reshape(*x.shape[:-1], count, x.shape[-1] // count)


def _powers_of_two(exponents: Any, shape: Sequence[int]) -> Any:
    """float32 powers of two for each element, exact on every device.

    XLA fuses the product of two arrays of this shape with its readers. Of arrays in blocks, it would write float32.
    """
    powers = lax.bitcast_convert_type(exponents + _BIAS << _MANTISSA_BITS, np.float32)
    size = shape[-1] // exponents.shape[-1]
    return jnp.broadcast_to(powers[..., None], (*exponents.shape, size)).reshape(shape)


# A packed array has no derivative, and the derivative of a derivative needs one: that of an array of no bytes, which
# stands for the array itself.
unstored, restored = Primitive("unstored"), Primitive("restored")
vars(unstored)["in_float32"] = lambda x: x
vars(restored)["in_float32"] = lambda x, *kept: x
define(
    unstored,
    lambda x: jnp.zeros((*x.shape, 0), np.int8),
    lambda x: x.update(dtype=compat.Empty(x.dtype), weak_type=False),
)
set_derivative(unstored, lambda primals, tangents, out, params: tangents[0], (0,), lambda ct, x: [ct])


define(
    restored,
    lambda empty, *kept: unpack(Packed(*kept), empty.dtype.tangent) if len(kept) > 1 else kept[0],
    lambda empty, *kept: empty.update(dtype=empty.dtype.tangent),
)
set_derivative(
    restored,
    lambda primals, tangents, out, params: tangents[0],
    (0,),
    lambda ct, *operands: [ct, *(None for _ in operands[1:])],
)


# Functions whose derivatives read packed operands.


def remembering(fun: Callable[..., Any], tangent: Callable[..., Sequence[Any]]) -> Any:
    """A function of a list of arrays and of what is kept of some, by index; its derivative reads the latter.

    It is a packed form, or of a float32 array a half copy.

    Args:
        fun: `fun(*arrays)` returns a list of results.
        tangent: `tangent(arrays, packs, moves)` returns the tangents of its floating results, given those of some
            operands, by index.
    """

    @jax.custom_jvp
    def call(arrays: Sequence[Any], packs: Mapping[int, Packed]) -> Any:
        return list(fun(*arrays))

    def rule(primals: Any, tangents: Any) -> Any:
        (arrays, packs), (moves, _) = primals, tangents
        outs = list(fun(*arrays))
        found = iter(tangent(arrays, packs, {i: dx for i, dx in enumerate(moves) if type(dx) is not SymbolicZero}))
        return outs, [
            next(found) if compat.is_inexact(jax.typeof(y)) else zero_from_primal(y, symbolic_zeros=True) for y in outs
        ]

    call.defjvp(rule, symbolic_zeros=True)
    return call


def remembered_matmul(
    primitive: Any,
    params: dict[str, Any],
    halves: Sequence[Any],
    operands: Sequence[Any],
    wide: bool,
    avals: Sequence[Any] | None,
    in_loop: Sequence[bool],
    packs: Mapping[int, Packed],
    prevent_cse: bool,
) -> Any:
    """`weight_gradients.matmul`, whose derivative reads the packed forms of some operands.

    Args:
        primitive, params, halves, operands, wide, avals, in_loop: As there.
        packs: The packed forms of operands, by index.
        prevent_cse: As in `jax.checkpoint`.
    """
    half, rest = halves[0].dtype, list(halves[2:])
    lows = {i: low for i, low in enumerate(halves[:2]) if low is not operands[i]}

    def product(a: Any, b: Any, *others: Any) -> Sequence[Any]:
        low = dict(zip(lows, others, strict=False))
        halves = [low.get(0, a), low.get(1, b), *others[len(lows) :]]
        if not lows:
            return [staging.bind(primitive, halves, params, avals)]
        return [weight_gradients.matmul(primitive, params, halves, (a, b), wide, avals, in_loop)]

    def tangent(arrays: Sequence[Any], packs: Mapping[int, Packed], moves: Mapping[int, Any]) -> Sequence[Any]:
        parts: list[Any] = []
        for i, low in zip(lows, arrays[2:], strict=False):  # The backward pass reads the copies of the forward pass.
            weight_gradients.remember_copy(low, arrays[i])
        for i, move in moves.items():
            if i > 1:  # The half copy of a parameter, which has the parameter's derivative.
                continue
            rest = arrays[2 + len(lows) :]
            of = functools.partial(_moved_product, i, primitive, {**params, "half": half, "wide": wide})
            if 1 - i in packs:
                of_packed = functools.partial(_of_packed, of)
                args = unstored.bind(arrays[1 - i]), packs[1 - i], move, *rest
                parts.append(compat.checkpoint(of_packed, args, (False, prevent_cse, *(False for _ in args[2:])), None))
            else:
                parts.append(of(arrays[1 - i], move, *rest))
        return [parts[0] if len(parts) == 1 else lax.add(*parts)]

    (out,) = remembering(product, tangent)([*operands, *lows.values(), *rest], packs)
    return out


def _of_packed(of: Callable[..., Any], empty: Any, packed: Packed | Recomputed, *others: Any) -> Any:
    kept = [packed.array()] if isinstance(packed, Recomputed) else packed
    return of(restored.bind(empty, *kept), *others)


def _moved_product(which: int, primitive: Any, params: dict[str, Any], factor: Any, move: Any, *rest: Any) -> Any:
    """The matmul of the tangent of operand `which` and the other operand."""
    pair = (factor, move) if which else (move, factor)
    return weight_gradients.tangent.bind(*pair, *rest, matmul=primitive, **params)


def tangent_of(fun: Callable[..., Any], checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """The `tangent` of `remembering` for any function: its derivative at the unpacked operands, recomputed when read.

    Args:
        fun: The function.
        checkpoint: `checkpoint(function, kept, packs, moves)` calls a function under `jax.checkpoint`.
    """

    @functools.cache
    def at(indices: tuple[int, ...]) -> Callable[..., Any]:
        def tangents(kept: Sequence[Any], packs: Mapping[int, Any], moves: Sequence[Any]) -> Any:
            arrays = [_restored_from(x, packs[i]) if i in packs else x for i, x in enumerate(kept)]
            scopes = compat.in_scopes()  # without a mark of `jax.jvp`

            def moved(*moving: Any) -> Any:
                given = dict(zip(indices, moving, strict=True))
                with scopes:
                    outs = fun(*(given.get(i, x) for i, x in enumerate(arrays)))
                return [y for y in outs if compat.is_inexact(jax.typeof(y))]

            return jax.jvp(moved, [arrays[i] for i in indices], list(moves))[1]

        return tangents

    def tangent(arrays: Sequence[Any], packs: Mapping[int, Any], moves: Mapping[int, Any]) -> Sequence[Any]:
        # A half copy has a derivative of its own, so nothing else is kept of its array.
        copies = {i: copy for i, (copy, *exponents) in packs.items() if not exponents}
        packs = {i: () if i in copies else packed for i, packed in packs.items()}
        kept = [copies[i] if i in copies else unstored.bind(x) if i in packs else x for i, x in enumerate(arrays)]
        outs: Sequence[Any] = checkpoint(at(tuple(moves)), kept, packs, list(moves.values()))
        return outs

    return tangent


def _restored_from(x: Any, packed: Any) -> Any:
    return restored.bind(x, *packed) if packed else x.astype(np.float32)
