"""Named scopes for modules of NNX and Equinox, which have none of their own: `Net/encoder/layers/0`.

Audits and profiles group operations by named scope. Linen and Haiku open one around each module. This module does
the same for NNX and Equinox, with the names of the attributes on the path to a module.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax

# The module whose method is running. The modules that it calls are named by their path in it.
_caller: contextvars.ContextVar[Any] = contextvars.ContextVar("mpjax_caller", default=None)


@dataclasses.dataclass(frozen=True)
class _Named:
    """The setting of modules whose methods open their scopes."""

    def namespace(self, base: Any) -> dict[str, Any]:
        library = next(cls for cls in base.__mro__ if cls in _libraries())
        return {name: _in_scope(getattr(base, name)) for name in method_names(base, library)}


@contextlib.contextmanager
def module_scope(module: Any, name: str = "") -> Iterator[None]:
    """Opens the named scope of one call of a module.

    Args:
        module: The called module.
        name: The scope, if the module is a copy of the called one; else `scope_name(module)`.
    """
    name = name or scope_name(module)
    with given(_caller, module), jax.named_scope(name):
        yield


@contextlib.contextmanager
def given(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    """Gives a context variable a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def attributes(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Gives attributes of an object other values, and restores them: the object may be shared.

    It bypasses checks of the object's class: a Flax module may be frozen.
    """
    state = vars(owner)
    previous = {name: state[name] for name in values if name in state}
    state.update(values)
    try:
        yield
    finally:
        for name in values:
            del state[name]
        state.update(previous)


def scope_name(module: Any) -> str:
    """The path of a module in its caller.

    If that path is unknown, as for the model itself and for a copy made by a transformation such as `nnx.scan`, it is
    the name of the module's class.
    """
    caller = _caller.get()
    return (None if caller is None else _path_in(caller, module)) or type(module).__name__


def running_module() -> Any:
    """The module whose method is running; None outside of modules with scopes."""
    return _caller.get()


@contextlib.contextmanager
def named_modules(tree: Any) -> Iterator[None]:
    """Opens a named scope around each method call of the NNX and Equinox modules in a tree.

    Inside the context the modules become instances of subclasses, in place. Pass copies that users don't see,
    such as those merged or unflattened for a trace. Modules with a policy open their scopes themselves.

    Args:
        tree: A pytree that contains modules, such as a function's `(args, kwargs)`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
        >>> with named_modules((model,)):
        ...     program = jax.make_jaxpr(model)(jnp.ones((1, 2)))
        >>> program.eqns[0].source_info.name_stack
        NameStack(stack=(Scope(name='Sequential'), Scope(name='layers/0')))
    """
    found = {id(module): module for module in _modules(tree)}
    for module in found.values():
        become(module, _Named())
    try:
        yield
    finally:
        for module in found.values():
            if setting_of(module) == _Named():  # a policy may have been set meanwhile
                become(module, None)


def stores_of_models() -> list[Any]:
    """The variables of the Linen model and of the Haiku model that are running, to which their layers write."""
    linen, haiku = sys.modules.get("flax.linen.module"), sys.modules.get("haiku")
    module = linen._context.module_stack[-1] if linen is not None else None
    stores = [] if module is None or module.scope is None else [module.scope.root._variables]
    with contextlib.suppress(ValueError):  # no Haiku model is running
        stores += [] if haiku is None else [haiku.get_params(), haiku.get_current_state()]
    return stores


def is_container(cls: type) -> bool:
    """Whether a module of this class only holds others: `nnx.List` or `nnx.Dict`."""
    return cls.__module__.startswith("flax.") and cls.__name__ in ("List", "Dict")


def method_names(cls: type, library: type) -> list[str]:
    """The names of the methods that users call, among those defined by subclasses of a library's base class.

    They include `__call__` and other functions, but not other dunders, properties, or overrides of the library's own
    private methods, such as NNX's `_setattr`. Functions under `jax.jit` and `nnx.jit` are included: they are objects of
    other types, which bind like functions.
    """
    own = cls.__mro__[: cls.__mro__.index(library)]
    return sorted(name for name in {name for base in own for name in vars(base)} if _is_method(cls, name, library))


def _is_method(cls: type, name: str, library: type) -> bool:
    if name != "__call__" and (name.startswith("__") or (name.startswith("_") and hasattr(library, name))):
        return False
    value = inspect.getattr_static(cls, name)
    if isinstance(value, (type, staticmethod, classmethod, property)):
        return False
    return inspect.isfunction(value) or (
        hasattr(value, "__wrapped__") and callable(value) and hasattr(value, "__get__")
    )


def _libraries() -> tuple[type, ...]:
    """The module base classes of the loaded libraries. Importing mpjax imports none of them."""
    places = (("flax.nnx", "Module"), ("equinox", "Module"))
    return tuple(getattr(sys.modules[library], name) for library, name in places if library in sys.modules)


def _modules(tree: Any) -> Iterator[Any]:
    """The modules in a tree, at any depth, that do not open named scopes yet."""
    bases = _libraries()
    if not bases:
        return
    seen: set[int] = set()
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, bases):
            if id(node) in seen:
                continue
            seen.add(id(node))
            if setting_of(node) is None and not is_container(type(node)):
                yield node
            node = vars(node)
        leaves = jax.tree.leaves(node, is_leaf=lambda x: isinstance(x, bases))
        stack += [leaf for leaf in leaves if isinstance(leaf, bases)]


def _path_in(caller: Any, module: Any) -> str | None:
    """The shortest attribute path from a module to one below it, or None if there is none."""
    bases = _libraries()
    queue: list[tuple[str, Any]] = [("", caller)]
    seen = {id(caller)}
    while queue:
        above, node = queue.pop(0)
        for name, child in _children(node, bases):
            if child is module:
                return above + name
            if id(child) not in seen:
                seen.add(id(child))
                queue.append((f"{above}{name}/", child))
    return None


def _children(module: Any, bases: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """The modules in a module's attributes, with their paths."""
    for name, value in vars(module).items():
        if isinstance(value, bases) and not is_container(type(value)):
            yield name, value
        elif is_container(type(value)) or isinstance(value, (list, tuple, dict)):
            # An NNX container is itself a module.
            found = jax.tree.leaves_with_path(value, is_leaf=lambda x, own=value: x is not own and isinstance(x, bases))
            for path, child in found:
                if isinstance(child, bases):
                    yield f"{name}/{jax.tree_util.keystr(path, simple=True, separator='/')}", child


def _in_scope(inherited: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with module_scope(self):
            return inherited(self, *args, **kwargs)

    return method


# Generated subclasses of module classes: how policies and named scopes change modules in place.
#
# A setting says what changes. A module becomes an instance of a subclass of its author's class, whose methods follow
# the setting. Its attributes, and so its parameters, stay the same.


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
