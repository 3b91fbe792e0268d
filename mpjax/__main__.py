"""`python -m mpjax`: inspects a function of a script that is left as it is."""

from mpjax.inspection.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
