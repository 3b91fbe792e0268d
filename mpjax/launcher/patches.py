"""Replaces functions of JAX and optax for the calls that the script makes."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import mpjax
from mpjax.launcher import programs
from mpjax.launcher.session import CHECKIFIED, OF_LIBRARY, Session, differentiating, enclosing_scale, frame
from mpjax.program import compat
from mpjax.program.fates import mark_update
from mpjax.program.scopes import given
from mpjax.program.source import name_of


class Replacements(contextlib.ExitStack):
    """Replacements of attributes that can be undone, and are at the end of a `with` block."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute and remembers its previous value."""
        missing = object()
        before = vars(owner).get(name, missing)
        setattr(owner, name, value)
        self.callback(lambda: delattr(owner, name) if before is missing else setattr(owner, name, before))

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces a function by `make(function)`, which gets its name and documentation."""
        original = getattr(owner, name)
        self.replace(owner, name, functools.wraps(original)(make(original)))

    def undo(self) -> None:
        """Restores all replaced attributes."""
        self.close()


@contextlib.contextmanager
def autocast_gradients(policy: Any) -> Iterator[None]:
    """Within it, `jax.grad`, `value_and_grad`, `vjp` and `linearize` differentiate functions under autocast."""

    def casting(original: Any) -> Any:
        return lambda fun, *args, **options: original(mpjax.autocast(fun, policy), *args, **options)

    with Replacements() as replacements:
        for name in ("grad", "value_and_grad", "vjp", "linearize"):
            replacements.wrap(jax, name, casting)
        yield


class Patches(Replacements):
    """The launcher's replacements.

    Args:
        session: The session of this process.
    """

    def __init__(self, session: Session):
        super().__init__()
        self.session = session
        self._modules: set[str] = set()

    def patch(self, name: str) -> None:
        """Replaces functions of `jax`, `optax` or `jax.example_libraries.optimizers`, which has just been executed.

        If it was executed before (`importlib.reload`), a part of its earlier replacements is still there: all are made
        again.
        """
        self.undo()
        self._modules.add(name)
        for module in self._modules:
            getattr(self, f"_patch_{module.rpartition('.')[2]}")()

    def _patch_jax(self) -> None:
        """Replaces `jit`, `pmap`, `grad`, `value_and_grad`, `vjp` and `linearize` of the `jax` module."""
        session, value_and_grad = self.session, jax.value_and_grad
        for name in ("grad", "value_and_grad"):
            self.wrap(jax, name, functools.partial(_differentiation, session, value_and_grad, name == "grad"))
        for name in ("vjp", "linearize"):
            self.wrap(jax, name, functools.partial(_linearization, session))
        self.wrap(jax.custom_vjp, "defvjp", _checked_rules)
        self.wrap(jax, "jit", functools.partial(_compilation, session))
        self.wrap(jax, "pmap", functools.partial(_mapping, session))

    def _patch_optax(self) -> None:
        """Makes every optax transformation skip steps with nonfinite gradients."""
        import optax

        session = self.session

        def skipping(plain: Any) -> Any:
            return lambda self, *args, **extra: guarded(session, functools.partial(plain, self))(*args, **extra)

        self.wrap(optax.MultiSteps, "update", skipping)
        self.wrap(optax, "apply_updates", functools.partial(_applying, session))
        self._guard(optax.GradientTransformation, guarded)

    def _patch_equinox(self) -> None:
        """Notes parameters after an update."""
        import equinox

        self.wrap(equinox, "apply_updates", functools.partial(_applying, self.session))

    def _patch_checkify(self) -> None:
        """Leaves functions that `checkify` checks as they are: it would report an attempt that is repeated."""
        from jax.experimental import checkify

        original = checkify.checkify
        self.replace(checkify, "checkify", lambda *args, **options: given(CHECKIFIED, True)(original(*args, **options)))

    def _patch_optimizers(self) -> None:
        """The same for `jax.example_libraries.optimizers`."""
        from jax.example_libraries import optimizers

        self._guard(optimizers.Optimizer, guarded_state)

    def _guard(self, kind: Any, guard: Callable[..., Any]) -> None:
        """Makes a class of optimizers, tuples `(init, update, ...)`, guard its update.

        It is guarded once, when it is made: an `update` that differs at each access would recompile as a static
        argument.
        """
        session, new = self.session, kind.__new__

        @functools.wraps(new)
        def make(cls: Any, *fields: Any, **named: Any) -> Any:
            init, update, *rest = (*fields, *(named[name] for name in kind._fields[len(fields) :]))
            session.optimizers += 1
            return new(cls, init, guard(session, update), *rest)

        self.replace(kind, "__new__", make)
        self.replace(kind, "_make", classmethod(lambda cls, fields: cls(*fields)))  # as `_replace` calls it


def _differentiation(session: Session, value_and_grad: Any, gradient_only: bool, original: Any) -> Any:
    def differentiate(fun: Any, argnums: Any = 0, has_aux: bool = False, *rest: Any, **options: Any) -> Any:
        plain = original(fun, argnums, has_aux, *rest, **options)
        line = session.callers.script_line()
        is_special = any(rest) or any(options.values())  # holomorphic, allow_int
        if not line or not session.active or is_special:
            return plain if line else of_library(session, plain)

        @functools.wraps(plain)
        def gradient(*args: Any, **kwargs: Any) -> Any:
            if session.casts and isinstance(fun, programs.Compiled) and not compat.is_compiling():
                return fun.derived((original, argnums, has_aux), gradient)(*args, **kwargs)
            site = session.gradient(fun, line)
            if site is None:
                with in_float32():
                    return plain(*args, **kwargs)
            from mpjax.launcher import gradients

            half = gradients.value_and_grad(session, value_and_grad, fun, has_aux, argnums, site)
            value, grads = half(*args, **kwargs)
            if not gradient_only:
                return value, grads
            return (grads, value[1]) if has_aux else grads

        return gradient

    return differentiate


def of_library(session: Session, gradient: Any) -> Any:
    """A gradient function that a library makes, which stays as it is, and is named if it is called."""
    library = session.callers.library()

    @functools.wraps(gradient)
    def named(*args: Any, **kwargs: Any) -> Any:
        session.keep(OF_LIBRARY, "", library)
        return gradient(*args, **kwargs)

    return named if library else gradient


def in_float32() -> Any:
    """The context of a gradient that stays in float32 with all that it contains, where a program is traced."""
    return contextlib.nullcontext() if frame() is None else differentiating(None)


def _linearization(session: Session, original: Any) -> Any:
    def linearize(fun: Any, *primals: Any, **options: Any) -> Any:
        line = session.callers.script_line()
        if not line or not session.active:
            return original(fun, *primals, **options)
        site = session.gradient(fun, line)
        if site is None:
            with in_float32():
                return original(fun, *primals, **options)
        from mpjax.launcher import gradients

        return gradients.vjp(session, original, fun, primals, options, site)

    return linearize


def _checked_rules(original: Any) -> Any:
    """`custom_vjp.defvjp` for rules that note whether a loss scale would change them, in a nested gradient.

    The program of an outer gradient contains the operations of a nested one, not its rules. What a rule differentiates
    is a part of the gradient that calls it, which scales its cotangents already.
    """

    def as_part(rule: Any) -> Any:
        @functools.wraps(rule)
        def run(*args: Any, **kwargs: Any) -> Any:
            with differentiating(None) if compat.is_compiling() else contextlib.nullcontext():
                return rule(*args, **kwargs)

        return run

    def defvjp(self: Any, fwd: Any, bwd: Any, *rest: Any, **options: Any) -> Any:
        @functools.wraps(bwd)
        def checked(*args: Any) -> Any:
            scale = enclosing_scale()
            if scale is not None and scale.value is not None and not scale.rule:
                from mpjax.program.linearity import check_rule

                scale.rule = "" if check_rule(as_part(bwd), args) else name_of(bwd)
            return as_part(bwd)(*args)

        return original(self, as_part(fwd), checked, *rest, **options)

    return defvjp


def _compilation(session: Session, original: Any) -> Any:
    def jit(fun: Any = None, /, **options: Any) -> Any:
        if fun is None:
            return functools.partial(jit, **options)
        if not session.callers.script_line():
            return original(fun, **options)
        return programs.Compiled(session, original, fun, options)

    return jit


def _applying(session: Session, original: Any) -> Any:
    def apply_updates(*args: Any, **kwargs: Any) -> Any:
        params = original(*args, **kwargs)
        session.updated.add(jax.tree.leaves(params) if session.hands else (), True)
        return params

    return apply_updates


def _mapping(session: Session, original: Any) -> Any:
    def pmap(fun: Any, *args: Any, **options: Any) -> Any:
        if session.callers.script_line():
            fun = programs.under_policy(session, fun)
        return original(fun, *args, **options)

    return pmap


# Optimizer steps of the script. A step with nonfinite gradients is skipped.


# Set inside an update: transformations may contain others, and only the outermost decides.
_DECIDED: contextvars.ContextVar[bool] = contextvars.ContextVar("decided", default=False)


def guarded(session: Session, update: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an optax `update` so that nonfinite gradients give zero updates and keep the state."""

    @functools.wraps(update)
    def update_if_finite(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        def take(grads: Any) -> Any:
            return update(grads, state, params, **extra)

        def skipped(shapes: Any) -> Any:
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[0]), state

        # A line search compares losses, which half precision blurs.
        return take(updates) if "value_fn" in extra else _taken(session, updates, take, skipped)

    return update_if_finite


