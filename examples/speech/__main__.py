"""`python -m examples.speech`: trains, tests and measures speech recognisers in mixed precision."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tyro

from examples.common.cli import UsageError, command_line, fail
from examples.common.hosts import say
from examples.common.loop import Interrupted
from examples.speech.config import Config
from examples.speech.modes import run

PROGRAM = "python -m examples.speech"


def final_line(summary: dict[str, Any]) -> str:
    """What it came to, in one line: of a training, a test, a file, or a benchmark of one policy; else empty."""
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
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        summary = run(tyro.cli(Config, prog=PROGRAM, args=arguments))
    except UsageError as error:
        fail(PROGRAM, error)
    except Interrupted as interrupted:
        # In full, as the folder may have been chosen by us.
        given = any(word.startswith(("--output", "--results-dir")) for word in arguments)
        output = () if given else ("--output", str(interrupted.output))
        say(f"{interrupted}; continue with:\n  {command_line(PROGRAM, arguments, *output, '--resume')}")
        return interrupted.exit_code
    if line := final_line(summary):
        say(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
