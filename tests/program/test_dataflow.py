"""The dataflow of programs: makers, readers, what depends on what; and that nothing else reads them again."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp

import mpjax
from mpjax.program.dataflow import Dataflow, dataflow, live_equations
from mpjax.program.inlining import flow_of
from mpjax.program.primitives import primitive


def jaxpr_of(fun, *args):
    return jax.make_jaxpr(fun)(*args).jaxpr


def names(eqns):
    return [eqn.primitive.name for eqn in eqns]


def test_makers_and_readers_are_found_in_program_order():
    def fun(x):
        y = jnp.sin(x)
        return jnp.cos(y) * jnp.exp(y), 2.0

    jaxpr = jaxpr_of(fun, 1.0)
    flow = dataflow(jaxpr)
    sin, cos, exp, mul = jaxpr.eqns
    assert flow.maker(jaxpr.outvars[0]) is mul
    assert flow.maker(jaxpr.invars[0]) is None
    assert flow.maker(jaxpr.outvars[1]) is None
    assert flow.readers[sin.outvars[0]] == [cos, exp]
    assert flow.returned == {mul.outvars[0]}


def test_an_equation_that_reads_a_value_twice_is_one_reader():
    jaxpr = jaxpr_of(lambda x: x * x, 1.0)
    assert names(dataflow(jaxpr).readers[jaxpr.invars[0]]) == ["mul"]


def test_a_value_has_the_source_before_what_passes_it_on():
    jaxpr = jaxpr_of(lambda x: jnp.sin(x).reshape(4, 1).T, jnp.ones(4))
    source = dataflow(jaxpr).source(jaxpr.outvars[0], lambda eqn: primitive(eqn.primitive.name).moves)
    assert names([dataflow(jaxpr).maker(source)]) == ["sin"]
    # An iota moves nothing.
    jaxpr = jaxpr_of(lambda: jnp.arange(4))
    assert dataflow(jaxpr).source(jaxpr.outvars[0], lambda eqn: True) is jaxpr.outvars[0]


def test_dependence_is_that_of_the_operands():
    def fun(x, z):
        y = jnp.sin(x)
        return jnp.cos(y) + jnp.exp(z), jnp.tanh(z)

    jaxpr = jaxpr_of(fun, 1.0, 1.0)
    flow, (x, z), (out, other) = dataflow(jaxpr), jaxpr.invars, jaxpr.outvars
    (sin,) = flow.readers[x]
    assert names(flow.before([out])) == ["sin", "cos", "exp", "add"]
    assert names(flow.before([out], sin.outvars[0])) == ["cos", "exp", "add"]
    assert names(flow.between(sin.outvars[0], out)) == ["cos", "add"]
    assert flow.depends([out], x)
    assert flow.depends([x], x)
    assert not flow.depends([other], x)
    assert out in flow.after(x)
    assert other not in flow.after(x)
    assert other in flow.after(z)


def test_dead_equations_are_not_live():
    def fun(x):
        jnp.cos(x)
        jax.debug.print("{}", jnp.exp(x))
        return jnp.sin(x)

    found = names(live_equations(jaxpr_of(fun, 1.0)))
    assert "cos" not in found
    assert [found[0], found[-1], len(found)] == ["exp", "sin", 3]  # the print has another name in older versions


def test_values_are_resolved_through_calls_and_into_loops():
    def fun(x, w):
        return jax.lax.scan(lambda c, _: (jax.jit(jnp.multiply)(c, w), None), jnp.sin(x), length=3)[0]

    flow = flow_of(jax.make_jaxpr(fun)(1.0, 2.0))
    assert [node.site.name for node in flow.eqns] == ["sin", "scan", "mul"]
    _, scan, mul = flow.eqns
    assert mul.reads[1] is flow.inputs[1]  # the loop reads the argument itself
    assert flow.maker(flow.outputs[0]) is scan
    assert flow.readers[flow.inputs[1]] == [scan, mul]


def test_a_jaxpr_is_read_once_and_not_kept():
    jaxpr = jaxpr_of(lambda x: jnp.sin(x) + 1.0, 1.0)
    assert dataflow(jaxpr) is dataflow(jaxpr)
    alive = weakref.ref(jaxpr)
    del jaxpr
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_the_number_of_readings_does_not_grow_with_a_program(monkeypatch):
    made = []
    original = Dataflow.__init__
    monkeypatch.setattr(Dataflow, "__init__", lambda self, *args: (made.append(1), original(self, *args))[1])

    def readings(steps):
        def fun(x, w):
            for _ in range(steps):  # each is a step of an update of an input, which the planner looks at
                x = x - 0.1 * (x @ w)
            return (x @ w).sum()

        made.clear()
        jax.make_jaxpr(mpjax.autocast(fun))(jnp.ones((8, 8)), jnp.ones((8, 8)))
        return len(made)

    assert readings(2) == readings(12)


def maps_values_to_equations(node):
    """Whether a syntax node is `{v: eqn for eqn in eqns for v in eqn.outvars}`."""
    if not isinstance(node, ast.DictComp) or len(node.generators) < 2:
        return False
    values = node.generators[-1].iter
    return isinstance(values, ast.Attribute) and values.attr in ("outvars", "writes")


def test_no_other_file_maps_values_to_their_equations():
    root = Path(mpjax.__file__).parent
    trees = {str(path.relative_to(root)): ast.parse(path.read_text()) for path in root.rglob("*.py")}
    found = {path for path, tree in trees.items() if any(map(maps_values_to_equations, ast.walk(tree)))}
    assert found == {"program/dataflow.py"}
