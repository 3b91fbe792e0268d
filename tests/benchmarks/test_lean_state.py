"""The benchmark of lean state: its forms train a task, and the committed results agree with the documentation."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import RESULTS, lean_state
from benchmarks.parity.families import get

LEANEST = "stochastic_rounding, low_bit_state int8"


def test_bytes_per_parameter():
    kept = {form: lean_state.bytes_kept(form) for form in lean_state.FORMS}
    assert kept["float32"] == pytest.approx(12, abs=0.01)
    assert kept["master_weights"] == pytest.approx(14, abs=0.01)
    assert 4 < kept[LEANEST] < 4.2


@pytest.mark.standard_promotion
@pytest.mark.parametrize("form", lean_state.FORMS)
def test_each_form_trains_a_task_with_its_dtype_of_parameters(form):
    training = lean_state.LeanTraining(get("rossmann"), form)
    batch = training.family.batch(np.random.default_rng(0))
    state = jax.eval_shape(lambda: training.init(0))
    new, loss = jax.eval_shape(training.step, state, batch)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
    assert loss.dtype == "float32"
    (variables,) = new["variables"].values()
    assert {p.dtype for p in jax.tree.leaves(variables["params"])} == {jnp.dtype(lean_state.FORMS[form][0])}


def test_committed_final_losses_are_within_a_deviation_of_float32():
    results = json.loads((RESULTS / "lean_state_cpu.json").read_text())["results"]
    assert len(results["parity"]) >= 3
    for found in results["parity"].values():
        assert all(len(losses) >= 5 for losses in found.values())
        assert all(abs(lean_state.deviations(losses, found["float32"])) < 1 for losses in found.values())
    assert (RESULTS / "lean_state_cpu.md").read_text() == lean_state.table(results)
