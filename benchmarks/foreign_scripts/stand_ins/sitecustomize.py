"""Seeds the global generators that some of the scripts draw their data from."""

import os
import random

import numpy as np

random.seed(int(os.environ["FOREIGN_SEED"]))
np.random.seed(int(os.environ["FOREIGN_SEED"]))  # noqa: NPY002
