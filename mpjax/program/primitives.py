"""The table of JAX primitives, `primitives.txt`: one row each, with everything that mpjax knows about it.

The lists (allow, deny, infer) follow TensorFlow's automatic mixed precision (`auto_mixed_precision_lists.h`) and
`torch.autocast`'s operator reference. They are finer in one respect. JAX derives the backward pass from the program
that autocast writes, so an operation whose *derivative* is a sum (the list `wide`) must run in float32 too.

No other file knows a primitive by its name, unless it says why. To add a primitive, add a row there.
"""

from __future__ import annotations

import enum
import importlib.resources
import math
from typing import Any, NamedTuple


class Op(enum.Enum):
    """The list of a primitive: the dtypes that its floating inputs and outputs need."""

    ALLOW = "allow"  # Tensor Core work: half.
    DENY = "deny"  # Needs the range or the mantissa of float32.
    INFER = "infer"  # Computes in the dtype of its activations.
    WIDE = "wide"  # float32 only because its derivative is a sum; the result is treated as its input was.
    MOVE = "move"  # Moves elements, and its derivative has no sum: any dtype works.
    READ = "read"  # The result is not a float (a comparison): reads the widest stored dtype.
    CONVERT = "convert"  # A cast that the user or jax.numpy wrote.
    ENTER = "enter"  # Has sub-jaxprs, which autocast plans too.
    OPAQUE = "opaque"  # Called with the dtypes it was traced with.

    __hash__ = object.__hash__  # Enum's own hash measurably slows tracing.


class Saves(enum.Enum):
    """The floating values from which a primitive's derivative follows."""

    NOTHING = "nothing"
    INPUTS = "inputs"
    OUTPUTS = "outputs"
    SATURATING = "saturating"  # Outputs; 1 - y² and y - y² cancel near saturation: from the exact argument.


class Backward(NamedTuple):
    """What the backward pass takes from a primitive.

    Args:
        saves: From what its derivative follows; None if it is not differentiated as one operation.
        kept: Whether its results are stored. Others may be recomputed: that is cheap, and gives the same values.
    """

    saves: Saves | None
    kept: bool

    @classmethod
    def read(cls, text: str) -> Backward:
        """Reads a word of the table.

        Example:
            >>> Backward.read("inputs,kept"), Backward.read("-")
            (Backward(saves=<Saves.INPUTS: 'inputs'>, kept=True), Backward(saves=None, kept=False))
        """
        saves = [Saves(word) for word in text.split(",") if word not in ("-", "kept")]
        return cls(saves[0] if saves else None, "kept" in text)


