"""The table of JAX primitives: one row each, with everything that mpjax knows about it.

The lists (allow, deny, infer) follow TensorFlow's automatic mixed precision (`auto_mixed_precision_lists.h`) and
`torch.autocast`'s operator reference. They are finer in one respect. JAX derives the backward pass from the program
that autocast writes, so an operation whose *derivative* is a sum (the list `wide`) must run in float32 too.

No other file contains a set of primitive names. To add a primitive, add a row.
"""

from __future__ import annotations

import enum
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
    """The floating values that a primitive's derivative saves for the backward pass."""

    NOTHING = "nothing"
    INPUTS = "inputs"
    OUTPUTS = "outputs"


class Primitive(NamedTuple):
    """What mpjax knows about a primitive.

    Args:
        name: Its name in JAX.
        op: Its list.
        saves: The values that its derivative saves; None if it is not differentiated as one operation.
        expensive: Too expensive, or unsafe, to recompute in the backward pass.
        float32_only: Never half, not even in a `half_function`: XLA has no half kernel, or the bits matter.
        elementwise: Mixes arrays with scalars, so its derivative with respect to the scalar is a sum.
        join: Joins arrays without arithmetic, so a cast before it equals a cast after it.
        saturating: Its derivative (1 - y², y - y²) cancels near saturation; float32 where that costs no memory.
        whole: Its result has exactly the elements of its operand.
        elements: The operands whose elements its result has, as a subscript; empty if it computes new elements.
        exact: Its results have the magnitude of its operands, up to rounding to an integer (`floor`, `sign`, `rem`).
        linear: In which operands it is linear, where `saves` does not tell: `all` together, `each` alone, the `first`.
        adds: Adds or subtracts.
        logic: Combines booleans, or tests for finite values.
        risk: Why half precision may be inaccurate: `exp`, `log`, `pow` (range, poles) or `sum` (rounding).
        chooses: Compares elements to choose among them.
        bits: Depends on the bits or the dtype itself, so it is not computed in another dtype.
        call: Runs its one sub-jaxpr once, on its operands.
        loop: Runs its sub-jaxpr repeatedly.
        foreign: Runs code that is not visible to JAX.
        kernel: XLA launches a kernel for it; other operations are fused into their consumers.
        accumulates: A sum passed through it is still that sum, possibly with another term added.
        replicates: Copies a value of one device to others, so its derivative is a sum over devices.
        label: Only names its operand, for functions that look for the name in a program.
        identity: Returns its first operand. The others are for its derivative alone.
        communicates: May send elements to other devices, which takes half the time in half.
        some_versions: Not in every supported JAX version.
    """

    name: str
    op: Op
    saves: Saves | None = None
    expensive: bool = False
    float32_only: bool = False
    elementwise: bool = False
    join: bool = False
    saturating: bool = False
    whole: bool = False
    elements: str = ""
    exact: bool = False
    linear: str = ""
    adds: bool = False
    logic: bool = False
    risk: str = ""
    chooses: bool = False
    bits: bool = False
    call: bool = False
    loop: bool = False
    foreign: bool = False
    kernel: bool = False
    accumulates: bool = False
    replicates: bool = False
    label: bool = False
    identity: bool = False
    communicates: bool = False
    some_versions: bool = False

    @property
    def moves(self) -> bool:
        """Whether it only moves elements, or changes their dtype."""
        return self.op in (Op.MOVE, Op.CONVERT)

    @property
    def keeps_values(self) -> bool:
        """Whether each element of the result is an element of an operand."""
        return self.whole or bool(self.elements)

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


