"""What `MPJAX_AUTOCAST_ALL` starts: the wheel puts `startup.pth` into site-packages, whose line imports this module.

Python runs that line whenever it starts; where the variable is not set, it looks the variable up and does no more.
"""

from __future__ import annotations

import os
import sys

from mpjax.launcher import hooks
from mpjax.launcher.options import LaunchError, from_environment


def start() -> None:
    """Installs the hooks that the environment asks for."""
    try:
        options = from_environment()
        if options is not None:
            hooks.install(options)
    except LaunchError as error:
        # An exception here would be Python's own failure to start, with a page of its internals.
        print(f"MPJAX_AUTOCAST_ALL: error: {error}", file=sys.stderr, flush=True)
        os._exit(2)


start()
