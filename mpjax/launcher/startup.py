"""What `MPJAX_AUTOCAST_ALL` starts: the wheel's `mpjax_launcher.pth` imports this where the variable is set."""

from __future__ import annotations

import sys

from mpjax.launcher import hooks
from mpjax.launcher.options import LaunchError, from_environment


def start() -> None:
    """Installs the hooks that the environment asks for; called when Python starts."""
    if "mpjax" in sys.argv[:1]:
        return
    try:
        options = from_environment()
        if options is not None:
            hooks.install(options)
    except LaunchError as error:
        hooks.fail(str(error))


start()
