"""Typical training scripts, unchanged, from end to end under the launcher."""

import pathlib
import runpy

import jax
import numpy as np
import pytest

from mpjax.launcher.casts import running_sites
from mpjax.launcher.session import RERUNS, RETRIES

# Each test clears JAX's caches; without this, the same small programs would be compiled again.
FOLDER = pathlib.Path(__file__).parent / "scripts"


class Watcher:
    """Counts matmul FLOPs of the programs that differentiate, by dtype."""

    def __init__(self, session):
        self.half = self.all = 0
        self.steps = session.steps
        session.watchers.append(self.traced)

    def traced(self, program, jaxpr):
        if program.gradients:
            for site in running_sites(jaxpr):
                self.all += site.flops
                self.half += site.flops * all(v.aval.dtype.itemsize == 2 for v in site.eqn.invars[:2])

    def count(self, column):
        return float(self.steps[-1].counts[:, column].sum())


@pytest.fixture
def trained(launched):
    def run(name, *arguments, **options):
        watcher = Watcher(launched(**options))
        with jax.numpy_dtype_promotion("standard"):  # as users' scripts expect
            loss = runpy.run_path(str(FOLDER / f"{name}.py"))["main"](list(arguments))
        assert np.isfinite(loss)
        return loss, watcher

    return run


# Well below the loss of the first step.
BELOW = {"accumulation": 0.5, "gan": 4.0, "haiku_mlp": 1.5, "scanned_steps": 0.2}


@pytest.mark.parametrize("name", BELOW)
def test_a_users_script_trains_in_half(trained, name):
    loss, watcher = trained(name)
    assert watcher.half >= 0.99 * watcher.all > 0
    assert loss < BELOW[name]


def test_a_first_scale_that_overflows_changes_nothing_but_the_scale(trained):
    loss, watcher = trained("scanned_steps", init_scale=2.0**32)
    assert loss < BELOW["scanned_steps"]
    assert watcher.count(RETRIES) > 0


def test_images_far_out_of_range_reach_no_batch_statistics(trained):
    loss, watcher = trained("nnx_optimizer", "--steps", "20", "--outlier", "3")
    assert loss < 1.5
    assert watcher.count(RERUNS) == 1
