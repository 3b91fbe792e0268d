"""Griffe's extension for this project's docstrings: `Example:` is a section of doctests."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^(\s*)Example:[ ]*$", re.MULTILINE)


class DoctestExamples(Extension):
    """Renders `Example:` as Google's `Examples:`, whose `>>>` lines are code and not quotations."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