# Name, list, the values that its derivative saves, and its traits from `Primitive`.
_TABLE = """
# Tensor Core work: half.
dot_general                           allow    inputs   expensive kernel linear=each
conv_general_dilated                  allow    inputs   expensive kernel linear=each
ragged_dot_general                    allow    inputs   expensive kernel linear=each
fused_attention                       allow    inputs   expensive kernel
# Exponentials, logarithms and powers: range.
exp                                   deny     outputs  risk=exp
exp2                                  deny     outputs  risk=exp
expm1                                 deny     outputs  risk=exp
log                                   deny     inputs   risk=log
log1p                                 deny     inputs   risk=log
log2                                  deny     outputs  some_versions risk=log
pow                                   deny     inputs   elementwise risk=pow
integer_pow                           deny     inputs
sqrt                                  deny     outputs
rsqrt                                 deny     outputs
cbrt                                  deny     outputs  risk=pow
polynomial                            deny     outputs  float32_only some_versions
# Special and trigonometric functions: mantissa.
erf                                   deny     inputs
erfc                                  deny     outputs
erf_inv                               deny     outputs  risk=pow
lgamma                                deny     outputs  risk=log
digamma                               deny     outputs  risk=log
polygamma                             deny     outputs  float32_only
zeta                                  deny     outputs  float32_only
igamma                                deny     outputs  expensive float32_only
igammac                               deny     outputs  expensive float32_only
igamma_grad_a                         deny     outputs  expensive float32_only
random_gamma                          deny     outputs  expensive float32_only
regularized_incomplete_beta           deny     outputs  expensive float32_only
bessel_i0e                            deny     outputs
bessel_i1e                            deny     outputs
sin                                   deny     inputs
cos                                   deny     inputs
tan                                   deny     inputs   risk=pow
asin                                  deny     outputs
acos                                  deny     outputs
atan                                  deny     outputs
atan2                                 deny     inputs   elementwise
sinh                                  deny     outputs  risk=exp
cosh                                  deny     outputs  risk=exp
asinh                                 deny     outputs
acosh                                 deny     outputs  risk=log
atanh                                 deny     outputs  risk=log
nextafter                             deny     outputs  float32_only elementwise bits
# Sums and products.
reduce_sum                            deny     nothing  risk=sum kernel
reduce_prod                           deny     outputs  risk=sum kernel
cumsum                                deny     nothing  expensive risk=sum kernel
cumprod                               deny     outputs  expensive risk=sum kernel
cumlogsumexp                          deny     outputs  expensive risk=sum kernel
psum                                  deny     nothing  expensive risk=sum kernel
psum_invariant                        deny     nothing  expensive risk=sum kernel
unreduced_psum                        deny     nothing  expensive risk=sum
reduce_scatter                        deny     nothing  expensive risk=sum kernel
scatter-add                           deny     outputs  expensive risk=sum kernel linear=all
scatter-sub                           deny     outputs  expensive risk=sum kernel linear=all
scatter-mul                           deny     outputs  expensive risk=sum kernel
select_and_scatter_add                deny     outputs  expensive kernel
select_and_gather_add                 deny     outputs  expensive kernel
# Linear algebra, and what reads bits or complex numbers.
fft                                   deny     nothing  expensive float32_only kernel
lu                                    deny     outputs  expensive float32_only kernel
qr                                    deny     outputs  expensive float32_only kernel
geqrf                                 deny     outputs  expensive float32_only kernel
ormqr                                 deny     outputs  expensive float32_only kernel
householder_product                   deny     outputs  expensive float32_only kernel
eig                                   deny     outputs  expensive float32_only kernel
eigh                                  deny     outputs  expensive float32_only kernel
svd                                   deny     outputs  expensive float32_only kernel
schur                                 deny     outputs  expensive float32_only kernel
hessenberg                            deny     outputs  expensive float32_only kernel
cholesky                              deny     outputs  expensive float32_only kernel
cholesky_update                       deny     outputs  expensive float32_only
tridiagonal                           deny     outputs  expensive float32_only
tridiagonal_solve                     deny     outputs  expensive float32_only kernel
triangular_solve                      deny     outputs  expensive float32_only kernel
symmetric_product                     deny     outputs  expensive
reduce_precision                      deny     nothing  float32_only elements=0
bitcast_convert_type                  deny     outputs  float32_only bits
real                                  deny     nothing  float32_only
imag                                  deny     nothing  float32_only
complex                               deny     nothing  float32_only
conj                                  deny     nothing  float32_only
rng_uniform                           deny     outputs  expensive
# Their derivative is a sum.
broadcast_in_dim                      wide     nothing  whole
gather                                wide     nothing  elements=0 kernel
reduce_max                            wide     outputs  elements=0 kernel
reduce_min                            wide     outputs  elements=0 kernel
reduce_window_sum                     wide     nothing  risk=sum kernel
cummax                                wide     outputs  expensive elements=0 kernel
cummin                                wide     outputs  expensive elements=0 kernel
sort                                  wide     outputs  expensive elements=0 kernel chooses
top_k                                 wide     outputs  expensive elements=0 kernel chooses
approx_top_k                          wide     outputs  expensive elements=0 kernel chooses
scatter                               wide     outputs  expensive elements=0,2 kernel linear=all
scatter-max                           wide     outputs  expensive elements=0,2 kernel
scatter-min                           wide     outputs  expensive elements=0,2 kernel
all_gather                            wide     nothing  expensive elements=0 kernel replicates
all_gather_invariant                  wide     nothing  expensive elements=0 replicates
all_gather_reduced                    wide     nothing  expensive elements=0 replicates
pvary                                 wide     nothing  expensive float32_only whole replicates
pmax                                  wide     outputs  expensive elements=0
pmin                                  wide     outputs  expensive elements=0
div                                   wide     inputs   elementwise linear=first
tile                                  wide     nothing  whole
# Moves elements; the derivative has no sum.
reshape                               move     nothing  whole accumulates
transpose                             move     nothing  whole
squeeze                               move     nothing  whole
slice                                 move     nothing  elements=0
dynamic_slice                         move     nothing  elements=0
rev                                   move     nothing  whole
copy                                  move     nothing  whole accumulates
split                                 move     nothing  elements=0
unstack                               move     nothing  some_versions elements=0
name                                  move     nothing  expensive whole label
stop_gradient                         move     nothing  whole
sharding_constraint                   move     nothing  whole
xla_metadata_value                    move     nothing  some_versions whole
device_put                            move     nothing  expensive whole
ppermute                              move     nothing  expensive elements=0 kernel communicates
all_to_all                            move     nothing  expensive elements=0 kernel communicates
reshard                               move     nothing  whole communicates
relayout                              move     nothing  some_versions whole
layout_constraint                     move     nothing  whole
optimization_barrier                  move     nothing  expensive whole
reduced_vary_cast                     move     nothing  some_versions whole
reduced_vary_cast_p                   move     nothing  some_versions whole
vary_unreduced_cast                   move     nothing  some_versions whole
vary_unreduced_cast_p                 move     nothing  some_versions whole
with_memory_space_constraint          move     nothing  whole
pin                                   move     nothing  whole
unpin                                 move     nothing  whole
reduce_window_max                     move     nothing  elements=0 kernel
reduce_window_min                     move     nothing  elements=0 kernel
# mpjax's own (`mpjax._jaxpr.weight_gradients`, `mpjax._jaxpr.unfused`).
detached                              move     nothing  some_versions whole identity
matmul_result                         move     nothing  some_versions whole identity
straight_through                      move     nothing  some_versions whole identity
aligned                               move     nothing  some_versions whole identity
unfused                               move     nothing  some_versions whole
matmul_tangent                        opaque   -        expensive some_versions
# mpjax's own (`mpjax._jaxpr.float8`).
float8_scale                          opaque   -        expensive some_versions kernel
float8_quantise                       opaque   -        some_versions elements=0
float8_rescale                        opaque   -        some_versions elements=0
float8_result                         move     nothing  some_versions whole identity
float8_tangent                        opaque   -        expensive some_versions
# Computes in the dtype of its activations.
add                                   infer    nothing  elementwise adds accumulates
add_any                               infer    nothing  elementwise adds accumulates
sub                                   infer    nothing  elementwise adds accumulates
mul                                   infer    inputs   elementwise linear=each
neg                                   infer    nothing  exact linear=all
abs                                   infer    inputs   exact
sign                                  infer    nothing  exact
max                                   infer    outputs  elementwise elements=all
min                                   infer    outputs  elementwise elements=all
clamp                                 infer    outputs  elementwise elements=all
select_n                              infer    nothing  elementwise elements=1: accumulates
rem                                   infer    outputs  elementwise exact
round                                 infer    nothing  exact
floor                                 infer    nothing  exact
ceil                                  infer    nothing  exact
square                                infer    outputs
one_minus_square                      infer    outputs  some_versions
logistic                              infer    outputs  saturating
tanh                                  infer    outputs  saturating
concatenate                           infer    nothing  join elements=all
pad                                   infer    nothing  join elements=all
dynamic_update_slice                  infer    outputs  join elements=0,1 kernel linear=all
stack                                 infer    outputs  join some_versions elements=all
tie                                   infer    outputs
iota                                  infer    nothing  exact
empty                                 infer    nothing  exact
empty2                                infer    nothing  exact
# The result is not a float.
eq                                    read     -
ne                                    read     -
lt                                    read     -
le                                    read     -
gt                                    read     -
ge                                    read     -
eq_to                                 read     -
lt_to                                 read     -
le_to                                 read     -
argmax                                read     -        kernel chooses
argmin                                read     -        kernel chooses
is_finite                             read     -        logic
and                                   read     -        logic
or                                    read     -        logic
not                                   read     -        logic
xor                                   read     -
reduce_and                            read     -        logic kernel
reduce_or                             read     -        logic kernel
reduce_xor                            read     -        kernel
shift_left                            read     -
shift_right_arithmetic                read     -
shift_right_logical                   read     -
clz                                   read     -
population_count                      read     -
mulhi                                 read     -        some_versions
axis_index                            read     -
platform_index                        read     -
broadcast_to                          read     -
iota_2x32_shape                       read     -
lu_pivots_to_permutation              read     -
random_bits                           read     -        expensive bits kernel
random_clone                          read     -        expensive
random_fold_in                        read     -        expensive
random_seed                           read     -        expensive
random_split                          read     -        expensive
random_unwrap                         read     -        expensive
random_wrap                           read     -        expensive
rng_bit_generator                     read     -        expensive
threefry2x32                          read     -        kernel expensive
threefry4x32                          read     -        some_versions expensive
philox2x32                            read     -        some_versions expensive
philox4x32                            read     -        some_versions expensive
from_edtype                           read     -
to_edtype                             read     -
shape_assertion                       read     -
unreachable                           read     -
# A cast that the user or jax.numpy wrote.
convert_element_type                  convert  nothing  elements=0
# Higher-order primitives that autocast enters.
jit                                   enter    -        call
call                                  enter    -        some_versions call
closed_call                           enter    -        some_versions call
eval_jaxpr                            enter    -        some_versions call
remat2                                enter    -        call expensive
xla_metadata_call                     enter    -        some_versions call
scan                                  enter    -        loop kernel
while                                 enter    -        loop kernel
cond                                  enter    -        kernel
custom_jvp_call                       enter    -        call
custom_vjp_call                       enter    -        call expensive
composite                             enter    -        call expensive
shard_map                             enter    -
custom_vmap_call                      enter    -        call expensive
# Called with the dtypes they were traced for.
after_all                             opaque   -
all_gather_done                       opaque   -
all_gather_reduced_start              opaque   -
all_gather_start                      opaque   -
all_to_all_done                       opaque   -
all_to_all_start                      opaque   -
call_exported                         opaque   -        foreign
core_map                              opaque   -        some_versions
create_linear                         opaque   -
create_token                          opaque   -
custom_lin                            opaque   -
custom_linear_solve                   opaque   -
custom_partitioning                   opaque   -
dce_sink                              opaque   -
debug_callback                        opaque   -        some_versions
debug_print                           opaque   -        some_versions
dim_as_value                          opaque   -
dimension_size                        opaque   -
dot_product_attention_bwd_wrapper     opaque   -        foreign
dot_product_attention_fp8_bwd_wrapper opaque   -        foreign
dot_product_attention_fp8_fwd_wrapper opaque   -        foreign
dot_product_attention_fwd_wrapper     opaque   -        foreign
ffi_call                              opaque   -        foreign kernel
get                                   opaque   -
swap                                  opaque   -
inspect_sharding                      opaque   -
io_callback                           opaque   -        foreign kernel
pure_callback                         opaque   -        foreign kernel
linear_call                           opaque   -
ppermute_done                         opaque   -
ppermute_start                        opaque   -
pbroadcast_done                       opaque   -        some_versions
precv                                 opaque   -
preduced                              opaque   -
psend                                 opaque   -
psum_done                             opaque   -
psum_start                            opaque   -        some_versions
psum_invariant_start                  opaque   -
ragged_all_to_all                     opaque   -
reduce                                opaque   -
reduce_window                         opaque   -        kernel
reduce_scatter_done                   opaque   -
reduce_scatter_start                  opaque   -
remat_opt                             opaque   -
run_state                             opaque   -
scaled_dot                            opaque   -
scaled_matmul                         opaque   -        some_versions
scaled_matmul_wrapper                 opaque   -
select_and_scatter                    opaque   -        kernel
stage                                 opaque   -        some_versions
unreduced_pmax                        opaque   -        some_versions
unreduced_pmin                        opaque   -        some_versions
unreduced_psum_start                  opaque   -        some_versions
unreduced_reduce_scatter              opaque   -
unreduced_reduce_scatter_start        opaque   -        some_versions
pallas_call                           opaque   -        kernel
"""


def _rows() -> dict[str, Primitive]:
    rows: dict[str, Primitive] = {}
    for line in _TABLE.splitlines():
        if not line or line.startswith("#"):
            continue
        name, op, saves, *traits = line.split()
        assert name not in rows, f"{name} has two rows"
        values: dict[str, Any] = {key: value or True for key, _, value in (trait.partition("=") for trait in traits)}
        rows[name] = Primitive(name, Op(op), None if saves == "-" else Saves(saves), **values)
    return rows


TABLE = _rows()


def primitive(name: str) -> Primitive:
    """The row of a primitive; a primitive without a row is opaque.

    Example:
        >>> primitive("exp").op, primitive("exp").saves
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
