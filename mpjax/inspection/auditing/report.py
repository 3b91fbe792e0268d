"""The report of an audit: the precision of each operation of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from mpjax.inspection.auditing.communication import Collective, communication_section
from mpjax.inspection.auditing.matmuls import MEANINGS as MATMUL_MEANINGS
from mpjax.inspection.auditing.matmuls import ON_TPU as TPU_MEANINGS
from mpjax.inspection.auditing.matmuls import Finding, Matmul, SpeedupBound, speedup_bound
from mpjax.inspection.auditing.risks import MEANINGS as RISK_MEANINGS
from mpjax.inspection.auditing.risks import Risk
from mpjax.inspection.devices import DEVICES, device_of
from mpjax.inspection.reports import Report, Section, added_up, amount, by_key, duration, folded, totals
from mpjax.program.source import BACKWARD, FORWARD, RECOMPUTED

# By name: the words that readers see for primitives.

_FEW = 5  # rows of what keeps most memory
_PHASES = (FORWARD, RECOMPUTED, BACKWARD)
# Short names for narrow table columns.
_OPS = {
    "conv_general_dilated": "conv",
    "dot_general": "dot",
    "ragged_dot_general": "ragged_dot",
    "convert_element_type": "cast",
}


@dataclasses.dataclass(frozen=True)
class Kept:
    """Values of one operation that are kept for the backward pass.

    Args:
        module, source, op: The module path, the line and the primitive that makes them.
        dtype: Their dtype.
        bytes: Their size, of one iteration in a loop and of one device in a `shard_map`.
        count: Their number.
    """

    module: str
    source: str
    op: str
    dtype: str
    bytes: int
    count: int


@dataclasses.dataclass(frozen=True)
class PrecisionReport(Report):
    """The precision of a program's matmuls, convolutions and casts. `print` it, or read its fields.

    Args:
        name: The function's name.
        matmuls: Matmuls and convolutions by module, line, shapes and dtypes.
        findings: Why some of them do not use Tensor Cores, or not at full speed.
        risks: Half operations that need float32's range or digits.
        residuals: Bytes kept for the backward pass, by dtype. For a function that takes no gradient, the bytes that
            its gradient with respect to the first argument would keep. None if `audit` can't take that gradient.
        casts: Casts between floating dtypes, `"float32→float16"`: their count, and the bytes they read and write.
        notes: The limits of the figures.
        communication: Collectives between devices; None for a program on one device.
        devices: Number of devices that run the program.
        device: The device in "Speed at most", as `speedup_bound` takes it; empty if there is none to report on.
        min_half: The share of FLOPs in half below which `failure` is not empty; None for none.
        tpu: Whether it runs on a TPU, which multiplies float32 in bfloat16 passes.
        kept: What `residuals` counts, by module, line and operation, most bytes first.
        traffic: By how much the program's memory traffic is smaller than in float32, at most 2.
        scores: Bytes of `residuals` that are scores of attention, which `Rules(attention="fused")` doesn't keep.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> w, x = (jax.ShapeDtypeStruct((256, 256), jnp.float32),) * 2
        >>> report = mpjax.audit(mpjax.autocast(lambda w, x: jnp.sum((x @ w) @ w)), w, x)
        >>> report.flops, report.half_share
        ({'float16': 67108864}, 1.0)
    """

    name: str
    matmuls: tuple[Matmul, ...]
    findings: tuple[Finding, ...]
    risks: tuple[Risk, ...]
    residuals: dict[str, int] | None
    casts: dict[str, tuple[int, int]]
    notes: tuple[str, ...] = ()
    communication: tuple[Collective, ...] | None = None
    devices: int = 1
    device: str = ""
    min_half: float | None = None
    tpu: bool = False
    scores: int = 0
    kept: tuple[Kept, ...] = ()
    traffic: float = 2.0

    heading = "Precision of {0.name}"
    main = "matmuls"
    derived = "flops flops_by_phase half_share float8_share speedup_bounds"

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of matmuls and convolutions by the dtype of their operands, on all devices together."""
        return totals((row.dtype, row.flops) for row in self.matmuls)

    @property
    def flops_by_phase(self) -> dict[str, dict[str, int]]:
        """`flops` of the forward pass, of recomputed forward operations, and of the backward pass."""
        return {
            phase: totals((row.dtype, row.flops) for row in self.matmuls if row.phase == phase) for phase in _PHASES
        }

    @property
    def half_share(self) -> float:
        """The share of `flops` with half or float8 operands; 0 if there are no FLOPs."""
        return self._share(row for row in self.matmuls if row.is_half)

    @property
    def float8_share(self) -> float:
        """The share of `flops` with float8 operands; 0 if there are no FLOPs."""
        return self._share(row for row in self.matmuls if row.eight_bits == "float8")

    def _share(self, rows: Iterable[Matmul]) -> float:
        total = sum(row.flops for row in self.matmuls)
        return sum(row.flops for row in rows) / total if total else 0.0

    def speedup_bound(self, device: str) -> SpeedupBound:
        """Bounds the speedup of half over float32, from the FLOPs of matmuls and convolutions.

            least time = Σ FLOPs / peak FLOP/s of the dtype
            speedup   ≤ max(least time in float32 / least time as written, traffic)    by Amdahl's law: no part gains
                                                                                       more than matmuls or traffic

        Without half there is no gain. A matmul that is not in half gets no faster.

        Args:
            device: One of `mpjax.inspection.devices.DEVICES`, or a `device_kind` of JAX that names one.

        Raises:
            ValueError: The device's peak rates are not known. The message lists the known devices.

        Source: Amdahl, 1967; peak rates from their makers.
        """
        return speedup_bound(self.matmuls, self.devices, device_of(device), self.traffic)

    def assert_half(self, min_share: float = 0.99) -> None:
        """Fails unless matmuls and convolutions run in half. Meant for a project's tests.

        Args:
            min_share: The minimum share of their FLOPs that must have half operands.

        Raises:
            AssertionError: The share is smaller. The message lists the matmuls not in half, largest share first.
        """
        if offence := self._offence(min_share):
            raise AssertionError(offence)

    def _offence(self, min_share: float) -> str:
        """The matmuls not in half, largest share first, if the half share is smaller; empty otherwise."""
        if not self.matmuls:
            return f"{self.name} has no matmul or convolution, so none is in half."
        if self.half_share >= min_share:
            return ""
        offenders = sorted((row for row in self.matmuls if not row.is_half), key=lambda row: -row.flops)
        lines = [
            f"{self._share([row]):6.1%}  {row.op} {_shape(row.lhs)} · {_shape(row.rhs)} in {row.dtype}, "
            f"{row.module or '-'} {row.source}"
            for row in offenders
        ]
        return (
            f"{self.half_share:.2%} of the matmul and convolution FLOPs of {self.name} are in half, less than "
            f"{min_share:.2%}. Not in half:\n" + "\n".join(lines)
        )

    def failure(self) -> str:
        """The matmuls not in half if the half share is below `min_half`; empty otherwise."""
        return "" if self.min_half is None else self._offence(self.min_half)

    def sections(self) -> list[Section]:
        """The sections of the printed report."""
        memory = Section(
            "Memory and casts", self._memory(), "kept by|line|op|dtype|>bytes|%share", self._kept(), shown=_FEW
        )
        notes = [Section("Notes", "\n".join(self.notes))] if self.notes else []
        sent = [] if self.communication is None else [communication_section(self.communication)]
        if not self.matmuls:
            return [Section("", self._answer()), self._risks(), memory, *sent, *notes]
        speed = [self._speed()] if self.device else []
        return [self._flops(), self._findings(), self._risks(), self._places(), memory, *sent, *speed, *notes]

    def _kept(self) -> list[tuple[str, ...]]:
        names, total = folded(row.module for row in self.kept), sum(row.bytes for row in self.kept)
        places = ((names[row.module] or "-", row.source, _OPS.get(row.op, row.op), row.dtype) for row in self.kept)
        rows = totals(zip(places, (row.bytes for row in self.kept), strict=True))
        ranked = sorted(rows.items(), key=lambda pair: -pair[1])
        return [(*where, amount(size, "B"), f"{size / total:.1%}") for where, size in ranked]

    def _memory(self) -> str:
        """What is kept for the backward pass, what of it fused attention would save, and the casts."""
        kept = dict(sorted((self.residuals or {}).items(), key=lambda pair: -pair[1]))
        size = amount(sum(kept.values()), "B")
        dtypes = ", ".join(f"{amount(n, 'B')} {name}" for name, n in kept.items())
        lines = [f"kept for the backward pass: {size}" + (f" ({dtypes})" if dtypes else "")]
        if self.residuals is None:
            lines = ["kept for the backward pass: not known, see the notes"]
        elif self.devices > 1:
            lines[0] += ", in shard_map of one device"
        if self.scores and kept:
            lines.append(f"scores: {amount(self.scores, 'B')} of {size}; Rules(attention='fused') stores none")
        casts = ", ".join(f"{count} {name} ({amount(n, 'B')})" for name, (count, n) in self.casts.items())
        return "\n".join([*lines, f"casts: {casts or 'none'}"])

    def _answer(self) -> str:
        """The share in half, and the most severe risk."""
        answer = f"{self.name}: no matmul or convolution"
        if self.matmuls:
            found = sorted({row.eight_bits for row in self.matmuls} - {""})
            shares = {kind: self._share(row for row in self.matmuls if row.eight_bits == kind) for kind in found}
            in_eight = f" ({', '.join(f'{share:.1%} in {kind}' for kind, share in shares.items())})" if shares else ""
            total = amount(sum(self.flops.values()), "FLOP")
            answer = f"{self.name}: {self.half_share:.1%} in half{in_eight}, of {total}"
        if self.risks:
            worst, where, _ = next(_alike(self.risks, lambda risk: risk.kind))
            kinds = len({risk.kind for risk in self.risks})
            of_kinds = f" of {kinds} kinds" if kinds > 1 else ""
            answer += f"; {len(self.risks)} risks{of_kinds}, first" if len(self.risks) > 1 else "; one risk:"
            answer += f" {worst.kind}" + (f" at {where}" if where else "")
        return answer

    def _flops(self) -> Section:
        phases = self.flops_by_phase
        total = sum(self.flops.values())
        rows = [
            (dtype, *(_cell(phases[phase].get(dtype, 0)) for phase in _PHASES), f"{flops / total:.1%}")
            for dtype, flops in sorted(self.flops.items(), key=lambda pair: -pair[1])
        ]
        unscaled = dict.fromkeys(risk.why for risk in self.risks if risk.kind == "unscaled")
        lines = [self._answer(), *unscaled, *self._to_do()]
        if self.devices > 1:
            each = amount(total / self.devices, "FLOP")
            lines.append(f"{amount(total, 'FLOP')} in total on {self.devices} devices ({each} per device)")
        return Section("", "\n".join(lines), f"operands|>{'|>'.join(_PHASES)}|%share", rows)

    def _to_do(self) -> list[str]:
        """The most important results: the matmuls not in half and the most severe risks."""
        lines = []
        total = sum(row.flops for row in self.matmuls)
        if self.tpu:
            passes = sum(row.flops * row.passes for row in self.matmuls) / total
            lines.append(
                "on a TPU half saves memory, traffic and communication. A float32 matmul takes one bfloat16 pass at "
                f"JAX's default precision, 6 at HIGHEST; here {passes:.2g} passes on average"
            )
        others = totals((row.module or row.source, row.flops) for row in self.matmuls if not row.is_half)
        if 0 < sum(others.values()) < total:
            most = sorted(others.items(), key=lambda pair: -pair[1])[:3]
            lines.append("not in half: " + ", ".join(f"{place} ({flops / total:.1%})" for place, flops in most))
        elif others:
            lines.append("nothing is in half: mpjax.autocast or mpjax.with_policy runs it in half")
        return lines

    def _places(self) -> Section:
        names = folded(row.module for row in self.matmuls)
        places = added_up(
            (
                (names[row.module], row.source, row.op, row.dtype),
                (row.flops, 0) if row.phase == FORWARD else (0, row.flops),  # the backward pass recomputes
            )
            for row in sorted(self.matmuls, key=lambda row: -row.flops)
        )
        rows = [
            (module or "-", source, _OPS.get(op, op), dtype, *map(_cell, flops))
            for (module, source, op, dtype), flops in sorted(places.items(), key=lambda pair: -sum(pair[1]))
        ]
        return Section("By module and line", "", "module|line|op|operands|>forward|>backward", rows)

    def _findings(self) -> Section:
        title = "Not in one bfloat16 pass" if self.tpu else "Not on Tensor Cores, or not at their speed"
        rows = [
            (first.kind, where, _OPS.get(first.op, first.op), f"{sum(f.share for f in alike):.1%}", first.why)
            for first, where, alike in _alike(self.findings, lambda f: (f.kind, f.op, f.why))
        ]
        text = _legend(TPU_MEANINGS if self.tpu else MATMUL_MEANINGS, self.findings) or "nothing"
        return Section(title, text, "kind|where|op|%FLOPs|why", rows)

    def _risks(self) -> Section:
        rows = [
            (r.kind, where, _OPS.get(r.op, r.op), r.dtype, "" if r.why == RISK_MEANINGS[r.kind] else r.why)
            for r, where, _ in _alike(self.risks, lambda risk: (risk.kind, risk.op, risk.dtype, risk.why))
        ]
        text = _legend(RISK_MEANINGS, self.risks) or "none"
        return Section("Risks in half", text, "kind|where|op|dtype|why", rows)

    def _speed(self) -> Section:
        rows = [
            (name, duration(bound.least), f"{bound.speedup:.1f}×", duration(bound.least_half), f"{bound.limit:.1f}×")
            for name, bound in self.speedup_bounds.items()
        ]
        text = (
            "relative to float32 (TF32 where available), by Amdahl's law: matmuls at the peak rates; memory traffic "
            f"gains {self.traffic:.2g}×. No execution is faster than the least time."
        )
        columns = "device|>least time|>speedup|>least time in half|>speedup in half"
        return Section("Speed at most", text, columns, rows)

    @property
    def speedup_bounds(self) -> dict[str, SpeedupBound]:
        """`speedup_bound` of the chosen device, or of all known ones, by name."""
        found = [self.speedup_bound(name) for name in ([self.device] if self.device else DEVICES)]
        return {bound.device: bound for bound in found}


def _cell(flops: int) -> str:
    return amount(flops, "FLOP") if flops else ""


Faults = TypeVar("Faults", Finding, Risk)


def _alike(faults: Iterable[Faults], key: Callable[[Faults], Any]) -> Iterator[tuple[Faults, str, list[Faults]]]:
    """Groups faults that differ only in location: the first, its location and the number of others, and all."""
    for alike in by_key((key(fault), fault) for fault in faults).values():
        first = alike[0]
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        yield first, f"{first.module} {first.source}".strip() + more, alike


def _legend(meanings: Mapping[str, str], faults: Iterable[Finding | Risk]) -> str:
    kinds = {fault.kind for fault in faults}
    return "\n".join(f"{kind}: {meaning}" for kind, meaning in meanings.items() if kind in kinds)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
