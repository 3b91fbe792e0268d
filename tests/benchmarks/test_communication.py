"""What sharded steps send, at toy size on four devices, and the simulated error of sums over replicas."""

import jax
import pytest

from benchmarks import communication, reduction_error


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(communication, "WIDTH", 32)
    monkeypatch.setattr(communication, "HIDDEN", 64)
    monkeypatch.setattr(communication, "LAYERS", 2)


def rows(layout, forms):
    (found,) = [communication.measure(4, "float16", (layout,), forms)]
    return {row["form"]: row for row in found}


# Outside a scan autocast gathers parameters twice, in half: for the backward pass too. Before JAX 0.12, XLA gathered
# float32 parameters once for both passes, and those of a scan twice under autocast.
OLD = jax.__version_info__ < (0, 12)


@pytest.mark.parametrize(("layout", "most"), [("FSDP", 1.9 if OLD else 1.0), ("FSDP, scan", 1.01 if OLD else 0.55)])
def test_autocast_gathers_half_and_sums_float32(layout, most):
    found = rows(layout, ("float32", "autocast"))
    whole, half = (communication.summary(found[form]) for form in ("float32", "autocast"))
    assert 0 < half["gathered"] <= most * whole["gathered"]
    assert half["other"] == whole["other"] == half["summed in half"] == 0
    assert 0 < half["predicates"] <= 9
    assert "| FSDP" in communication.table(list(found.values()))


def test_the_gradient_error_of_one_device_is_that_of_half():
    assert 1e-4 < communication.gradient_error("by hand", "float16", 1, 4) < 1e-2


def test_rings_in_half_lose_what_trees_and_float32_keep():
    found = reduction_error.measure((16, 1024))
    assert found["bfloat16"]["ring"]["1024"] > 10 * found["bfloat16"]["tree"]["1024"]
    assert found["float32"]["ring"]["1024"] < 1e-5
    assert found["float16"]["tree"]["16"] < 1e-3
    assert "| float32 | tree |" in reduction_error.table(found)
