"""`python -m examples.speech`: trains, tests and measures speech recognisers in mixed precision."""

from __future__ import annotations

from collections.abc import Sequence

from examples.common import script
from examples.speech.config import Config
from examples.speech.modes import run

PROGRAM = "python -m examples.speech"
FORMATS = {
    "wer": "WER {:.2%}",
    "cer": "CER {:.2%}",
    "policy": "policy {}",
    "latency_milliseconds": "latency {:.1f} ms",
    "real_time_factor": "real-time factor {:.4f}",
    "utterances_per_second": "{:,.0f} utterances/s",
    "audio_hours_per_hour": "{:,.0f} hours of audio/h",
    "loss_scale": "loss scale {:g}",
    "skipped_steps": "skipped steps {}",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; usage errors exit with code 2."""
    return script.main(PROGRAM, Config, run, FORMATS, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
