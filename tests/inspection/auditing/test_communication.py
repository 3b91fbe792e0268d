"""The table of collectives: known programs on four devices, and the text of programs compiled for GPUs."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.inspection.auditing.communication import collectives
from mpjax.inspection.profiling.hlo import sizes

SHARES = 4


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((SHARES,), ("data",), axis_types=(AxisType.Auto,))


def shape(mesh, sizes, *axes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))


def rows(report):
    return {(row.op, row.dtype): (row.group, row.arrays, row.bytes) for row in report.communication}


def test_explicit_collectives_are_counted_with_their_dtypes_and_turns(mesh):
    def program(x, y):
        def body(carry, _):
            return carry + jax.lax.psum(jnp.sum(carry), "data").astype(jnp.float32), None

        gathered = jax.lax.all_gather(x.astype(jnp.float16), "data", tiled=True)
        scattered = jax.lax.psum_scatter(y, "data", tiled=True)
        return jax.lax.scan(body, scattered, length=3)[0] + jnp.sum(gathered.astype(jnp.float32))

    mapped = jax.shard_map(program, mesh=mesh, in_specs=(P("data"), P(None)), out_specs=P("data"))
    x, y = jax.ShapeDtypeStruct((64,), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.float32)
    report = mpjax.audit(mapped, x, y)
    found = rows(report)
    assert found["all-gather", "float16"] == (SHARES, 1, 128)
    assert found["reduce-scatter", "float32"] == (SHARES, 1, 128)
    assert found["all-reduce", "float32"] == (SHARES, 3, 12)
    assert not any(row.is_sum_in_half for row in report.communication)
    assert "none of it summed in half" in str(report)
    assert json.loads(report.to_json())["communication"][0]["bytes"] == 128


def test_the_widened_collectives_of_a_cpu_are_said_to_be_such(mesh):
    def gathered(dtype):
        x = shape(mesh, (64, 32), "data")
        everywhere = NamedSharding(mesh, P())
        return mpjax.audit(jax.jit(lambda x: jax.lax.with_sharding_constraint(x.astype(dtype), everywhere)), x)

    notes = {dtype: " ".join(gathered(dtype).notes) for dtype in ("bfloat16", "float16", "float32")}
    assert "XLA's CPU backend, which sends bfloat16 arrays as float32" in notes["bfloat16"]
    assert "CPU" not in notes["float16"] + notes["float32"]


def test_a_gradient_that_is_summed_in_half_is_told_with_its_module(mesh):
    def loss(w, x):
        with jax.named_scope("Dense_0"):
            return jnp.mean((x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32))

    report = mpjax.audit(jax.jit(jax.grad(loss)), shape(mesh, (64, 32)), shape(mesh, (128, 64), "data"))
    (row,) = (row for row in report.communication if row.is_sum_in_half)
    assert (row.op, row.dtype, row.bytes, row.module) == ("all-reduce", "float16", 64 * 32 * 2, "Dense_0")
    assert "4.1 kB of it summed in half" in str(report)


def test_programs_for_one_device_and_unknown_ones_say_so(mesh):
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert mpjax.audit(jnp.sum, x).communication is None
    assert "Communication" not in str(mpjax.audit(jnp.sum, x))
    report = mpjax.audit(lambda x: x + 1, shape(mesh, (8,), "data"))
    assert report.communication == ()
    assert "nothing is sent" in str(report)
    more = jax.sharding.AbstractMesh((3,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=more, in_specs=P("data"), out_specs=P())
    report = mpjax.audit(mapped, jax.ShapeDtypeStruct((9,), jnp.float32))
    assert report.communication is None
    assert any("communication is not known" in note for note in report.notes)


GPU_TEXT = """HloModule jit_step, is_scheduled=true

%wrapped (p.1: f16[8,4]) -> f16[1,4] {
  %p.1 = f16[8,4]{1,0} parameter(0)
  ROOT %scatter = f16[1,4]{1,0} reduce-scatter(%p.1), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%add
}

%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {
  %b = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%b), index=1
  %sum-start = f32[4]{0} all-reduce-start(%x), replica_groups=[1,8]<=[8], to_apply=%add
  %sum = f32[4]{0} all-reduce-done(%sum-start)
  ROOT %out = (s32[], f32[4]{0}) tuple(%b, %sum)
}

ENTRY %main (q: bf16[2,4], r: f8e4m3fn[4]) -> f32[4] {
  %q = bf16[2,4]{1,0} parameter(0)
  %r = f8e4m3fn[4]{0} parameter(1)
  %g = (bf16[2,4], bf16[16,4]) all-gather-start(%q), replica_groups=[1,8]<=[8], metadata={op_name="jit(f)/N/dot"}
  %g.done = bf16[16,4]{1,0} all-gather-done(%g)
  %s = ((f16[8,4]{1,0}), f16[1,4]{1,0}) async-start(%q), calls=%wrapped
  %m = s32[4]{0} all-reduce(%i), replica_groups=mesh['data'=4,'model'=2] {'model'}, to_apply=%add
  %i = s32[4]{0} iota(), iota_dimension=0
  %moved = f8e4m3fn[4]{0} collective-permute(%r), source_target_pairs={{0,1}}
  %both = (pred[], f32[2]{0}) all-reduce(%flag, %two), replica_groups={}, to_apply=%add
  %flag = pred[] constant(true)
  %two = f32[2]{0} constant({1, 2})
  ROOT %loop = (s32[], f32[4]{0}) while(%q), condition=%no, body=%body, backend_config={"known_trip_count":{"n":"6"}}
}
"""


def test_the_text_names_dtypes_shorter_than_jax():
    assert sizes("f4e2m1fn[8] f8e8m0fnu[2] bf16[] c64[3]") == [
        ("float4_e2m1fn", 4), ("float8_e8m0fnu", 2), ("bfloat16", 2), ("complex64", 24),
    ]  # fmt: skip


def test_text_of_a_gpu_program():
    found = {(row.op, row.dtype): row for row in collectives(GPU_TEXT)}
    gathered = found["all-gather", "bfloat16"]
    assert (gathered.group, gathered.arrays, gathered.bytes, gathered.module) == (8, 1, 128, "N")
    scattered = found["reduce-scatter", "float16"]
    assert (scattered.group, scattered.bytes, scattered.is_sum_in_half) == (2, 64, True)
    assert found["collective-permute", "float8_e4m3fn"].bytes == 4
    assert found["all-reduce", "bool"].bytes == 1
    assert found["all-reduce", "int32"].group == 2
    loop = [row for row in collectives(GPU_TEXT) if row.op == "all-reduce" and row.group == 8]
    assert [(row.arrays, row.bytes) for row in loop] == [(6, 96)]
