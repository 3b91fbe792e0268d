"""Training scripts in the style of others, unchanged, from end to end under the launcher."""

import runpy

import jax
import numpy as np
import pytest

from mpjax._jaxpr.walk import walk
from tests.launcher.spreads import recorded, scripts


class HalfShare:
    """Counts matmul FLOPs of the programs that differentiate, by dtype."""

    def __init__(self):
        self.half = self.all = 0

    def saw(self, program, jaxpr):
        if program.differentiates:
            for site in walk(jaxpr):
                self.all += site.flops
                self.half += site.flops * all(v.aval.dtype.itemsize == 2 for v in site.eqn.invars[:2])

    def stepped(self, compiled):
        pass


COMPARED = [path for path in scripts() if path.stem in recorded()]


@pytest.mark.parametrize("path", COMPARED, ids=lambda path: path.stem)
def test_a_script_of_others_trains_in_half_as_in_float32(launched, path):
    share = HalfShare()
    launched().watchers.append(share)
    with jax.numpy_dtype_promotion("standard"):  # what scripts of others expect
        loss = runpy.run_path(str(path))["main"](["--seed", "0"])
    assert share.half >= 0.99 * share.all > 0
    # Within the spread of three seeds in float32, or close to the same seed, which may be at its edge.
    losses = recorded()[path.stem]
    assert min(losses) <= loss <= max(losses) or np.isclose(loss, losses[0], rtol=0.02), (loss, losses)