class Primitive(NamedTuple):
    """What mpjax knows about a primitive.

    Args:
        name: Its name in JAX.
        op: Its list.
        backward: What the backward pass takes from it.
        float32_only: Never half, not even in a `half_function`: XLA has no half kernel, or the bits matter.
        elementwise: Mixes arrays with scalars, so its derivative with respect to the scalar is a sum.
        join: Joins arrays without arithmetic, so a cast before it equals a cast after it.
        pointwise: Each element of its result depends on the same element of its operands alone.
        compares: Compares its two operands by their order or equality.
        whole: Its result has exactly the elements of its operand.
        elements: The operands whose elements its result has, as a subscript; empty if it computes new elements.
        exact: Its results have the magnitude of its operands, up to rounding to an integer (`floor`, `sign`, `rem`).
        linear: In which operands it is linear, unless it saves nothing: `all` together, `each` alone, the `first`.
        adds: Adds or subtracts.
        logic: Combines booleans, or tests for finite values.
        risk: Why half precision may be inaccurate: `exp`, `log`, `pow` (range, poles) or `sum` (rounding).
        amplifies: The operands whose rounding it amplifies, somewhere in their range: `all`, the `second`, or `equals`,
            arrays of one shape. Poles, steps, large derivatives, periods, differences of near-equal numbers, choices.
        lookup: Looks up rows of its first operand, at the indices of the second.
        worst: Where it amplifies a rounding without limit, in words for reports, as `near_1`.
        bounded: The bounds of its results, as `0:inf`.
        decomposes: Decomposes a matrix or solves equations, so its condition number multiplies a rounding.
        chooses: Compares elements to choose among them.
        bits: Depends on the bits or the dtype itself, so it is not computed in another dtype.
        call: Runs its one sub-jaxpr once, on its operands.
        shards: Runs its one sub-jaxpr once on each device, on its part of the operands.
        rule: Has a derivative rule of the program.
        loop: Runs its sub-jaxpr repeatedly.
        foreign: Runs code that is not visible to JAX.
        host: Runs Python code on the host.
        solve: Solves linear systems, which need float32.
        kernel: XLA launches a kernel for it; other operations are fused into their consumers.
        accumulates: A sum passed through it is still that sum, possibly with another term added.
        replicates: Copies a value of one device to others, so its derivative is a sum over devices.
        label: Only names its operand, for functions that look for the name in a program.
        identity: Returns its first operand. The others are for its derivative alone.
        unread: Its first operand is for its derivative alone; the compiled program doesn't read it.
        communicates: May send elements to other devices, which takes half the time in half.
        attends: The matmuls of scores by features in an attention, if it is one.
        heads: The matmuls of rows by a vocabulary in a loss, if it is one.
        contracts: Contracts two operands as `dot_general` does, with the same dimension numbers.
        some_versions: Not in every supported JAX version.
    """

    name: str
    op: Op
    backward: Backward = Backward(None, False)
    float32_only: bool = False
    elementwise: bool = False
    join: bool = False
    pointwise: bool = False
    compares: bool = False
    whole: bool = False
    elements: str = ""
    exact: bool = False
    linear: str = ""
    adds: bool = False
    logic: bool = False
    risk: str = ""
    amplifies: str = ""
    lookup: bool = False
    worst: str = ""
    bounded: str = ""
    decomposes: bool = False
    chooses: bool = False
    bits: bool = False
    call: bool = False
    shards: bool = False
    rule: bool = False
    loop: bool = False
    foreign: bool = False
    host: bool = False
    solve: bool = False
    kernel: bool = False
    accumulates: bool = False
    replicates: bool = False
    label: bool = False
    identity: bool = False
    unread: bool = False
    communicates: bool = False
    attends: str = ""
    heads: str = ""
    contracts: bool = False
    some_versions: bool = False

    @property
    def moves(self) -> bool:
        """Whether it only moves elements, or changes their dtype."""
        return self.op in (Op.MOVE, Op.CONVERT)

    @property
    def scales(self) -> bool:
        """Whether it multiplies or divides elements, so that it scales an array by a number."""
        return self.elementwise and bool(self.linear)

    @property
    def multiplies(self) -> bool:
        """Whether it multiplies elements."""
        return self.elementwise and self.linear == "each"

    @property
    def keeps_values(self) -> bool:
        """Whether each element of the result is an element of an operand."""
        return self.whole or bool(self.elements)

    @property
    def overwrites(self) -> bool:
        """Whether it overwrites a part of its first operand by another."""
        return self.elements.startswith("0,")

    @property
    def is_affine(self) -> bool:
        """Whether it only adds, scales, joins and moves elements, or chooses among them."""
        return self.backward.saves is Saves.NOTHING or bool(self.linear) or self.keeps_values

    @property
    def keeps_integers(self) -> bool:
        """Whether its results are integers if its operands are. Quotients are not."""
        return (self.is_affine or self.exact) and self.linear != "first"

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of its results.

        Example:
            >>> primitive("tanh").bounds, primitive("add").bounds
            ((-1.0, 1.0), (-inf, inf))
        """
        low, _, high = (self.bounded or "-inf:inf").partition(":")
        return float(low), float(high)

    def sources(self, operands: int) -> range | list[int]:
        """The indices of the operands whose elements the result has, given the number of operands.

        Example:
            >>> primitive("select_n").sources(3), primitive("scatter").sources(3)
            (range(1, 3), [0, 2])
        """
        if self.whole or self.elements == "all":
            return range(operands)
        start, colon, _ = self.elements.partition(":")
        return range(int(start), operands) if colon else [int(i) for i in self.elements.split(",") if i]


def _rows() -> dict[str, Primitive]:
    rows: dict[str, Primitive] = {}
    table = importlib.resources.files(__package__).joinpath("primitives.txt").read_text("utf-8")
    for line in table.splitlines():
        if not line or line.startswith("#"):
            continue
        name, op, backward, *traits = line.split()
        assert name not in rows, f"{name} has two rows"
        values: dict[str, Any] = {key: value or True for key, _, value in (trait.partition("=") for trait in traits)}
        rows[name] = Primitive(name, Op(op), Backward.read(backward), **values)
    return rows


TABLE = _rows()


def primitive(name: str) -> Primitive:
    """The row of a primitive; a primitive without a row is opaque.

    Example:
        >>> primitive("exp").op, primitive("exp").backward.saves
        (<Op.DENY: 'deny'>, <Saves.OUTPUTS: 'outputs'>)
        >>> primitive("of_somebody_else").op
        <Op.OPAQUE: 'opaque'>
    """
    return TABLE.get(name) or Primitive(name, Op.OPAQUE)


def named(*ops: Op) -> frozenset[str]:
    """The primitives in these lists."""
    return frozenset(name for name, row in TABLE.items() if row.op in ops)


# Matmuls and convolutions.
MATMULS = named(Op.ALLOW)


def drops_axes(eqn: Any) -> bool:
    """Whether it is a sum over axes of length 1, by which JAX drops them."""
    is_sum = eqn.primitive.name == "reduce_sum"
    return is_sum and math.prod(eqn.invars[0].aval.shape) == math.prod(eqn.outvars[0].aval.shape)


# FLOPs of matmuls and convolutions.


def is_product(eqn: Any) -> bool:
    """Whether a `dot_general` sums nothing: its contraction has size one, or there is none. It only multiplies."""
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return all(eqn.invars[0].aval.shape[d] == 1 for d in contracted)


def matmul_flops(eqn: Any) -> int:
    """FLOPs of one matmul or convolution, where a multiply-add counts as two; 0 for any other operation."""
    name = eqn.primitive.name
    if count := primitive(name).attends:
        (batch, queries, heads, width), (_, keys, *_), (*_, of_values) = (v.aval.shape for v in eqn.invars[:3])
        return int(count) * batch * heads * queries * keys * (width + of_values)
    if count := primitive(name).heads:
        pairs = ((eqn.invars[i].aval.size, eqn.invars[i + 1].aval.shape[1]) for i in eqn.params["head"].places("x"))
        return sum(2 * int(count) * size * vocabulary for size, vocabulary in pairs)
    if not (name in MATMULS or primitive(name).contracts) or is_product(eqn):
        return 0
    lhs, rhs = (v.aval for v in eqn.invars[:2])
    out = math.prod(eqn.outvars[0].aval.shape)
    if name == "dot_general" or primitive(name).contracts:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(lhs.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        return 2 * _conv_multiplications(eqn)
    if name == "fused_attention":  # Two matmuls: the operands are queries, keys and values.
        options = eqn.params["options"]
        return 2 * options.scores * (options.ins[0].merged[-1] + options.out.merged[-1])
    if name == "fused_cross_entropy":
        return int(eqn.params["options"].flops)
    # A ragged dot multiplies each row by the matrix of its group.
    dims = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = dims.dot_dimension_numbers
    others = {*contracted, *batch, *dims.rhs_group_dimensions}
    return 2 * math.prod(lhs.shape) * math.prod(n for d, n in enumerate(rhs.shape) if d not in others)


def is_weight_gradient(eqn: Any) -> bool:
    """Whether a convolution is JAX's weight gradient, which has the inputs' channels in place of the batch."""
    return eqn.params["dimension_numbers"].lhs_spec[0] != 0


def _conv_multiplications(eqn: Any) -> int:
    """Multiplications of a convolution, counted by output, or by input where that gives fewer.

    The count by input is smaller for a transposed convolution, including the gradient by the input. The other
    multiplications are by padding and by the zeros that the stride inserts between the inputs. So a gradient has the
    same count as its convolution.
    """
    lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
    out, numbers = eqn.outvars[0].aval.shape, eqn.params["dimension_numbers"]
    features, inner = (max(rhs[d], 1) for d in numbers.rhs_spec[:2])
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    of_outputs = math.prod(out) * math.prod(rhs) // features
    if is_weight_gradient(eqn):
        return of_outputs
    return min(of_outputs, math.prod(lhs) * math.prod(rhs) // (inner * groups))
