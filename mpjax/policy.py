"""Precision policies: the dtypes of parameters, computation and outputs.

A [`Policy`][mpjax.Policy] is a `jmp.Policy` with normalised dtypes and optional overrides by
path. It is frozen and hashable, and `get_policy` parses it from its own string.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from mpjax.program.formats import HALF_DTYPES, SCALED, Format, format_of

T = TypeVar("T")

# The real floating dtypes that a cast may change. float8 and int4 arrays are left alone: they
# are storage formats whose scale is stored elsewhere, so a plain cast would change their meaning.
CASTABLE_DTYPES = frozenset(np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64))

_DTYPE_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "full": "float32"}
_DTYPE_NAMES |= {name: name for name in ("bfloat16", "float16", "float32", "float64")}
# The formats of matmuls by the names that a policy accepts.
_MATMUL_FORMATS = {name: format for format in reversed(SCALED.values()) for name in format.names}
_KEYS = {"p": "params", "c": "compute", "m": "matmul", "o": "output", "r": "reduce"}
_FLAGS = {"true": True, "false": False}
# Separators of the overrides in a policy's string. A pattern can't contain them.
_OVERRIDE_SEPARATOR, _OVERRIDE_ARROW = ";", "=>"
# The override pattern that matches every normalisation layer.
NORM = "<norm>"
# Patterns that need not match: a model may have no normalisation layers.
NORM_PATTERNS = (NORM,)
# BatchNorm, LayerNorm, InstanceNorm2d, ...: class names in Flax, Equinox, Haiku and user code.
_NORM_CLASS = re.compile(r"Norm(\dd)?$")
# norm, layer_norm_1, GroupNorm_0, bn, bn1, ln_f, ln_1, rms: common module names.
_NORM_NAME = re.compile(r"norm|^(bn|gn|ln|rms)(_?\d+|_[a-z]+\d*)?$", re.IGNORECASE)


class UnusedOverrideWarning(UserWarning):
    """An override pattern of a policy matched no path of the model or tree."""


class ExplicitDtypeWarning(UserWarning):
    """Layers keep an explicit dtype that is wider than the policy's compute dtype."""


def is_norm_class(cls: type) -> bool:
    """Whether a module class is a normalisation layer: it or one of its bases is named `...Norm`."""
    return any(_NORM_CLASS.search(base.__name__) for base in cls.__mro__)


def _is_module(x: Any) -> bool:
    """Whether `x` is an NNX or Equinox module, whose class tells whether it is a normalisation layer."""
    return any(base.__name__ == "Module" for base in type(x).__mro__)


def is_castable(x: Any) -> bool:
    """Whether a cast may change `x`: an array (or its shape and dtype) of a real float dtype."""
    dtype = getattr(x, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype in CASTABLE_DTYPES and hasattr(x, "shape")


def is_half(x: Any) -> bool:
    """Whether `x` is a float16 or bfloat16 array."""
    return is_castable(x) and x.dtype in HALF_DTYPES


def _cast_leaf(x: Any, dtype: np.dtype) -> Any:
    if not is_castable(x) or x.dtype == dtype:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=dtype)
    if isinstance(x, np.generic):
        return dtype.type(x)
    # `astype` keeps an array's type (numpy stays numpy) and, in eager mode, its sharding.
    return x.astype(dtype)


