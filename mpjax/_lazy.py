"""Lazy imports: names of a package that are imported at first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], Iterable[str]]]:
    """Makes a package's `__getattr__` and `__dir__` for lazily imported names (PEP 562).

    Args:
        package: The package's `__name__`.
        homes: Maps each name to the module that defines it. If the module has that name itself, the module is the
            value.
    """

    def getattribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        module = importlib.import_module(homes[name])
        value = module if homes[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def directory() -> Iterable[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return getattribute, directory
