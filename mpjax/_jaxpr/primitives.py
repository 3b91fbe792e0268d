"""One row per JAX primitive: everything that mpjax knows about it.

The lists (allow, deny, infer) follow TensorFlow's automatic mixed precision (`auto_mixed_precision_lists.h`) and
`torch.autocast`'s operator reference. They are finer in one respect: JAX derives the backward pass from the program
that autocast writes, so an operation whose *derivative* is a sum (the list `wide`) must run in float32 too.

No other file keeps a set of primitive names. To add a primitive, add a row.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Op(enum.Enum):
    """The list of a primitive: the dtypes that its floating inputs and outputs need."""

    ALLOW = "allow"  # Tensor Core work: half.
    DENY = "deny"  # Needs the range or the mantissa of float32.
    INFER = "infer"  # Computes in the dtype of its activations.
    WIDE = "wide"  # float32 only because its derivative is a sum; the result counts as its input did.
    MOVE = "move"  # Moves elements, and its derivative has no sum: any dtype will do.
    READ = "read"  # The result is no float (a comparison): reads the widest dtype that is stored.
    CONVERT = "convert"  # A cast that the user or jax.numpy wrote.
    ENTER = "enter"  # Has sub-jaxprs, which autocast plans too.
    OPAQUE = "opaque"  # Called with the dtypes that it was traced for.


class Saves(enum.Enum):
    """The floating values that a primitive's derivative saves for the backward pass."""

    NOTHING = "nothing"
    INPUTS = "inputs"
    OUTPUTS = "outputs"


class Primitive(NamedTuple):
    """What mpjax knows about a primitive.

    Args:
        name: the name that JAX gives it.
        op: its list.
        saves: what its derivative saves; None where it is not differentiated as one operation.
        expensive: too expensive, or unsafe, to recompute in the backward pass.
        float32_only: never half, not even in a `half_function`: XLA has no half kernel, or the bits have a meaning.
        elementwise: mixes arrays with scalars, so its derivative with respect to the scalar is a sum.
        join: joins arrays without arithmetic, so a cast before it equals a cast after it.
        saturating: its derivative (1 - y², y - y²) cancels near saturation; float32 where that costs no memory.
        mask: makes integers and masks cheaply enough to be recomputed.
        some_versions: not every supported JAX has it.
    """

    name: str
    op: Op
    saves: Saves | None = None
    expensive: bool = False
    float32_only: bool = False
    elementwise: bool = False
    join: bool = False
    saturating: bool = False
    mask: bool = False
    some_versions: bool = False

    @property
    def moves(self) -> bool:
        """Whether it only moves elements, or changes their dtype."""
        return self.op in (Op.MOVE, Op.CONVERT)


