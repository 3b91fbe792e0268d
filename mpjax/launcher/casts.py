"""A call of the script's function, traced once: it runs in half, and in float32 again if half overflows.

A forward pass in half may give inf or NaN where float32 is finite, for example in a printed loss or in batch
statistics. No loss scale helps there. The function then runs again as the script wrote it, and its results replace
those in half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

import mpjax
from mpjax.casting.autocast import plan_program, run_program
from mpjax.kernels import staging
from mpjax.launcher.retrying import all_finite, behind
from mpjax.launcher.session import Scale, Session, differentiating
from mpjax.loss_scale.cotangents import is_differentiable
from mpjax.program import compat
from mpjax.program.evaluator import strong
from mpjax.program.graph import Site, walk
from mpjax.program.linearity import nonlinear_rule
from mpjax.program.tracing import is_array, trace

# The named scope of a rerun. Operations in it run only after an overflow.
SCOPE = "mpjax_in_float32"


class CastCall:
    """A traced call under the policy of the session.

    Args:
        session: The session of this process.
        fun, args, kwargs: The call.
    """

    def __init__(self, session: Session, fun: Callable[..., Any], args: Any, kwargs: Any):
        def scaled(scale: Any, args: Any, kwargs: Any) -> Any:
            with differentiating(scale) as scope:
                out = fun(*args, **kwargs)
            self.scope = scope
            return out

        self.scope = Scale(None)
        self._reruns = session.reruns
        setting = session.setting
        program = trace(scaled, (jnp.ones((), jnp.float32), args, kwargs), {}, setting and setting.half)
        # Modules are known by the paths of the arguments, without the scale.
        self._program = dataclasses.replace(program, names=["[0]" + name[len("[0][1]") :] for name in program.names])
        self.rebuild = self._program.rebuild
        named = setting is not None and setting.reads_scopes
        self._plan = setting and plan_program(self._program, setting, with_owners=named)

    @property
    def nonlinear_rule(self) -> str:
        """The name of a derivative rule that a loss scale would change; "" if there is none."""
        return self.scope.rule or nonlinear_rule(self._program.jaxpr)

    @property
    def has_matmul(self) -> bool:
        """Whether it has a matmul or a convolution: something to cast."""
        return any(site.flops for site in running_sites(self._program.jaxpr))

    def in_half(self, scale: Any, args: Any, kwargs: Any) -> list[Any]:
        """The arrays among the results for other arguments, with nested gradients scaled by `scale`."""
        arrays = [scale, *(x for x in jax.tree.leaves((args, kwargs)) if is_array(x))]
        if self._plan is None:
            return self._run(arrays)
        return run_program(dataclasses.replace(self._program, arrays=arrays, rebuild=list), self._plan)

    def _run(self, arrays: Sequence[Any]) -> list[Any]:
        opened = compat.open_jaxpr(self._program.jaxpr)
        return staging.evaluate_again(opened.jaxpr, (*opened.consts, *arrays))

    def finite(self, outs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Results of `in_half` for the call's own arguments if all are finite, otherwise those in float32.

        Returns:
            The arrays, and whether the function ran again, a bool of shape ().
        """
        outs = list(outs)
        places = [i for i, x in enumerate(outs) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
        halves = [outs[i] for i in places]
        if not self._reruns or not any(map(is_differentiable, halves)):
            return outs, jnp.zeros((), jnp.bool_)
        axes = tuple({axis for x in halves for axis in compat.varying_axes(x)})

        def rerun(arrays: Sequence[Any]) -> list[Any]:
            results = self._run(arrays)
            return [compat.vary(strong(jnp.asarray(results[i]).astype(outs[i].dtype)), axes) for i in places]

        finite = all_finite(halves)
        kept = [compat.vary(strong(x), axes) for x in halves]
        with jax.named_scope(SCOPE):
            values = _unless(finite, rerun, self._program.arrays, kept)
        for i, value in zip(places, values, strict=True):
            outs[i] = compat.with_weak_type(value, jax.typeof(outs[i]))
        return outs, ~finite

    def explained(self, session: Session) -> str:
        """The plan, as the `--explain` file shows it."""
        run = mpjax.autocast(self._run, session.policy, rules=session.rules)
        return str(mpjax.explain(run, self._program.arrays))


def _unless(finite: Any, rerun: Callable[..., Any], arrays: Sequence[Any], kept: list[Any]) -> list[Any]:
    """The results to keep if they are finite, else those of `rerun(arrays)`.

    Under `vmap`, which turns a branch into a `select` that runs both sides, it is a loop of at most one iteration.
    """
    if not jax.extend.core.unsafe_am_i_under_a_vmap_DO_NOT_USE():
        return jax.lax.cond(finite, lambda: kept, lambda: rerun(arrays))

    def body(carry: Any) -> Any:
        return jnp.ones((), jnp.bool_), rerun(behind(carry[0].astype(jnp.float32), arrays))

    return jax.lax.while_loop(lambda carry: ~carry[0], body, (finite, kept))[1]


def running_sites(jaxpr: Any) -> Iterator[Site]:
    """The equations of a program and its sub-jaxprs, except those that run only after an overflow."""
    return (site for site in walk(jaxpr) if SCOPE not in site.module)