def guarded_state(session: Session, update: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the `update` of `jax.example_libraries.optimizers` so that nonfinite gradients keep the state."""
    return functools.wraps(update)(
        lambda step, grads, state: _taken(session, grads, lambda g: update(step, g, state), lambda _: state)
    )


def _taken(session: Session, grads: Any, take: Callable[[Any], Any], skip: Callable[[Any], Any]) -> Any:
    """The result of `take` for gradients, or if they are not finite, of `skip` for the shapes of the former."""

    def decided(grads: Any) -> Any:
        # An optimizer's matmuls (Shampoo, Muon) are not the model's.
        with given(_DECIDED, True), mpjax.autocast_disabled():
            return take(grads)

    if _DECIDED.get() or not session.casts:
        return decided(grads)
    present = frame()
    if present is None:
        session.receive(jax.tree.leaves(grads))
    else:
        present.optimizes = True
    if not session.scales or not (present.gradients or present.guards if present else session.sites):
        if present is not None:
            present.unguarded, grads = session.scales, mark_update(grads)
        return decided(grads)
    from mpjax.launcher.retrying import all_finite
    from mpjax.program.evaluator import strong

    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(grads)):
        return decided(grads) if all_finite(grads) else skip(jax.eval_shape(decided, grads))
    shapes = jax.eval_shape(decided, grads)
    other = skip(shapes)
    if _types(shapes) != _types(other):
        # A state whose structure or types change in a step can't pass through `cond`: not an update that can skip.
        return decided(grads)
    grads = mark_update(grads)
    return jax.lax.cond(all_finite(grads), lambda: strong(decided(grads)), lambda: strong(other))


def _types(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype) if hasattr(x, "dtype") else x for x in leaves]
