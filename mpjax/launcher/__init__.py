"""`python -m mpjax run` and `MPJAX_AUTOCAST_ALL`: mixed precision for a script that is not changed.

The only part of this project that patches other libraries. Nothing else imports it, and it imports JAX only after
the script did. `docs/launcher.md` describes the design.
"""
