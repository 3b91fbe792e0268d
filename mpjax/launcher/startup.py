"""The entry point for `MPJAX_AUTOCAST_ALL`. The wheel puts `startup.pth`, which imports it, into site-packages.

Python runs `startup.pth` at every start. If the variable is not set, nothing of mpjax is imported.
"""

from __future__ import annotations

import os
import sys

from mpjax.launcher import hooks
from mpjax.launcher.options import LaunchError, from_environment


def start() -> None:
    """Installs the import hooks if the environment sets the variable."""
    try:
        options = from_environment()
        if options is not None:
            hooks.install(options)
    except LaunchError as error:
        # An exception here would make Python fail to start, with a long traceback of its internals.
        print(f"MPJAX_AUTOCAST_ALL: error: {error}", file=sys.stderr, flush=True)
        os._exit(2)


start()
