"""`python -m examples.imagenet`: trains, tests and measures image classifiers in mixed precision."""

from examples.imagenet.train import main

if __name__ == "__main__":
    raise SystemExit(main())
