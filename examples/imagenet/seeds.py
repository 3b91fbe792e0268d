"""`python -m examples.imagenet.seeds`: trains in several precisions with several seeds, and prints one table."""

from functools import partial

from examples.common import seeds
from examples.imagenet.train import ImageTask

main = partial(seeds.main, ImageTask)

if __name__ == "__main__":
    raise SystemExit(main())
