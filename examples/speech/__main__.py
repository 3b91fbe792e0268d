"""`python -m examples.speech`: trains, tests and measures speech recognisers in mixed precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from examples.common import script
from examples.speech.config import Config
from examples.speech.modes import run

PROGRAM = "python -m examples.speech"


def final_line(summary: dict[str, Any]) -> str:
    """The result of a training, a test, a file, or a benchmark of one policy in one line; else empty."""
    formats = {
        "wer": "WER {:.2%}",
        "cer": "CER {:.2%}",
        "policy": "policy {}",
        "latency": "latency {:.1f} ms",
        "real_time_factor": "real-time factor {:.4f}",
        "utterances_per_second": "{:,.0f} utterances/s",
        "audio_hours_per_hour": "{:,.0f} hours of audio/h",
        "loss_scale": "loss scale {:g}",
        "skipped_steps": "skipped steps {}",
    }
    if "policy" not in summary:
        return ""
    if "real_time_factor" in summary:
        summary = summary | {"latency": summary["latency_milliseconds"]}
    return ", ".join(text.format(summary[name]) for name, text in formats.items() if name in summary)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; mistakes exit with code 2."""
    return script.main(PROGRAM, Config, run, final_line, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
