"""`python -m examples.speech.seeds`: trains in several precisions with several seeds, and prints one table."""

from functools import partial

from examples.common import seeds
from examples.speech.train import SpeechTask

main = partial(seeds.main, SpeechTask)

if __name__ == "__main__":
    raise SystemExit(main())
