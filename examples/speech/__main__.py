"""`python -m examples.speech`: trains, tests and measures speech recognisers in mixed precision."""

from examples.speech.train import main

if __name__ == "__main__":
    raise SystemExit(main())
