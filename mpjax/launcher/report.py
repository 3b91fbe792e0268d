"""The reports that the launcher prints at the first compiled training step and when the process ends."""

from __future__ import annotations

import atexit
import math
import sys
import time
from typing import Any

import jax
import jax.extend.core
import numpy as np

import mpjax
from mpjax.launcher.session import CALLS, HALF, SCALE, SKIPPED, Frame, Session
from mpjax.program import compat
from mpjax.program.formats import is_narrow
from mpjax.program.graph import Site
from mpjax.program.inlining import flow_of
from mpjax.program.primitives import primitive

_SHOWN = 5


class Report:
    """Collects the programs and steps of a session and prints reports to stderr.

    Args:
        session: The session of this process.
        always: Whether to print the last block even if the script neither differentiated nor built an optimizer.
    """

    def __init__(self, session: Session, always: bool):
        self.session, self.always = session, always
        self.evaluations: list[str] = []
        self._described: set[str] = set()
        self._printed = ""
        atexit.register(self.last_block)

    def traced(self, program: Frame, jaxpr: Any) -> None:
        """Records a program, and describes it if it trains."""
        if program.evaluates:
            self.evaluations.append(program.name)
        if program.gradients and program.name not in self._described and not self.session.options.quiet:
            self._described.add(program.name)
            self._print(first_block(self.session, program, jaxpr))

    def last_block(self) -> None:
        """Prints the summary of the run, at exit."""
        session, options = self.session, self.session.options
        if options.dry_run:
            return
        if session.unused and session.sites:  # A typo is an error, --quiet or not.
            self._print(_of_unused(session.unused, "mpjax run: matched nothing"))
        self.summary(
            "the script differentiated nothing by jax.grad, value_and_grad, vjp, linearize or their like in a framework"
            # A script that failed may have ended before it differentiated.
            if (self.always or session.optimizers) and not session.differentiated and not hasattr(sys, "last_value")
            else ""
        )

    def summary(self, otherwise: str = "") -> None:
        """Prints what was cast so far, unless it was printed already.

        Args:
            otherwise: Why nothing was cast, where the script has differentiated nothing; "" prints nothing then.
        """
        kept = [reason.format(_places(functions)) for reason, functions in self.session.kept.items() if functions]
        if self.session.sites:
            text = "\n".join(["mpjax run: summary", *self._cast(), *(f"  in float32: {reason}" for reason in kept)])
        else:
            text = "; ".join(kept) or otherwise
            text = text and f"mpjax run: nothing was cast to half: {text}"
        if self.session.options.quiet:  # Gradients that stayed in float32 are an error for whoever asked for half.
            reason = "; ".join(kept) or (otherwise if self.session.optimizers else "")
            text = reason and f"mpjax run: in float32: {reason}"
        if text and text != self._printed:
            self._print(text)
        self._printed = text

    def _cast(self) -> list[str]:
        steps = self.session.steps
        lines = [line for step in steps[-_SHOWN:] for line in _of_step(self.session, step)]
        lines += [f"  and {len(steps) - _SHOWN} compiled steps before these"] * (len(steps) > _SHOWN)
        jax.effects_barrier()
        for name, counts in self.session.counts.items():
            if counts.any():  # It may have been traced only.
                lines += [f"  {name}: {int(counts[0])} gradients, each tried at the first loss scale"]
                lines += _of_counts(counts)
        lines = lines or [f"  cast, but no step finished: {_places(self.session.sites)}"]
        if self.evaluations:
            lines.append(f"  evaluated in half: {', '.join(dict.fromkeys(self.evaluations))}")
        return lines

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _places(functions: dict[tuple[str, str], str]) -> str:
    return ", ".join(f"{name} at {line}" if line else name for (line, _), name in functions.items())


def _of_unused(unused: list[str], what: str) -> str:
    return f"{what}: {', '.join(unused)} (--explain FILE lists primitives and module paths)"


