"""`python -m mpjax`: runs a script in mixed precision, or inspects a function of one, without a change to it."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        from mpjax.launcher.cli import main
    else:
        from mpjax.inspection.cli import main
    raise SystemExit(main())
