"""Advice on the limits of a step, with the numbers behind it, greatest gain first."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

from mpjax.inspection.audit.matmuls import Finding
from mpjax.inspection.profile import hlo
from mpjax.inspection.profile.kernels import Kernel, Split
from mpjax.inspection.profile.stepping import Recompilation
from mpjax.inspection.reports import duration

# The shares of the step above which advice is given.
_WORTH = {"input": 0.05, "dispatch": 0.1, "kernels": 0.05, "one kernel": 0.03, "optimizer": 0.25}


@dataclasses.dataclass(frozen=True)
class Advice:
    """One recommended change.

    Args:
        text: The change and its reason.
        share: The share of the step's time that it concerns.
        limit: A short name of the limit, as `input pipeline`.
    """

    text: str
    share: float
    limit: str

    @property
    def bound(self) -> float:
        """The speedup of the step if that time were zero (Amdahl)."""
        return float("inf") if self.share >= 1 else 1 / (1 - self.share)

    def __str__(self) -> str:
        return f"{self.text} (at most {self.bound:.1f}x faster without)" if self.share < 0.99 else self.text


def advise(
    split: Split,
    kernels: Sequence[Kernel],
    gpu: bool,
    findings: Iterable[Finding] = (),
    *,
    recompilation: Recompilation | None = None,
    callbacks: Sequence[hlo.Instruction] = (),
    outside: float | None = None,
    ranked: bool = True,
) -> tuple[Advice, ...]:
    """Advice on a step, ranked by the share of its time.

    Args:
        split: The split of the step's time.
        kernels: The step's kernels.
        gpu: Whether it ran on a GPU. Advice on half precision applies only there.
        findings: The audit's findings on dimensions of the step's matmuls and convolutions.
        recompilation: The step's recompilation during the measurement.
        callbacks: The step's host callbacks.
        outside: For a step that is not jitted, the share of its time that the compiled step does not take.
        ranked: Whether the kernels' times are reliable.
    """
    on_device = _Kernels(split, kernels)
    found = [_input(split), on_device.callbacks()]
    found += [_dispatch(split, kernels, callbacks if gpu else ()) if outside is None else _not_compiled(outside)]
    found += [_recompilation(split, recompilation)] if recompilation else []
    if ranked:
        found += [on_device.scaling(), on_device.casts(), on_device.updates()]
        found += [on_device.memory_bound(gpu), on_device.collectives()]
        if gpu:
            found += [on_device.full_precision(), *on_device.off_tensor_cores(), *on_device.dimensions(findings)]
    return tuple(sorted((advice for advice in found if advice), key=lambda advice: -advice.share))


def _input(split: Split) -> Advice | None:
    share = split.input / split.wall
    if share < _WORTH["input"]:
        return None
    return Advice(
        f"input pipeline is {share:.0%} of the step, while the device waits: load ahead (more workers, a prefetch "
        "queue, jax.device_put of the next batch). Until then, no change to the model can make the step more than "
        f"{1 / share:.1f}x faster",
        share,
        "input pipeline",
    )


def _dispatch(split: Split, kernels: Sequence[Kernel], callbacks: Sequence[hlo.Instruction]) -> Advice | None:
    share = split.dispatch / split.wall
    if share < _WORTH["dispatch"]:
        return None
    if callbacks:
        return Advice(
            f"the device waits for the host in {share:.0%} of the step, which calls Python ({_called(callbacks)}): "
            f"{_WITHOUT_CALLBACKS}",
            share,
            "host callbacks",
        )
    launches = sum(kernel.calls for kernel in kernels)
    return Advice(
        f"dispatch is {share:.0%} of the step, in which the device waits for Python or for the next of {launches:.0f} "
        "launches: run several steps in one call (jax.lax.scan over a stack of batches), or take a larger batch",
        share,
        "dispatch",
    )


def _not_compiled(share: float) -> Advice | None:
    if share < _WORTH["dispatch"]:
        return None
    return Advice(
        f"{share:.0%} of the step is outside of its compiled program (Python, operations that run one by one, files, "
        "waiting): jit the whole step, and move the rest out of it or do it less often",
        share,
        "code outside of jit",
    )


def _recompilation(split: Split, found: Recompilation) -> Advice:
    share = split.compilation / split.wall
    remedy = "pad batches to one shape or to a few, and drop a smaller last one" if found.changed else "make it once"
    return Advice(
        f"recompilation is {share:.0%} of the step: {found.steps} of {found.measured} steps were compiled again, "
        f"{duration(found.seconds)} each ({found}): {remedy}",
        share,
        "recompilation",
    )


_WITHOUT_CALLBACKS = "compute it in JAX, do it outside of the step, or only every so many steps (jax.lax.cond)"


def _called(callbacks: Iterable[hlo.Instruction | Kernel]) -> str:
    """The callbacks with their lines: `pure_callback at train.py:12`."""
    names = (re.sub(r"\.\d+$", "", getattr(c, "op", "") or c.name) for c in callbacks)
    return ", ".join(dict.fromkeys(f"{name} at {c.source or '?'}" for name, c in zip(names, callbacks, strict=True)))


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """Advice on the device time. Kernels may overlap, so their times are scaled to add up to the device time."""

    split: Split
    kernels: Sequence[Kernel]

    def share(self, chosen: Iterable[Kernel]) -> float:
        """The share of the step in these kernels."""
        total = sum(kernel.seconds for kernel in self.kernels)
        on_device = self.split.device / self.split.wall
        return on_device * sum(kernel.seconds for kernel in chosen) / total if total else 0.0

    def _about(self, which: Callable[[Kernel], bool], limit: str, text: str, worth: str = "kernels") -> Advice | None:
        chosen = [kernel for kernel in self.kernels if which(kernel)]
        share = self.share(chosen)
        where = max(
            (k.module for k in chosen), key=lambda m: self.share(k for k in chosen if k.module == m), default=""
        )
        most = f", the most in {where}" if where else ""
        return Advice(text.format(share=f"{share:.0%}", most=most), share, limit) if share >= _WORTH[worth] else None

    def full_precision(self) -> Advice | None:
        return self._about(
            lambda kernel: kernel.eligible and kernel.dtype == "f32",
            "float32 matmuls",
            "float32 matmuls and convolutions are {share} of the step{most}: run them in half (mpjax.autocast or "
            "mpjax.with_policy; mpjax.explain shows why any remain in float32)",
        )

    def off_tensor_cores(self) -> list[Advice]:
        """The three longest half operations that are not on Tensor Cores."""
        return self._most(
            (f"{k.module or k.name} ({k.kind} of {k.dtype}) is not on Tensor Cores: {k.why_not}", [k])
            for k in self.kernels
            if k.tensor_cores is False and k.dtype not in ("f32", "f64")
        )

    def dimensions(self, findings: Iterable[Finding]) -> list[Advice]:
        """The three longest operations eligible for Tensor Cores whose dimensions slow them down."""
        return self._most(
            (
                f"{finding.module or finding.source} ({finding.op}): {finding.why}",
                [k for k in self.kernels if k.module == finding.module and k.why_not != finding.why],
            )
            for finding in findings
        )

    def _most(self, found: Iterable[tuple[str, Sequence[Kernel]]]) -> list[Advice]:
        advice = [Advice(text, self.share(k for k in about if k.eligible), "matmuls") for text, about in found]
        return sorted((a for a in advice if a.share >= _WORTH["one kernel"]), key=lambda a: -a.share)[:3]

    def casts(self) -> Advice | None:
        return self._about(
            lambda kernel: kernel.kind == hlo.CAST,
            "casts",
            "casts are {share} of the step{most}: kernels that only convert. Cast once, where the value is computed",
        )

    def callbacks(self) -> Advice | None:
        chosen = [kernel for kernel in self.kernels if kernel.kind == hlo.CALLBACK]
        called = _called(chosen).replace("{", "{{").replace("}", "}}")
        text = f"host callbacks are {{share}} of the step, which waits for Python ({called}): {_WITHOUT_CALLBACKS}"
        return self._about(lambda kernel: kernel.kind == hlo.CALLBACK, "host callbacks", text)

    def updates(self) -> Advice | None:
        launches = sum(kernel.calls for kernel in self.kernels if _updates(kernel))
        return self._about(
            _updates,
            "optimizer",
            f"the optimizer is {{share}} of the step, in {launches:.0f} kernels outside of the gradient: accumulate or "
            "take a larger batch, so that it runs less often; update all parameters as one array (optax.flatten); keep "
            "less state (mpjax.low_bit_state)",
            "optimizer",
        )

    def memory_bound(self, gpu: bool) -> Advice | None:
        what = "half activations halve it (mpjax.autocast)" if gpu else "fewer and smaller intermediate values help"
        return self._about(
            lambda kernel: kernel.kind in hlo.MEMORY_BOUND and not _is_scaling(kernel) and not _updates(kernel),
            "memory traffic",
            "elementwise operations, reductions and copies are {share} of the step{most}: bound by memory traffic, "
            f"which Tensor Cores don't change; {what}",
        )

    def collectives(self) -> Advice | None:
        return self._about(
            lambda kernel: kernel.kind == hlo.COLLECTIVE,
            "collectives",
            "collectives are {share} of the step{most}: take a larger batch on each device, or sum gradients in half",
        )

    def scaling(self) -> Advice | None:
        return self._about(
            _is_scaling,
            "loss scaling",
            "loss scaling is {share} of the step: mpjax.apply_gradients updates and applies in one lax.cond, and "
            "bfloat16 needs no scaling",
            "one kernel",
        )


def _is_scaling(kernel: Kernel) -> bool:
    return "/mpjax/loss_scale/" in kernel.path.replace("\\", "/")


def _updates(kernel: Kernel) -> bool:
    memory = kernel.kind in (*hlo.MEMORY_BOUND, hlo.CAST)
    return memory and not _is_scaling(kernel) and (kernel.updates or "/optax/" in kernel.path.replace("\\", "/"))
