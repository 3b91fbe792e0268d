"""`python -m examples.speech.seeds`: trains in several precisions with several seeds, and prints one table."""

from __future__ import annotations

from collections.abc import Sequence

from examples.common import seeds
from examples.common.seeds import Column
from examples.speech.__main__ import FORMATS
from examples.speech.config import Config
from examples.speech.modes import run

_COLUMNS = [Column("WER", "wer"), Column("CER", "cer")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; usage errors exit with code 2."""
    return seeds.main(Config, lambda config: run(config), FORMATS, _COLUMNS, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