def path_string(path: tuple[Any, ...]) -> str:
    """Formats a tree path as `a/b/0`. Override patterns are matched against this form."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def path_matches(path: str, pattern: str, owner: type | None = None) -> bool:
    """Whether a shell-style `pattern` matches `path` or one of its parents.

    `*` also matches `/`, so `*/BatchNorm_*` covers `BatchNorm_0`, `Block_1/BatchNorm_0` and everything below
    them. A pattern without a leading `*` must match from the start of the path.
    `<norm>` covers normalisation layers and their parameters. The class of the `owner` decides, which is the module
    at the path or the one that holds the parameter. Without an owner, the names along the path decide.
    """
    if pattern == NORM:
        return is_norm_class(owner) if owner else any(map(_NORM_NAME.search, path.split("/")))
    anchored = "/" + path.strip("/")
    pattern = pattern if pattern.startswith(("/", "*")) else "/" + pattern
    return fnmatch.fnmatchcase(anchored, pattern) or fnmatch.fnmatchcase(anchored, pattern + "/*")


def _normalise_dtype(field: str, value: Any) -> np.dtype:
    try:
        dtype = np.dtype(jnp.dtype(_DTYPE_NAMES.get(value, value) if isinstance(value, str) else value))
    except TypeError:
        dtype = np.dtype(object)
    if value is None or dtype not in CASTABLE_DTYPES:
        raise ValueError(
            f"Policy({field}={value!r}): not a real floating dtype; give one of float16, bfloat16, "
            "float32, float64 (a string, a numpy dtype or a jax.numpy scalar type)."
        )
    return dtype


def _matmul_format(value: Any) -> Format | None:
    """The format of matmuls that a name or a dtype means; None if it means none."""
    if isinstance(value, str):
        return _MATMUL_FORMATS.get(value)
    try:
        found = format_of(jnp.dtype(value))
    except TypeError:
        return None
    return found if found is not None and found.is_scaled else None


def _normalise_matmul_dtype(value: Any, compute_dtype: np.dtype) -> Any:
    """A format of matmuls as a policy holds it, or None where matmuls run in the compute dtype."""
    if value is None:
        return None
    found = _matmul_format(value)
    if found is None:
        choices = " or ".join(f"{name!r} ({each.dtype.name.partition('_')[2]})" for name, each in SCALED.items())
        raise ValueError(
            f"Policy(matmul_dtype={value!r}): give {choices}, or None to run matmuls in the compute dtype."
        )
    if compute_dtype != found.compute:
        raise ValueError(
            f"Policy(matmul_dtype={found.name!r}, compute_dtype={str(compute_dtype)!r}): {found.name} matmuls need "
            f"compute_dtype={found.compute!r}, which has the range of their results."
        )
    return found.in_policies


def _default_reduce_dtype(param_dtype: Any) -> np.dtype:
    return np.dtype(np.float64 if _normalise_dtype("param_dtype", param_dtype) == np.float64 else np.float32)


def _normalise_overrides(overrides: Iterable[Any]) -> tuple[tuple[str, Policy], ...]:
    if isinstance(overrides, dict):
        overrides = tuple(overrides.items())
    pairs = []
    for pair in overrides:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(f"Policy(overrides=...): expected (pattern, policy) pairs, got {pair!r}.")
        pattern, policy = pair[0], get_policy(pair[1])
        if not pattern or _OVERRIDE_SEPARATOR in pattern or _OVERRIDE_ARROW in pattern:
            raise ValueError(
                f"Policy(overrides=...): the pattern {pattern!r} must be non-empty and free of "
                f"{_OVERRIDE_SEPARATOR!r} and {_OVERRIDE_ARROW!r}."
            )
        if policy.overrides:
            raise ValueError(
                f"Policy(overrides=...): the policy given for {pattern!r} has overrides of its own; "
                "list them all on the outer policy instead (the first match wins)."
            )
        pairs.append((pattern, policy))
    return tuple(pairs)


@dataclasses.dataclass(frozen=True)
class Policy(jmp.Policy):
    """The dtypes of parameters, computation, outputs and reductions. A subclass of `jmp.Policy`.

    Args:
        param_dtype: Dtype in which parameters are stored.
        compute_dtype: Dtype in which matmuls and convolutions run.
        output_dtype: Dtype of the model's outputs.
        overrides: `(pattern, policy)` pairs. A pattern is matched shell-style against the module or tree path
            (`"*/BatchNorm_*"`) and covers everything below it. The first match wins. The pattern
            `"<norm>"` covers every normalisation layer: by its class in a Flax or Equinox model (`...Norm`),
            by its name in a plain tree (`norm`, `LayerNorm_0`, `bn1`, `ln_f`, `rms`).
        reduce_dtype: Dtype in which gradients are summed across devices. `None` means float32, or float64 if
            `param_dtype` is float64. A half sum over many replicas loses small gradients, and float16 overflows.
            `autocast` sums in float32, or in the compute dtype if that is the `reduce_dtype`.
        override_dtypes: Whether `with_policy` overrides the explicit `dtype` of layers.
            By default such layers keep it.
        matmul_dtype: `"float8"` runs matmuls of a parameter and an activation in float8 (experimental; `autocast`
            only, with compute dtype bfloat16), `"mxfp8"` in float8 with a scale for each block of 32. `None` runs them
            in the compute dtype.

    Dtypes are normalised to `numpy.dtype`, so policies compare and hash by value for any spelling of the
    dtypes, and `get_policy(str(policy)) == policy`.

    Raises:
        ValueError: A dtype is not a real floating dtype, or an override is not a `(pattern, policy)` pair.

    Example:
        >>> import jax.numpy as jnp, numpy as np, mpjax
        >>> policy = mpjax.Policy("float32", "float16", "float32")
        >>> policy == mpjax.Policy(jnp.float32, np.dtype("float16"), jnp.float32)
        True
        >>> str(policy)
        'params=float32,compute=float16,output=float32'

    Source: `jmp.Policy` (DeepMind), with the per-path overrides of Keras's per-layer policies.
    """

    overrides: Sequence[tuple[str, Any]] = ()  # a tuple with policies from `__post_init__` on
    # Any when passed, a dtype after `__post_init__`.
    reduce_dtype: Any = None
    override_dtypes: bool = dataclasses.field(default=False, kw_only=True)
    matmul_dtype: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.reduce_dtype is None:
            object.__setattr__(self, "reduce_dtype", _default_reduce_dtype(self.param_dtype))
        for field in ("param_dtype", "compute_dtype", "output_dtype", "reduce_dtype"):
            object.__setattr__(self, field, _normalise_dtype(field, getattr(self, field)))
        object.__setattr__(self, "matmul_dtype", _normalise_matmul_dtype(self.matmul_dtype, self.compute_dtype))
        object.__setattr__(self, "overrides", _normalise_overrides(self.overrides))
        if not isinstance(self.override_dtypes, bool):
            raise ValueError(f"Policy(override_dtypes={self.override_dtypes!r}): give True or False.")

    def cast_to_param(self, x: T) -> T:
        """Casts the real floating leaves of a tree to the parameter dtype.

        Everything else passes through unchanged: integers, bools, complex, PRNG keys, float8 and
        int4 arrays, Python scalars, `None`, non-arrays. A leaf that already has the dtype is
        returned unchanged. NumPy arrays stay NumPy arrays, and a sharded array keeps its sharding.

        Args:
            x: Any pytree. Overrides are matched against its paths (`params/Dense_0/kernel`). An
                override pattern that matches none of them causes an `UnusedOverrideWarning`.

        Example:
            >>> half = get_policy("O3").cast_to_param({"w": np.ones(2, np.float32), "step": 3})
            >>> half["w"].dtype, half["step"]
            (dtype('float16'), 3)
        """
        return self._cast(x, "param_dtype")

    def cast_to_compute(self, x: T) -> T:
        """Casts the real floating leaves of a tree to the compute dtype (see `cast_to_param`).

        The tree may be a batch, which has none of the model's paths. An unused override pattern therefore causes a
        warning only if another one matches.
        """
        return self._cast(x, "compute_dtype")

    def cast_to_output(self, x: T) -> T:
        """Casts the real floating leaves of a tree to the output dtype (see `cast_to_compute`)."""
        return self._cast(x, "output_dtype")

    def for_path(self, path: str, owner: type | None = None) -> Policy:
        """Returns the policy at a module or tree path: that of the first matching override, else this one.

        Args:
            path: Path of a module, such as `Block_0/Dense_1`, or of a parameter.
            owner: Class of the module at the path, or of the one that holds the parameter, if known.

        Example:
            >>> get_policy("O2").for_path("Block_0/BatchNorm_1").param_dtype
            dtype('float32')
        """
        for pattern, policy in self.overrides:
            if path_matches(path, pattern, owner):
                return policy
        return self

    def without_overrides(self) -> Policy:
        """This policy for every path."""
        return dataclasses.replace(self, overrides=()) if self.overrides else self

    def with_output_dtype(self, output_dtype: Any) -> Policy:
        """This policy with another output dtype."""
        own = (self.param_dtype, self.compute_dtype, output_dtype, self.overrides, self.reduce_dtype)
        return Policy(*own, override_dtypes=self.override_dtypes, matmul_dtype=self.matmul_dtype)

    def stores_in_half(self, tree: T) -> T:
        """For each leaf of a tree, whether `cast_to_param` makes it half."""
        cast = jax.eval_shape(lambda tree: self._cast(tree, "param_dtype", reports=False), tree)
        return jax.tree.map(is_half, cast)

    def _cast(self, tree: T, field: str, reports: bool = True) -> T:
        if not self.overrides:
            dtype = getattr(self, field)
            return jax.tree.map(lambda x: _cast_leaf(x, dtype), tree)
        paths: list[str] = []

        def cast_below(above: tuple[Any, ...], tree: Any, owner: type | None) -> Any:
            def is_inner_module(x: Any) -> bool:
                return x is not tree and _is_module(x)

            def cast(path: tuple[Any, ...], x: Any) -> Any:
                if is_inner_module(x):
                    return cast_below(above + path, x, type(x))
                paths.append(path_string(above + path))
                return _cast_leaf(x, getattr(self.for_path(paths[-1], owner), field))

            return jax.tree_util.tree_map_with_path(cast, tree, is_leaf=is_inner_module)

        out = cast_below((), tree, type(tree) if _is_module(tree) else None)
        patterns = [pattern for pattern, _ in self.overrides if pattern != NORM]
        is_model = field == "param_dtype" or any(path_matches(path, pattern) for pattern in patterns for path in paths)
        if reports and is_model:
            warn_unused_overrides(self, paths)
        return out

    def __str__(self) -> str:
        format = format_of(self.matmul_dtype)
        matmul = "" if format is None else f",matmul={format.name}"
        own = f"params={self.param_dtype},compute={self.compute_dtype}{matmul},output={self.output_dtype}"
        if self.reduce_dtype != _default_reduce_dtype(self.param_dtype):
            own += f",reduce={self.reduce_dtype}"
        own += ",override_dtypes=true" if self.override_dtypes else ""
        rest = (f"{_quoted(pattern)}{_OVERRIDE_ARROW}{policy}" for pattern, policy in self.overrides)
        return _OVERRIDE_SEPARATOR.join((own, *rest))


def _quoted(pattern: str) -> str:
    """A pattern in a policy's string, in quotes if reading it back would change it."""
    return f'"{pattern}"' if _unquoted(pattern.strip()) != pattern else pattern


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 2 and text[0] == text[-1] == '"' else text


