"""The arrays that are live in a compiled program, against XLA's own plan of its memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mpjax.planning.liveness import BACKWARD, FORWARD, buffers_of, elements, live_at, live_bytes
from mpjax.planning.traffic import program_bytes
from tests.planning.programs import attention_loss, attention_shapes, half, loss_fn, shapes, step_of


def compiled(fun, *args, donate=()):
    return jax.jit(fun, donate_argnums=donate, keep_unused=True).lower(*args).compile()


def planned(program):
    """The bytes of arguments and of what is live at the peak."""
    buffers = buffers_of(program.as_text())
    return sum(b.bytes for b in buffers if b.argument is not None) + max(live_bytes(buffers))


def deep(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x.sum()


MATRIX = jax.ShapeDtypeStruct((256, 256), jnp.float32)
PROGRAMS = {
    "forward": (deep, ([MATRIX] * 3, MATRIX), ()),
    "gradient": (jax.grad(deep), ([MATRIX] * 6, MATRIX), ()),
    "scan": (step_of(loss_fn), shapes(), (0, 1)),
    "scan in half": (step_of(half(loss_fn)), shapes(), (0, 1)),
    "not donated": (step_of(loss_fn), shapes(), ()),
    "attention": (jax.grad(attention_loss), attention_shapes(), ()),
    "cond": (lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, jnp.sin, x), (MATRIX,), ()),
    "while": (lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x + 1, x), (MATRIX,), ()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_live_arrays_add_up_to_xlas_plan(name):
    fun, args, donate = PROGRAMS[name]
    program = compiled(fun, *args, donate=donate)
    assert planned(program) == pytest.approx(program_bytes(program), rel=0.12)


def test_what_a_scan_keeps_is_one_array_for_all_layers():
    params, _, x = shapes()
    buffers = buffers_of(compiled(jax.grad(loss_fn), params, x).as_text())
    kept = [b for b in buffers if FORWARD in b.made and BACKWARD in b.read and b.elements == 6 * x.size]
    assert 1 <= len(kept) <= 4
    assert any(b.source.startswith("programs.py:") for b in kept)
    at = live_bytes(buffers)
    assert {*kept} <= {*live_at(buffers, at.index(max(at)))}


def test_donated_arguments_are_their_results():
    program = compiled(lambda x, y: (x * 2, y + 1), MATRIX, MATRIX, donate=(0, 1))
    assert max(live_bytes(buffers_of(program.as_text()))) <= 64
    assert planned(program) == pytest.approx(program_bytes(program), abs=128)


def test_results_are_live_to_the_end():
    buffers = buffers_of(compiled(lambda x: (x * 2, (x @ x) @ x), MATRIX).as_text())
    assert live_bytes(buffers)[-1] >= 2 * 4 * 256 * 256


def test_elements_of_nested_tuples():
    assert elements("((f32[2]{0}, s32[]), u32[])") == ["(f32[2]{0}, s32[])", "u32[]"]


UPDATE = 'metadata={op_name="jit(f)/jvp(Net)/dynamic_update_slice"}'
STARTED = "((f32[4,8]{1,0}, s32[], f32[8]{0}), f32[4,8]{1,0}, u32[])"
ASYNCHRONOUS = f"""HloModule jit_f, is_scheduled=true, entry_computation_layout={{}}

%update (p: f32[4,8], i: s32[], v: f32[8]) -> f32[4,8] {{
  %p = f32[4,8]{{1,0}} parameter(0)
  %v = f32[8]{{0}} parameter(2)
  %b = f32[1,8]{{1,0}} bitcast(%v), metadata={{op_name="jit(f)/jvp(Net)/Dense_0/add"}}
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %d = f32[4,8]{{1,0}} dynamic-update-slice(%p, %b, %i, %zero), {UPDATE}
}}

ENTRY %main (x: f32[4,8], i: s32[], y: f32[8]) -> f32[4,8] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  %i.1 = s32[] parameter(1)
  %y = f32[8]{{0}} parameter(2)
  %new = f32[4,8]{{1,0}} broadcast(%i.1), dimensions={{}}
  %start = {STARTED} fusion-start(%new, %i.1, %y), calls=%update, {UPDATE}
  %done = f32[4,8]{{1,0}} fusion-done(%start)
  ROOT %out = f32[4,8]{{1,0}} negate(%done), metadata={{op_name="jit(f)/neg"}}
}}
"""


def test_an_asynchronous_update_of_a_slice_is_in_place():
    buffers = buffers_of(ASYNCHRONOUS)
    updated, result = (b for b in buffers if b.argument is None and b.elements == 32)
    assert not updated.result
    assert result.result
    assert max(live_bytes(buffers)) == 2 * 4 * 32


CAST_BY_XLA = """HloModule jit_f, is_scheduled=true, entry_computation_layout={}

%fused (p: f32[4,8]) -> f16[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %tanh = f32[4,8]{1,0} tanh(%p), metadata={op_name="jit(f)/jvp(Net)/Dense_0/tanh"}
  ROOT %convert = f16[4,8]{1,0} convert(%tanh)
}

ENTRY %main (x: f32[4,8]) -> f16[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %kept = f16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %out = f16[4,8]{1,0} negate(%kept), metadata={op_name="jit(f)/transpose(jvp(Net))/Dense_0/neg"}
}
"""


def test_a_fusion_that_ends_in_a_cast_of_xlas_own_has_the_name_of_what_it_casts():
    (kept,) = (b for b in buffers_of(CAST_BY_XLA) if b.argument is None and not b.result)
    assert (kept.module, kept.made, kept.read) == ("Net/Dense_0", {FORWARD}, {BACKWARD})
