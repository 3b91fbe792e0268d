"""Planted causes, each with the answers that the tools must give."""

import jax
import optax
import pytest

import mpjax
from benchmarks.planted import table
from testing import planted
from testing.models.zoo import REGISTRY, harness
from testing.planted import roundings
from testing.planted.kinds import COMPETING

pytestmark = pytest.mark.usefixtures("always_compiled")

# One of each kind. The others run with `-m exhaustive`.
QUICK = """
    healthy, plain; overflow, vmap; small gradients, Equinox; epsilon lost, Haiku; nan in a custom rule;
    nan on a device; norm in half, Linen; norm in half, NNX; overflow before a mask; trap of a where;
    empty mask; outlier batch; average in half; bad dimension
    ; sum stored in half, plain; sum of a Python loop, Haiku; decay of one, NNX; label out of range, Linen
    ; forward overflow, plain; log in a checkpoint, Equinox; much is kept, vmap; flushed gradients, plain
    ; overflow and a log, Haiku; NaN batch and an outlier, plain; sum in half and an epsilon, Equinox
    ; nan in a row and a label; two iterations and lines; two devices and lines; overflow that one device reads
    ; log in the branch not taken; rule that overflows at any scale; overflow and too large a scale; count that wraps
    ; mean in half and a decay; division in a branch and again; data beyond half
    ; norm of padding and a probability of zero; temperature and a vector of zeros; gates and a sum
    ; divergence of two rounded distributions; ratio and an entropy; schedule and an overflow
    ; clip over devices and an empty part; fixed point and a metric
    ; constants of an optimizer; epsilon and a norm; sum of calls in half; counter of python
"""
QUICK = [" ".join(name.split()) for name in QUICK.split(";")]
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in planted.cases()]


@pytest.mark.parametrize("name", CASES)
def test_each_tool_answers_as_planted(name):
    (cells,) = planted.run([name]).values()
    assert set(cells.values()) == {planted.AS_PLANTED}, cells


def test_every_cause_is_planted_in_every_library():
    assert {*QUICK} <= {*planted.cases()}
    assert len(planted.cases()) == len(planted.CAUSES) * len(planted.LIBRARIES) + len(planted.ALONE) >= 40


def test_a_third_have_two_causes():
    """With the roundings beside a second cause."""
    alone, beside = {*planted.cases()}, {*roundings.cases()}
    two = {name for name in alone | beside if ", and " in name or name.split(",")[0] in COMPETING}
    two |= {name for name in alone if " and " in name}
    assert len(two) >= len(alone | beside) / 3


ZOO = [pytest.param(n, marks=() if n in ("linen_resnet", "weak_types") else pytest.mark.exhaustive) for n in REGISTRY]


@pytest.mark.filterwarnings("ignore")  # of the programs with a wrong derivative rule
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ZOO)
def test_audit_sees_no_risk_in_a_training_step_of_the_zoo(name, policy):
    program, (loss, params, batch) = REGISTRY[name], harness.abstract(name)
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    with program.context():
        fun, state = mpjax.autocast(loss, policy), jax.eval_shape(tx.init, params)

        def step(params, state, batch):
            if not program.differentiable:
                return fun(params, batch)
            value, grads = mpjax.value_and_grad(fun, state, has_aux=program.has_aux)(params, batch)
            return mpjax.apply_gradients(tx, grads, state, params), value

        risks = [risk.kind for risk in mpjax.audit(step, params, state, batch).risks]
    # Its rule clips cotangents of float16, so that no overflow is seen after it.
    assert risks == (["unchecked"] if (name, policy) == ("custom_vjp_wrong", "mixed_float16") else [])


def test_another_answer_and_a_crash_are_cells():
    def otherwise():
        raise AssertionError("names\nthe head")

    def crash():
        raise KeyError("scan")

    cells = {"audit": planted.outcome(otherwise), "search": planted.outcome(crash)}
    assert cells == {"audit": "answers otherwise: names the head", "search": "fails: KeyError: 'scan'"}
    assert table({"a case": cells}).startswith("0 of 2 answers as planted, 1 programs.")