def warn_unused_overrides(policy: Policy, paths: Iterable[str]) -> None:
    """Warns about each override pattern that matches none of `paths`, to catch typos."""
    paths = [path for path in paths if path]  # without the whole model's
    for pattern, _ in policy.overrides:
        if pattern not in NORM_PATTERNS and not any(path_matches(path, pattern) for path in paths):
            shown = ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else "")
            warnings.warn(
                f"the policy's override pattern {pattern!r} matched nothing; the paths here are: "
                f"{shown or '(none)'}. Remove it or correct the pattern.",
                UnusedOverrideWarning,
                stacklevel=4,
            )


def _uniform(dtype: str) -> Policy:
    return Policy(dtype, dtype, dtype)


def get_policy(policy: str | jmp.Policy) -> Policy:
    """Parses a policy from its name or string.

    Args:
        policy: One of

            - a `Policy` (returned unchanged) or a `jmp.Policy`;
            - jmp's grammar: `"params=float32,compute=float16,output=float32"`, short
              `"p=f32,c=bf16"` (params default to float32, compute to params, output to compute), with
              `reduce=` or `r=` for gradients summed across devices (by default float32);
              the dtype `half` is bfloat16 on a TPU, else float16; `"p=f32,c=bf16,override_dtypes=true"` also takes
              over layers with an explicit dtype; `matmul=` or `m=` is float8 or mxfp8: `"p=f32,c=bf16,m=f8,o=f32"`;
            - Keras's names: `"mixed_float16"`, `"mixed_bfloat16"` (params and output float32);
            - `"mixed_float8"`, `"mixed_mxfp8"`: `"mixed_bfloat16"` with float8 matmuls (experimental), which have a
              scale for each tensor, or for each block of 32 elements;
            - Apex's levels: `"O0"` float32; `"O1"` = mixed_float16; `"O2"` half params and compute
              with float32 norm parameters (the override `<norm>`) and output; `"O3"` all float16;
            - the result of `str(policy)`, including overrides: `"p=f32,c=f16;*/head=>float32"`.

    Raises:
        ValueError: The policy is anything else. The message quotes it, and names the nearest policy or, for a string
            in jmp's grammar, what is wrong in it.

    Example:
        >>> import mpjax
        >>> mpjax.get_policy("mixed_bfloat16").compute_dtype
        dtype(bfloat16)
        >>> mpjax.get_policy("c=f16").output_dtype
        dtype('float16')
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, jmp.Policy):
        return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    if not isinstance(policy, str):
        raise _unknown_policy(policy)
    if policy in NAMED_POLICIES:
        return NAMED_POLICIES[policy]
    own, *rest = policy.split(_OVERRIDE_SEPARATOR)
    overrides = []
    for part in rest:
        pattern, arrow, name = part.partition(_OVERRIDE_ARROW)
        if not arrow:
            raise _bad_string(policy, f"{part!r} is not of the form pattern{_OVERRIDE_ARROW}policy")
        overrides.append((_unquoted(pattern.strip()), get_policy(name.strip())))
    parsed = NAMED_POLICIES.get(own.strip()) or _parse_dtypes(own, policy)
    # The string's own overrides come first: they are more specific than those of a named level.
    return dataclasses.replace(parsed, overrides=(*overrides, *parsed.overrides)) if overrides else parsed


def _parse_dtypes(text: str, policy: str) -> Policy:
    """Parses jmp's grammar, `key=dtype` pairs, or one dtype. A half dtype alone is that of a mixed policy."""
    if "=" not in text:
        name = text.strip()
        if name != "half" and name not in _DTYPE_NAMES:
            raise _unknown_policy(name)
        dtype = _parse_dtype(name, policy)
        return NAMED_POLICIES.get(f"mixed_{dtype}") or _uniform(dtype)
    given: dict[str, str] = {}
    override_dtypes: bool | None = None
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key == "override_dtypes" and override_dtypes is None and value in _FLAGS:
            override_dtypes = _FLAGS[value]
            continue
        key = _KEYS.get(key, key)
        if key not in _KEYS.values():
            raise _bad_string(policy, f"unknown key {key!r}")
        if key in given:
            raise _bad_string(policy, f"{key!r} is given twice")
        format = _matmul_format(value) if key == "matmul" else None
        given[key] = _parse_dtype(value, policy) if format is None else format.name
    params = given.get("params", "float32")
    compute = given.get("compute", params)
    own = (params, compute, given.get("output", compute))
    return Policy(
        *own,
        reduce_dtype=given.get("reduce"),
        override_dtypes=bool(override_dtypes),
        matmul_dtype=given.get("matmul"),
    )


