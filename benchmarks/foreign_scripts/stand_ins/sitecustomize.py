"""Seeds NumPy's global generator, which some of the scripts draw their data from."""

import os

import numpy as np

np.random.seed(int(os.environ["FOREIGN_SEED"]))  # noqa: NPY002