# Name, list, what its derivative saves, and the traits of `Primitive` that hold.
_TABLE = """
# Tensor Core work: half.
dot_general                           allow    inputs   expensive
conv_general_dilated                  allow    inputs   expensive
ragged_dot_general                    allow    inputs   expensive
# Exponentials, logarithms and powers: range.
exp                                   deny     outputs
exp2                                  deny     outputs
expm1                                 deny     outputs
log                                   deny     inputs
log1p                                 deny     inputs
log2                                  deny     outputs  some_versions
pow                                   deny     inputs   elementwise
integer_pow                           deny     inputs
sqrt                                  deny     outputs
rsqrt                                 deny     outputs
cbrt                                  deny     outputs
polynomial                            deny     outputs  float32_only some_versions
# Special and trigonometric functions: mantissa.
erf                                   deny     inputs
erfc                                  deny     outputs
erf_inv                               deny     outputs
lgamma                                deny     outputs
digamma                               deny     outputs
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
tan                                   deny     inputs
asin                                  deny     outputs
acos                                  deny     outputs
atan                                  deny     outputs
atan2                                 deny     inputs   elementwise
sinh                                  deny     outputs
cosh                                  deny     outputs
asinh                                 deny     outputs
acosh                                 deny     outputs
atanh                                 deny     outputs
nextafter                             deny     outputs  float32_only elementwise
# Sums and products.
reduce_sum                            deny     nothing
reduce_prod                           deny     outputs
cumsum                                deny     nothing  expensive
cumprod                               deny     outputs  expensive
cumlogsumexp                          deny     outputs  expensive
psum                                  deny     nothing  expensive
psum_invariant                        deny     nothing  expensive
unreduced_psum                        deny     nothing  expensive
reduce_scatter                        deny     nothing  expensive
scatter-add                           deny     outputs  expensive
scatter-sub                           deny     outputs  expensive
scatter-mul                           deny     outputs  expensive
select_and_scatter_add                deny     outputs  expensive
select_and_gather_add                 deny     outputs  expensive
# Linear algebra, and what reads bits or complex numbers.
fft                                   deny     nothing  expensive float32_only
lu                                    deny     outputs  expensive float32_only
qr                                    deny     outputs  expensive float32_only
geqrf                                 deny     outputs  expensive float32_only
ormqr                                 deny     outputs  expensive float32_only
householder_product                   deny     outputs  expensive float32_only
eig                                   deny     outputs  expensive float32_only
eigh                                  deny     outputs  expensive float32_only
svd                                   deny     outputs  expensive float32_only
schur                                 deny     outputs  expensive float32_only
hessenberg                            deny     outputs  expensive float32_only
cholesky                              deny     outputs  expensive float32_only
cholesky_update                       deny     outputs  expensive float32_only
tridiagonal                           deny     outputs  expensive float32_only
tridiagonal_solve                     deny     outputs  expensive float32_only
triangular_solve                      deny     outputs  expensive float32_only
symmetric_product                     deny     outputs  expensive
reduce_precision                      deny     nothing  float32_only
bitcast_convert_type                  deny     outputs  float32_only
real                                  deny     nothing  float32_only
imag                                  deny     nothing  float32_only
complex                               deny     nothing  float32_only
conj                                  deny     nothing  float32_only
rng_uniform                           deny     outputs
# Their derivative is a sum.
broadcast_in_dim                      wide     nothing  mask
gather                                wide     nothing
reduce_max                            wide     outputs
reduce_min                            wide     outputs
reduce_window_sum                     wide     nothing
cummax                                wide     outputs  expensive
cummin                                wide     outputs  expensive
sort                                  wide     outputs  expensive
top_k                                 wide     outputs  expensive
approx_top_k                          wide     outputs  expensive
scatter                               wide     outputs  expensive
scatter-max                           wide     outputs  expensive
scatter-min                           wide     outputs  expensive
all_gather                            wide     nothing  expensive
all_gather_invariant                  wide     nothing  expensive
all_gather_reduced                    wide     nothing  expensive
pvary                                 wide     nothing  expensive float32_only
pmax                                  wide     outputs  expensive
pmin                                  wide     outputs  expensive
div                                   wide     inputs   elementwise
tile                                  wide     nothing
# Moves elements; the derivative has no sum.
reshape                               move     nothing  mask
transpose                             move     nothing
squeeze                               move     nothing
slice                                 move     nothing
dynamic_slice                         move     nothing
rev                                   move     nothing
copy                                  move     nothing
split                                 move     nothing
unstack                               move     nothing  some_versions
name                                  move     nothing  expensive
stop_gradient                         move     nothing
sharding_constraint                   move     nothing
device_put                            move     nothing  expensive
ppermute                              move     nothing  expensive
all_to_all                            move     nothing  expensive
reshard                               move     nothing
relayout                              move     nothing  some_versions
layout_constraint                     move     nothing
optimization_barrier                  move     nothing  expensive
reduced_vary_cast                     move     nothing  some_versions
reduced_vary_cast_p                   move     nothing  some_versions
vary_unreduced_cast                   move     nothing  some_versions
vary_unreduced_cast_p                 move     nothing  some_versions
with_memory_space_constraint          move     nothing
pin                                   move     nothing
unpin                                 move     nothing
reduce_window_max                     move     nothing
reduce_window_min                     move     nothing
# Computes in the dtype of its activations.
add                                   infer    nothing  elementwise
add_any                               infer    nothing  elementwise
sub                                   infer    nothing  elementwise
mul                                   infer    inputs   elementwise
neg                                   infer    nothing
abs                                   infer    inputs
sign                                  infer    nothing
max                                   infer    outputs  elementwise
min                                   infer    outputs  elementwise
clamp                                 infer    outputs  elementwise
select_n                              infer    nothing  elementwise
rem                                   infer    outputs  elementwise
round                                 infer    nothing
floor                                 infer    nothing
ceil                                  infer    nothing
square                                infer    outputs
one_minus_square                      infer    outputs  some_versions
logistic                              infer    outputs  saturating
tanh                                  infer    outputs  saturating
concatenate                           infer    nothing  join
pad                                   infer    nothing  join
dynamic_update_slice                  infer    outputs  join
stack                                 infer    outputs  join some_versions
tie                                   infer    outputs
iota                                  infer    nothing  mask
empty                                 infer    nothing
empty2                                infer    nothing
# The result is no float.
eq                                    read     -        mask
ne                                    read     -        mask
lt                                    read     -        mask
le                                    read     -        mask
gt                                    read     -        mask
ge                                    read     -        mask
eq_to                                 read     -
lt_to                                 read     -
le_to                                 read     -
argmax                                read     -
argmin                                read     -
is_finite                             read     -        mask
and                                   read     -        mask
or                                    read     -        mask
not                                   read     -        mask
xor                                   read     -        mask
reduce_and                            read     -
reduce_or                             read     -
reduce_xor                            read     -
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
random_bits                           read     -        expensive
random_clone                          read     -
random_fold_in                        read     -
random_seed                           read     -
random_split                          read     -
random_unwrap                         read     -
random_wrap                           read     -
rng_bit_generator                     read     -
threefry2x32                          read     -
threefry4x32                          read     -        some_versions
philox2x32                            read     -        some_versions
philox4x32                            read     -        some_versions
from_edtype                           read     -
to_edtype                             read     -
shape_assertion                       read     -
unreachable                           read     -
# A cast that the user or jax.numpy wrote.
convert_element_type                  convert  nothing
# Higher-order primitives that autocast enters.
jit                                   enter    -
call                                  enter    -        some_versions
closed_call                           enter    -        some_versions
remat2                                enter    -
scan                                  enter    -
while                                 enter    -
cond                                  enter    -
custom_jvp_call                       enter    -
custom_vjp_call                       enter    -
shard_map                             enter    -
custom_linear_solve                   enter    -
custom_vmap_call                      enter    -
# Called with the dtypes they were traced for.
after_all                             opaque   -
all_gather_done                       opaque   -
all_gather_reduced_start              opaque   -
all_gather_start                      opaque   -
all_to_all_done                       opaque   -
all_to_all_start                      opaque   -
call_exported                         opaque   -
composite                             opaque   -
core_map                              opaque   -        some_versions
create_linear                         opaque   -
create_token                          opaque   -
custom_lin                            opaque   -
custom_partitioning                   opaque   -
dce_sink                              opaque   -
dim_as_value                          opaque   -
dimension_size                        opaque   -
dot_product_attention_bwd_wrapper     opaque   -
dot_product_attention_fp8_bwd_wrapper opaque   -
dot_product_attention_fp8_fwd_wrapper opaque   -
dot_product_attention_fwd_wrapper     opaque   -
eval_jaxpr                            opaque   -        some_versions
ffi_call                              opaque   -
get                                   opaque   -
swap                                  opaque   -
inspect_sharding                      opaque   -
io_callback                           opaque   -
pure_callback                         opaque   -
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
reduce_window                         opaque   -
reduce_scatter_done                   opaque   -
reduce_scatter_start                  opaque   -
remat_opt                             opaque   -
run_state                             opaque   -
scaled_dot                            opaque   -
scaled_matmul                         opaque   -        some_versions
scaled_matmul_wrapper                 opaque   -
select_and_scatter                    opaque   -
stage                                 opaque   -        some_versions
unreduced_pmax                        opaque   -        some_versions
unreduced_pmin                        opaque   -        some_versions
unreduced_psum_start                  opaque   -        some_versions
unreduced_reduce_scatter              opaque   -
unreduced_reduce_scatter_start        opaque   -        some_versions
pallas_call                           opaque   -
"""


def _rows() -> dict[str, Primitive]:
    rows: dict[str, Primitive] = {}
    for line in _TABLE.splitlines():
        if not line or line.startswith("#"):
            continue
        name, op, saves, *traits = line.split()
        assert name not in rows, f"{name} has two rows"
        rows[name] = Primitive(name, Op(op), None if saves == "-" else Saves(saves), **dict.fromkeys(traits, True))
    return rows


TABLE = _rows()


def primitive(name: str) -> Primitive:
    """The row of a primitive; one that the table lacks is opaque.

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
