"""Generated subclasses of module classes: how policies and named scopes change modules in place.

A setting says what changes. A module becomes an instance of a subclass of its author's class, whose methods follow the
setting. Its attributes, and so its parameters, stay the same.
"""

from __future__ import annotations

import types
import weakref
from typing import Any, Protocol

_KEPT = ("__module__", "__qualname__", "__doc__")


class Change(Protocol):
    """A hashable description of the change."""

    def namespace(self, base: Any) -> dict[str, Any]:
        """The attributes of the subclass of an author's class."""
        ...


# One class per author's class and setting, so that equal models with equal settings are equal.
_classes: weakref.WeakValueDictionary[tuple[type, Change], type] = weakref.WeakValueDictionary()


def original_class(cls: Any) -> Any:
    """The author's class of a generated one; any other class is returned unchanged."""
    return getattr(cls, "_mpjax_base", cls)


def setting_of(module: Any) -> Any:
    """The setting of a module, or None."""
    return getattr(type(module), "_mpjax_setting", None)


def become(module: Any, setting: Change | None) -> None:
    """Changes a module in place: to a setting, or back to its author's class."""
    base = original_class(type(module))
    # Modules may be frozen, or have a `__setattr__` of their own.
    object.__setattr__(module, "__class__", base if setting is None else class_with(base, setting))


def class_with(base: Any, setting: Change) -> Any:
    """The subclass of an author's class that follows a setting."""
    if (base, setting) not in _classes:
        namespace = {name: getattr(base, name) for name in _KEPT} | {"__reduce__": reduce_}
        namespace |= setting.namespace(base) | {"_mpjax_base": base, "_mpjax_setting": setting}
        keywords = {"pytree": base._pytree__is_pytree} if hasattr(base, "_pytree__is_pytree") else {}
        cls = types.new_class(base.__name__, (base,), keywords, lambda body: body.update(namespace))
        _classes[base, setting] = cls
        return cls
    return _classes[base, setting]


def reduce_(self: Any) -> Any:
    """Pickles the author's class and the setting, because the class itself is generated."""
    return _blank, (self._mpjax_base, self._mpjax_setting), self.__getstate__()


def _blank(base: type, setting: Change) -> Any:
    return object.__new__(class_with(base, setting))
