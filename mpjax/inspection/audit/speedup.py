"""Bounds on the speedup of half: the matmuls at a device's peak rates, and Amdahl's law."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpjax.inspection.audit.matmuls import Matmul
from mpjax.inspection.devices import Device
from mpjax.inspection.reports import totals

_HALF = ("float16", "bfloat16", "float8")
_PRECISIONS = {3: "HIGH", 6: "HIGHEST"}  # by the bfloat16 passes of a TPU
# Memory traffic takes half the time in half.
_MEMORY = 2.0


@dataclasses.dataclass(frozen=True)
class SpeedupBound:
    """Bounds on the speedup of half on a device; see `PrecisionReport.speedup_bound`. Times are in seconds.

    Args:
        device: The device's name.
        float32: The least time of the float32 program, or its measured time.
        least: The least time of the program as written: its matmuls and convolutions at the peak rates.
        least_half: The least time with all of them in half.
        speedup: The largest speedup of the program as written over float32.
        limit: The same with all matmuls and convolutions in half.
    """

    device: str
    float32: float
    least: float
    least_half: float
    speedup: float
    limit: float


def speedup_bound(
    matmuls: Sequence[Matmul], devices: int, device: Device, float32_seconds: float | None = None
) -> SpeedupBound:
    """The speedup bound of a program's matmuls and convolutions, spread evenly over `devices`."""
    halves = totals((d, row.flops) for row in matmuls for d in row.dtypes if d in ("float16", "bfloat16"))
    half = max(halves, key=lambda dtype: halves[dtype], default="float16")

    def least(narrow: str = "", wide: str = "") -> float:
        """The time at the peak rates, with `narrow` in place of half and float8, and `wide` in place of float32."""
        seconds = 0.0
        for row in matmuls:
            dtype = next((d for d in row.dtypes if not d.startswith(_HALF)), row.dtypes[0])
            dtype = (narrow if dtype.startswith(_HALF) else wide if dtype == "float32" else "") or dtype
            seconds += row.flops / devices / device.peak(dtype, _PRECISIONS.get(row.passes, ""))
        return seconds

    float32, now, in_half = least("float32"), least(), least(wide=half)

    def bound(seconds: float) -> float:
        if float32_seconds is not None:
            return float32_seconds / seconds if seconds else 1.0
        ratio = float32 / seconds if seconds else 1.0
        return max(ratio, _MEMORY) if ratio > 1 else 1.0

    start = float32 if float32_seconds is None else float32_seconds
    return SpeedupBound(device.name, start, now, in_half, bound(now), bound(in_half))
