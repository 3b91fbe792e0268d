"""What mpjax gains and costs: each module is a command, and its results go to one folder."""

import os
import pathlib

RESULTS = pathlib.Path(__file__).parent / "results"
# Of compiled programs, for runs on a GPU, where they take minutes.
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "mpjax-benchmarks"