class Clock:
    """What a compiled step did, and its time, from windows of calls that end when the device is done.

    Calls return before the device is done, so the clock waits for the results of calls 1, 2, 4, 8, ...: a few times in
    a run. The first call traces and compiles.

    Args:
        name: The step's name.
    """

    def __init__(self, name: str) -> None:
        self.name, self.calls, self.in_float32 = name, 0, 0
        self.counts: Any = None  # its state rows, loss scales and counters, once it has run
        # For a call of the fastest window: others may contain the compilation of another function.
        self.seconds: float | None = None
        self._start = 0.0

    def tick(self) -> bool:
        """Counts a call. Returns whether a window ends with it."""
        self.calls += 1
        if self.calls & (self.calls - 1):
            return False
        jax.block_until_ready(self.counts)
        now = time.perf_counter()
        if self.calls >= 4:
            self.seconds = min((now - self._start) / (self.calls // 2), self.seconds or math.inf)
        self._start = now
        return True


def _of_step(session: Session, step: Clock) -> list[str]:
    rows = np.asarray(step.counts)
    rows = rows[rows[:, CALLS] > 0]
    if not len(rows):  # Under shard_map or vmap: the session has its counts, if a loss scale needs any.
        return [] if session.scales else [f"  {step.name}: {step.calls} calls"]
    steps = int(rows[:, CALLS].max())
    took = "" if step.seconds is None else f", {1e3 * step.seconds * step.calls / steps:.3g} ms a step at best"
    lines = [f"  {step.name}: {steps} steps{took}"]
    if step.in_float32:
        lines.append(
            f"    and {step.in_float32} in float32: the first, and where gradients or parameters met no update"
        )
    if session.scales:
        lines += _of_counts(rows[:, CALLS:].sum(0), "; at the end " + " and ".join(f"{x:g}" for x in rows[:, SCALE]))
    return lines


def _of_counts(counts: Any, scales: str = "") -> list[str]:
    calls, retries, skipped, reruns = map(int, counts)
    lines = [f"    {skipped} skipped, {retries} repeated at a lower loss scale{scales}"]
    if reruns:
        found = f"{reruns} of {calls} forward passes gave inf or NaN"
        lines.append(f"    {found}, and were run again in float32 for their values")
    return lines + [f"    {skipped} of {calls} gradients {SKIPPED}"] * bool(skipped)


def first_block(session: Session, program: Frame, jaxpr: Any) -> str:
    """The block at the first compiled training step."""
    from mpjax.inspection.auditing.amplified import amplified
    from mpjax.inspection.reports import totals
    from mpjax.launcher.casts import running_sites

    sites = [site for site in running_sites(jaxpr) if site.flops]
    total = sum(site.flops for site in sites)
    if not total:
        return f"mpjax run: {program.name} has no matmul or convolution: nothing to cast to half"
    full = [site for site in sites if not _is_half(site)]
    share = 1 - sum(site.flops for site in full) / total
    scaling = f"loss scale {session.options.init_scale:g} at first, dynamic" if session.scales else "no loss scale"
    lines = [
        f"mpjax run: {session.options.policy}, {scaling}",
        f"  {program.name}: {share:.1%} of {total / 1e9:.3g} GFLOP in matmuls and convolutions in half",
    ]
    by_line = totals(((site.source or "an unknown line", site.path, _why(site)), site.flops) for site in full)
    ranked = sorted(by_line.items(), key=lambda item: -item[1])
    for (source, path, why), flops in ranked[:_SHOWN]:
        lines.append(f"  {flops / total:.1%} not: {source}{f' ({path})' if path else ''}: {why}")
    if len(ranked) > _SHOWN:
        lines.append(f"  and {len(ranked) - _SHOWN} more lines; --explain FILE lists all")
    if session.options.attention == "fused" and not any(primitive(s.name).attends for s in running_sites(jaxpr)):
        lines.append("  --attention fused: no attention was fused (--explain FILE says why)")
    risks = dict.fromkeys(f"  risk: {risk.site.label} reads {risk.text}" for risk in amplified(flow_of(jaxpr))[0])
    lines += list(risks)[:_SHOWN]
    if session.unused:
        lines.append("  " + _of_unused(session.unused, "matched nothing so far"))
    lines.append("  differentiates: " + _places({k: v for each in program.gradients for k, v in each.places.items()}))
    return "\n".join(lines)


def dry_run(program: Frame, jaxpr: Any) -> None:
    """Prints the audit of the first program that trains, then ends the process before that program runs."""
    if program.gradients:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in compat.open_jaxpr(jaxpr).jaxpr.invars]
        step: Any = jax.extend.core.jaxpr_as_fun(jaxpr)
        step.__name__ = program.name
        print(mpjax.audit(step, *shapes), flush=True)
        raise SystemExit(0)


def _is_half(site: Site) -> bool:
    """Whether a matmul reads operands in half or less."""
    return all(is_narrow(v.aval.dtype) for v in site.eqn.invars[:2])


def _why(site: Site) -> str:
    names = "/".join(dict.fromkeys(np.dtype(v.aval.dtype).name for v in site.eqn.invars[:2]))
    if names not in ("float32", *HALF):
        return f"{names} operands"
    if not site.module or "jvp" not in site.module:
        return "outside the differentiated functions"
    return "float32 by a rule of autocast's, or as the script has it (--explain FILE)"