def _parse_dtype(name: str, policy: str) -> str:
    if name == "half":
        return np.dtype(jmp.half_dtype()).name
    if name not in _DTYPE_NAMES:
        raise _bad_string(policy, f"unknown dtype {name!r}, give one of {', '.join(_DTYPE_NAMES)}, half")
    return _DTYPE_NAMES[name]


def _bad_string(policy: str, why: str) -> ValueError:
    return ValueError(
        f"get_policy({policy!r}): {why}. The grammar: 'params=DTYPE,compute=DTYPE,matmul={'|'.join(SCALED)},"
        "output=DTYPE,reduce=DTYPE' (short 'p=,c=,m=,o=,r='), or a name such as 'mixed_float16', which "
        "',override_dtypes=true' and ';PATTERN=>POLICY' may follow."
    )


def _unknown_policy(policy: Any) -> ValueError:
    near = _nearest(policy if isinstance(policy, str) else getattr(policy, "__name__", str(policy)))
    hint = f"did you mean {near!r}? The names are" if near else "give an mpjax or jmp Policy, or one of"
    return ValueError(f"get_policy({policy!r}): not a policy; {hint} {', '.join((*NAMED_POLICIES, 'float32'))}.")


# A dtype in any library's spelling: fp16, bf16-mixed, torch.float16, e4m3fn.
_SPELLINGS = (
    (r"u?int", None),
    (r"b(f|float|fp)_?16", "mixed_bfloat16"),
    (r"(?<!\d)16(?!\d)", "mixed_float16"),
    (r"mx", "mixed_mxfp8"),
    (r"(?<!\d)8(?!\d)|e\dm\d", "mixed_float8"),
    (r"64|double", "float64"),
    (r"32|single|full", "float32"),
)


def _nearest(name: str) -> str | None:
    """The policy that a name most likely stands for; None if it is like none."""
    for pattern, policy in _SPELLINGS:
        if re.search(pattern, name, re.IGNORECASE):
            return policy
    names = {known.lower(): known for known in (*NAMED_POLICIES, "float32", "half")}
    found = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return names[found[0]] if found else None


_MIXED_FLOAT16 = Policy("float32", "float16", "float32")
# Keras's names: https://keras.io/api/mixed_precision/policy.
# Apex's levels: https://nvidia.github.io/apex/amp.html#opt-levels; O2 keeps the parameters of
# normalisation layers in float32 ("keep_batchnorm_fp32") while their outputs are half.
NAMED_POLICIES = {
    "mixed_float16": _MIXED_FLOAT16,
    "mixed_bfloat16": Policy("float32", "bfloat16", "float32"),
    **{f"mixed_{x.name}": Policy("float32", x.compute, "float32", matmul_dtype=x.name) for x in SCALED.values()},
    "O0": _uniform("float32"),
    "O1": _MIXED_FLOAT16,
    "O2": Policy("float16", "float16", "float32", ((NORM, Policy("float32", "float16", "float16")),)),
    "O3": _uniform("float16"),
}
