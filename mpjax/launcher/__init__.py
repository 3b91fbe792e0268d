"""`python -m mpjax run` and `MPJAX_AUTOCAST_ALL`: mixed precision for an unchanged script.

This is the only part of mpjax that patches other libraries. The rest of mpjax does not import it. It imports JAX only
after the script has. `docs/launcher.md` describes the design.
"""
