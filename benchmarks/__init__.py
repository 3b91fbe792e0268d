"""Benchmarks of mpjax: each module is a command, and all results go to one folder."""

import os
import pathlib

RESULTS = pathlib.Path(__file__).parent / "results"
# Cache of compiled programs, for GPU runs, where compilation takes minutes.
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "mpjax-benchmarks"
