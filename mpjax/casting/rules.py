"""Rules: the allow, deny and infer lists that decide each operation's dtype, and how to change them."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from mpjax.casting.scaled import Float8, check_choices
from mpjax.policy import path_matches
from mpjax.program import compat
from mpjax.program.primitives import TABLE, Op
from mpjax.program.primitives import primitive as primitive_row
from mpjax.program.source import source_line

Predicate = Callable[[Any, Mapping[str, Any], tuple[Any, ...]], bool]
Entry = str | Predicate

Level = Literal["conservative", "default", "half"]
Residuals = Literal["auto", "half", "int8", "float8", "int8_stochastic", "float8_stochastic", "full"]
ResidualStream = Literal["auto", "half", "float32"]
WeightGradients = Literal["float32", "everywhere", "half"]
CrossEntropy = Literal["unfused", "fused"]
Attention = Literal["auto", "fused", "unfused", "cudnn", "pallas", "tokamax", "xla"]
CHOICES = {
    "level": get_args(Level),
    "residuals": get_args(Residuals),
    "residual_stream": get_args(ResidualStream),
    "weight_gradients": get_args(WeightGradients),
    "attention": get_args(Attention),
    "cross_entropy": get_args(CrossEntropy),
}
_LISTS = (("allow", Op.ALLOW), ("deny", Op.DENY), ("infer", Op.INFER))
VARIABLES = {name: f"MPJAX_{name.upper()}LIST_ADD" for name, _ in _LISTS}


class UnusedRuleWarning(UserWarning):
    """An entry of a `Rules` list matched no operation of the program.

    Example:
        >>> import warnings, jax.numpy as jnp, mpjax
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = mpjax.autocast(jnp.dot, rules=mpjax.Rules(deny=["*/head"]))(jnp.eye(2), jnp.eye(2))
        >>> str(caught[0].message)
        "Rules(deny=...): '*/head' matched no operation of this program; fix or remove it..."
    """


@dataclasses.dataclass(frozen=True)
class Rules:
    """The operations that run in half (allow), in float32 (deny), or in the dtype of their inputs (infer).

    Entries here take precedence over the defaults (`mpjax.program.primitives`). An entry is

    - the name of a primitive, `"reduce_max"`;
    - a pattern over module paths and named scopes, which contains a `/` or a `*`:
      `"decoder/head"`, `"*/LayerNorm_*"`; it also matches everything below the path;
    - a source line, `"train.py:41"`, for code in no module: all that the line computes or calls;
    - a predicate `f(primitive, params, avals) -> bool`, called with the primitive, its parameters
      and the abstract values of its inputs.

    Predicates take precedence over patterns, and patterns over names.

    Args:
        allow: Operations that run in half.
        deny: Operations that run in float32.
        infer: Operations that run in the widest dtype among their activations.
        level: `"default"`; `"conservative"` runs all operations outside the allow list in float32; `"half"` runs
            everything in half, sums included (Apex's O3). Use `"half"` for measurements, not for training.
        residuals: `"half"` stores only the half inputs of the float32 arithmetic between matmuls (a normalisation, a
            softmax, a GELU, a loss) and recomputes that arithmetic in the backward pass. `"full"` stores what JAX
            would, float32 values included. `"auto"` is `"half"`, but leaves the choice to XLA where it compiles a
            program for a TPU outside of loops: its compiler recomputes such arithmetic by itself, and a demand to do so
            costs memory there. `"int8"` and `"float8"` (experimental) keep half values in eight bits where that is
            safe: the same forward pass, larger errors of gradients. With `_stochastic` behind them they round up or
            down at random, as a hash of the values has it, so that the errors have no bias.
        weight_gradients: `"float32"` writes the gradient of a float32 parameter in float32, straight from the
            accumulator of its matmul (or 1×1 convolution), and sums it over devices in float32. Other convolutions
            write their gradients in half, because cuDNN has no such kernel for them. `"everywhere"` makes these
            float32 too, which costs nothing on a TPU or a CPU. `"half"` is JAX's derivative: written in half, then
            widened.
        residual_stream: `"half"` computes the residual stream of a transformer or a pre-activation ResNet
            (`h = h + f(h)`, layer after layer) in half, like every activation. Each addition rounds it, so that the
            error grows with their number. `"float32"` computes it in float32. Each layer reads and keeps a half copy,
            so that nothing more is kept; a layer in a `jax.checkpoint` adds outside of it. `"auto"` is `"float32"` from
            25 additions in a row on (13 layers of a transformer); those of little, such as LayerScale's, count twice,
            those to a stream without norms four times.
        attention: `"auto"` runs attention that the function writes out in a fused kernel, which stores no scores, where
            the device has one (cuDNN's on CUDA, Pallas's on a TPU), rows have more than 512 scores, and no flag asks
            for determinism or checks of each operation. `"fused"` does so for rows of any length, and on other devices
            computes a block of queries at a time. `"cudnn"`, `"pallas"`, `"tokamax"` (if it is installed) and `"xla"`
            (the blocks) are the implementations by name, whatever the device. `"unfused"` leaves it as it is written.
            Where no kernel runs, rows of more than 128 scores are divided by their sums after the product with the
            values (not on a TPU, nor with `residuals="full"`).
        cross_entropy: `"fused"` computes a loss from statistics of each row of its logits (the logsumexp, the logits at
            the labels), a block of the vocabulary at a time: no array of tokens × vocabulary is stored, for a third
            more FLOPs of the head. `"unfused"` runs a loss as it is written.
        float8: The options of float8 matmuls, for a policy with `matmul_dtype="float8"`.

    Raises:
        ValueError: A name is not a primitive, an entry is in two lists, or an option has an unknown value.

    Example:
        >>> import mpjax
        >>> rules = mpjax.Rules(deny=["*/head", "tanh"], infer=["reduce_max"])
        >>> rules.deny
        ('*/head', 'tanh')
        >>> mpjax.Rules(deny=["tanhh"])
        Traceback (most recent call last):
        ...
        ValueError: Rules(deny=...): 'tanhh' is not a primitive of this JAX (did you mean 'tanh'?)...

    Source: the lists, and editing them by environment variables, are from TensorFlow's automatic mixed precision.
    The assignment of operations to lists follows it and `torch.autocast`.
    """

    allow: Sequence[Entry] = ()  # tuples from `__post_init__` on
    deny: Sequence[Entry] = ()
    infer: Sequence[Entry] = ()
    level: Level = "default"
    residuals: Residuals = "auto"
    weight_gradients: WeightGradients = "float32"
    residual_stream: ResidualStream = "auto"
    attention: Attention = "auto"
    cross_entropy: CrossEntropy = "unfused"
    float8: Float8 | None = None

    def __post_init__(self) -> None:
        for name, _ in _LISTS:
            object.__setattr__(self, name, _entries(f"Rules({name}=...)", getattr(self, name)))
        check_choices(self, CHOICES)
        if not isinstance(self.float8, Float8 | None):
            raise ValueError(f"Rules(float8={self.float8!r}): give a mpjax.Float8.")
        _check_overlap(self)

    def add(self, **lists: Iterable[Entry]) -> Rules:
        """These rules with more entries, `rules.add(deny=["tanh"])`. An entry that is in another list moves."""
        changed: dict[str, tuple[Entry, ...]] = {}
        moved = {entry for entries in lists.values() for entry in _entries("Rules.add", entries)}
        for name, _ in _LISTS:
            others = tuple(entry for entry in getattr(self, name) if entry not in moved)
            changed[name] = others + _entries(f"Rules.add({name}=...)", lists.get(name, ()))
        return dataclasses.replace(self, allow=changed["allow"], deny=changed["deny"], infer=changed["infer"])

    def list_of(self, primitive: str) -> str:
        """The list that a primitive is in, by name alone: `"allow"`, `"deny"`, `"infer"` or `"opaque"`.

        Example:
            >>> Rules().list_of("dot_general"), Rules().list_of("exp"), Rules().list_of("pallas_call")
            ('allow', 'deny', 'opaque')
        """
        for name, _ in _LISTS:
            if primitive in getattr(self, name):
                return name
        op = primitive_row(primitive).op
        return op.value if op in (Op.ALLOW, Op.DENY, Op.OPAQUE) else "infer"

    @property
    def entries(self) -> tuple[tuple[Entry, Op], ...]:
        """Every entry with its list, in the order in which they are tried."""
        pairs = [(entry, op) for name, op in _LISTS for entry in getattr(self, name)]
        return tuple(sorted(pairs, key=lambda pair: _rank(pair[0])))

    @property
    def reads_scopes(self) -> bool:
        """Whether an entry matches module paths."""
        return any(isinstance(entry, str) and is_pattern(entry) for entry, _ in self.entries)

    def match(self, eqn: Any, paths: Sequence[str]) -> tuple[Entry, Op] | None:
        """The first entry that matches an equation at one of its module paths, and its list; None if none does."""
        for entry, op in self.entries:
            if callable(entry):
                matches = entry(eqn.primitive, eqn.params, tuple(v.aval for v in eqn.invars))
            elif is_line(entry):
                matches = source_line(eqn) == entry
            elif is_pattern(entry):
                matches = any(path_matches(path, entry) for path in paths)
            else:
                matches = eqn.primitive.name == entry
            if matches:
                return entry, op
        return None

    def with_environment(self) -> Rules:
        """These rules with the entries of `MPJAX_ALLOWLIST_ADD`, `MPJAX_DENYLIST_ADD`, `MPJAX_INFERLIST_ADD`.

        Raises:
            ValueError: An entry is neither a primitive nor a pattern of scopes. The message names the variable.
        """
        added = {
            name: _entries(variable, os.environ[variable].replace(",", " ").split())
            for name, variable in VARIABLES.items()
            if os.environ.get(variable)
        }
        return self.add(**added) if added else self


def is_pattern(entry: str) -> bool:
    """Whether an entry matches scopes rather than a primitive."""
    return "/" in entry or "*" in entry


def is_line(entry: str) -> bool:
    """Whether an entry is a source line, as `train.py:41`, in the form that reports print."""
    return bool(re.fullmatch(r"[^/*]+:\d+", entry))


def _rank(entry: Entry) -> int:
    return 0 if callable(entry) else 1 if is_pattern(entry) or is_line(entry) else 2


def _entries(where: str, entries: Any) -> tuple[Entry, ...]:
    if isinstance(entries, str) or callable(entries):
        raise ValueError(f"{where}: give a list of entries, not {entries!r} alone.")
    entries = tuple(entries)
    for entry in entries:
        if callable(entry):
            continue
        if not isinstance(entry, str) or not entry:
            raise ValueError(f"{where}: {entry!r} is neither a name, a pattern nor a predicate.")
        named = not is_pattern(entry) and not is_line(entry)
        if named and entry not in TABLE and entry not in compat.known_primitives():
            close = difflib.get_close_matches(entry, {*TABLE, *compat.known_primitives()}, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(
                f"{where}: {entry!r} is not a primitive of this JAX{hint}. A module path or named scope is "
                f"written with a slash or a star, as '*/{entry}'; anything else can be a predicate "
                "f(primitive, params, avals)."
            )
    return entries


def _check_overlap(rules: Rules) -> None:
    list_of: dict[Any, str] = {}
    for name, _ in _LISTS:
        for entry in getattr(rules, name):
            if list_of.setdefault(entry, name) != name:
                raise ValueError(
                    f"Rules: {entry!r} is in both {list_of[entry]!r} and {name!r}; leave it in one. "
                    "(`rules.add(...)` moves an entry.)"
                )
