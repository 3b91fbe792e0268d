"""Higher-order statements of random programs: a nested function, transformed and called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testing.random_programs.operations import Type
from testing.random_programs.writing import Scope, Writer

S, V, R, M = Type.SCALAR, Type.VECTOR, Type.ROWS, Type.MATRIX


def _arguments(writer: Writer, scope: Scope, max_count: int = 3) -> tuple[list[tuple[str, Type]], list[str]]:
    """Parameters of a nested function, and the variables passed as arguments."""
    taken = [writer.any_variable(scope) for _ in range(writer.choose(range(1, max_count + 1)))]
    return [(writer.name("a"), type_) for _, type_ in taken], [name for name, _ in taken]


def _call(writer: Writer, scope: Scope, decorator: str, closed: bool = False) -> None:
    arguments, operands = _arguments(writer, scope)
    name, types = writer.function(scope, arguments, closed=closed, decorators=(decorator,))
    writer.bind(scope, types, f"{name}({', '.join(operands)})")


def jit(writer: Writer, scope: Scope) -> None:
    """A nested jit, called once or twice."""
    arguments, operands = _arguments(writer, scope)
    option = writer.choose(("@jax.jit", "@partial(jax.jit, inline=True)", "@partial(jax.jit, keep_unused=True)"))
    name, types = writer.function(scope, arguments, decorators=(option,))
    writer.bind(scope, types, f"{name}({', '.join(operands)})")
    if writer.flag():
        again = [writer.variable(scope, type_) for _, type_ in arguments]
        writer.bind(scope, types, f"{name}({', '.join(again)})")


def remat(writer: Writer, scope: Scope) -> None:
    """A rematerialised function, with or without a policy."""
    policy = writer.choose(
        (
            "@jax.checkpoint",
            "@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)",
            "@partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)",
            "@partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)",
            "@partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names('kept'))",
            "@partial(jax.checkpoint, prevent_cse=False)",
        )
    )
    _call(writer, scope, policy)


def _carries(writer: Writer, scope: Scope, max_count: int = 3) -> tuple[list[tuple[str, Type]], list[str]]:
    arguments, operands = _arguments(writer, scope, max_count)
    # A weakly typed scalar cannot be carried, because the body's result is not weakly typed.
    return arguments, [
        f"jnp.float32({o})" if type_ is S else o for o, (_, type_) in zip(operands, arguments, strict=True)
    ]


_STACKED = {(V, 2): R, (V, 3): M, (S, 3): V}


def scan(writer: Writer, scope: Scope) -> None:
    """A scan: consts by closure, a counter that may be read, a carry, xs of length 0 to 3, ys."""
    carry, init = _carries(writer, scope)
    form = writer.choose(("rows", "none", "one", "empty", "matrix", "vector", "pair"))
    rows, element = writer.variable(scope, M if form == "matrix" else V if form == "vector" else R), V
    xs, length = {
        "rows": (rows, 2),
        "one": (f"{rows}[:1]", 1),
        "empty": (f"{rows}[:0]", 0),
        "matrix": (rows, 3),
        "vector": (rows, 3),
        "pair": (f"({rows}, {writer.variable(scope, R)})", 2),
    }.get(form, ("None", writer.choose((2, 1, 0))))
    element = S if form == "vector" else V
    names = [writer.name("x") for _ in range({"none": 0, "pair": 2}.get(form, 1))]
    count = writer.flag()
    unpack = [f"{', '.join(n for n, _ in carry)}, n = carry" if count else f"{', '.join(n for n, _ in carry)}, = carry"]
    if names:
        unpack.append(f"{', '.join(names)} = xs")
    results = tuple(type_ for _, type_ in carry)
    ys = tuple(writer.choose((V, S, M)) for _ in range(writer.choose((1, 0, 2))))
    body_name = writer.name("f")
    scope.add(f"def {body_name}(carry, xs):")
    inner = Scope([*scope.variables, *carry, *((n, element) for n in names)], scope.depth + 1, scope.lines, scope.axis)
    for line in unpack:
        inner.add(line)
    outs = [name for name, _ in writer.body(inner, (*results, *ys))]
    state = [f"jnp.float32({n})" if type_ is S else n for n, type_ in zip(outs, results, strict=False)]
    inner.add(
        f"return ({', '.join(state)}, {'n + 1' if count else ''}), ({', '.join(outs[len(state) :])}{',' if ys else ''})"
    )
    init = [*init, "n"] if count else init
    options = f", length={length}" + (", reverse=True" if writer.flag() else "")
    options += writer.choose(("", ", unroll=2"))
    kept, stacked = writer.name("c"), writer.name("y")
    scope.add(f"{kept}, {stacked} = lax.scan({body_name}, ({', '.join(init)},), {xs}{options})")
    for i, type_ in enumerate(results):
        writer.assign(scope, type_, f"{kept}[{i}]")
    for i, type_ in enumerate(ys):
        whole = _STACKED.get((type_, length))
        if whole is not None and writer.flag():
            writer.assign(scope, whole, f"{stacked}[{i}]")
        else:
            writer.assign(scope, type_, f"{stacked}[{i}].sum(0)")


def _loop_body(writer: Writer, scope: Scope, head: str, unpacked: str, carry: list[tuple[str, Type]]) -> str:
    """Writes a loop's body up to its results, which are returned."""
    scope.add(head)
    inner = Scope([*scope.variables, *carry], scope.depth + 1, scope.lines, scope.axis)
    inner.add(f"{unpacked}{', '.join(name for name, _ in carry)}, = carry")
    outs = writer.body(inner, tuple(type_ for _, type_ in carry))
    return ", ".join(f"jnp.float32({name})" if type_ is S else name for name, type_ in outs)


def fori_loop(writer: Writer, scope: Scope) -> None:
    """A counted loop; the counter may be read."""
    carry, init = _carries(writer, scope)
    body = writer.name("f")
    outs = _loop_body(writer, scope, f"def {body}(n, carry):", "", carry)
    scope.add(f"    return {outs},")
    bound = writer.choose(("2", "1", "0") if writer.reverse else ("2", "n % 3", "1", "0"))
    writer.bind(scope, [type_ for _, type_ in carry], f"lax.fori_loop(0, {bound}, {body}, ({', '.join(init)},))")


def while_loop(writer: Writer, scope: Scope) -> None:
    """A while loop with a counter and a condition that may read the carry."""
    carry, init = _carries(writer, scope)
    names = [n for n, _ in carry]
    counter = writer.name("i")
    test, body = writer.name("f"), writer.name("f")
    extra = writer.choose(("", f" & ({names[0]}.sum() < 100.0)", f" & (({names[0]} @ {names[0]}.T).sum() < 100.0)"))
    scope.add(f"def {test}(carry):")
    scope.add(f"    {counter}, {', '.join(names)}, = carry")
    scope.add(f"    return ({counter} < 2){extra if carry[0][1] is not S else ''}")
    outs = _loop_body(writer, scope, f"def {body}(carry):", f"{counter}, ", carry)
    scope.add(f"    return {counter} + 1, {outs}")
    types = [type_ for _, type_ in carry]
    writer.bind(scope, types, f"lax.while_loop({test}, {body}, (0, {', '.join(init)}))[1:]")


def _branches(writer: Writer, scope: Scope, count: int) -> tuple[list[str], list[Type], list[str]]:
    arguments, operands = _arguments(writer, scope)
    names, types = [], None
    for _ in range(count):
        fresh = [(writer.name("a"), type_) for _, type_ in arguments]
        name, found = writer.function(scope, fresh, None if types is None else tuple(types))
        names.append(name)
        types = types or found
    assert types is not None
    # A literal in one branch would be weakly typed, but an array in the other not.
    wrapped = [f"strong({name})" for name in names]
    return wrapped, types, operands


def cond(writer: Writer, scope: Scope) -> None:
    """Two branches, chosen by a value or by an argument."""
    (yes, no), types, operands = _branches(writer, scope, 2)
    test = writer.choose(("n > 0", f"{writer.variable(scope, V)}.sum() > 0", "n < 0"))
    writer.bind(scope, types, f"lax.cond({test}, {yes}, {no}, {', '.join(operands)})")


def switch(writer: Writer, scope: Scope) -> None:
    """One to three branches, chosen by an index."""
    names, types, operands = _branches(writer, scope, writer.choose((2, 3, 1)))
    writer.bind(scope, types, f"lax.switch(n, [{', '.join(names)}], {', '.join(operands)})")


def _with_rule(writer: Writer, scope: Scope, rule: str, options: tuple[str, ...], **modes: Any) -> None:
    """A function with a derivative rule that halves the derivative, to detect a lost rule."""
    arguments, operands = _arguments(writer, scope)
    name, types = writer.function(scope, arguments, closed=writer.choose((True, True, False)), **modes)
    option = writer.choose(("", *(f", {option}=True" for option in options)))
    first = "0.5, " if "static" in option else ""
    writer.bind(scope, types, f"{rule}({name}{option})({first}{', '.join(operands)})")


def custom_jvp(writer: Writer, scope: Scope) -> None:
    """A rule for both modes."""
    _with_rule(writer, scope, "halved_jvp", ("symbolic_zeros", "static"), forward=True)


def custom_vjp(writer: Writer, scope: Scope) -> None:
    """A rule for reverse mode."""
    _with_rule(writer, scope, "halved_vjp", ("keep_vjp", "symbolic_zeros", "static", "keep_shape"), reverse=True)


def vmap(writer: Writer, scope: Scope) -> None:
    """A mapped function of rows or of a matrix, along either axis, with or without an axis name."""
    whole = writer.choose((R, M))
    in_axis = writer.choose((0, 1)) if whole is M else 0
    mapped, operand = (writer.name("a"), V), writer.variable(scope, whole)
    others, operands = _arguments(writer, scope, 2)
    size = whole.value[in_axis]
    axis = writer.choose(("", writer.name("axis")))
    name, types = writer.function(scope, [mapped, *others], axis=axis or None)
    named = f", axis_name={axis!r}" if axis else ""
    in_axes = f"({in_axis}, {', '.join('None' for _ in others)})"
    result = writer.name("r")
    call = f"jax.vmap({name}, {in_axes}{named})"
    scope.add(f"{result} = {call}({', '.join([operand, *operands])})")
    for i, type_ in enumerate(types):
        stacked = _STACKED.get((type_, size))
        if stacked is not None and writer.flag():
            writer.assign(scope, stacked, f"{result}[{i}]")
        else:
            writer.assign(scope, type_, f"{result}[{i}]{writer.choose(('.sum(0)', '[0]'))}")


def grad(writer: Writer, scope: Scope) -> None:
    """A gradient inside the program."""
    arguments, operands = _arguments(writer, scope, 2)
    name, _ = writer.function(scope, arguments, (S,), returned="({})[0]", reverse=True)
    writer.assign(scope, arguments[0][1], f"jax.grad({name})({', '.join(operands)})")


def jvp(writer: Writer, scope: Scope) -> None:
    """A directional derivative inside the program."""
    arguments, operands = _arguments(writer, scope, 2)
    name, types = writer.function(scope, arguments, forward=True)
    tangents = [f"strong_like({writer.variable(scope, type_)})" for _, type_ in arguments]
    out = f"jax.jvp({name}, ({', '.join(operands)},), ({', '.join(tangents)},))[{writer.choose((1, 0))}]"
    writer.bind(scope, types, out)


def shard_map(writer: Writer, scope: Scope) -> None:
    """A function mapped over two devices: one operand is split, the others are replicated."""
    split = writer.any_variable(scope)
    others, operands = _arguments(writer, scope, 2)
    first = writer.name("a")
    name, types = writer.function(
        scope,
        [(first, split[1]), *others],
        unpack=(f"{first} = {first}[0]",),
        returned="stacked(({}))",
        closed=writer.explicit,  # JAX rejects closures over arrays with explicit shardings.
        axis="i",
    )
    specs = ", ".join("P()" for _ in others)
    checked = writer.choose(("", ", check_vma=False"))
    call = f"jax.shard_map({name}, mesh=MESH, in_specs=(P('i'), {specs}), out_specs=P('i'){checked})"
    result = writer.name("r")
    first, *rest = f"sharded(jnp.stack([{split[0]}, 0.5 * {split[0]}]))", *(f"replicated({name})" for name in operands)
    scope.add(f"{result} = jax.tree.map(replicated, {call}({', '.join([first, *rest])}))")
    for i, type_ in enumerate(types):
        writer.assign(scope, type_, f"{result}[{i}]{writer.choose(('.sum(0)', '[1]'))}")


def auto_axes(writer: Writer, scope: Scope) -> None:
    """A function whose arrays XLA shards, in a program whose arrays have explicit shardings."""
    arguments, operands = _arguments(writer, scope)
    name, types = writer.function(scope, arguments, closed=writer.explicit)
    writer.bind(scope, types, f"jax.sharding.auto_axes({name}, out_sharding=P())({', '.join(operands)})")


def linear_solve(writer: Writer, scope: Scope) -> None:
    """A linear solve whose operator is a function."""
    name, _ = writer.function(scope, [(writer.name("a"), V)], (V,), returned="({})[0]", forward=True, reverse=True)
    right, argument = writer.variable(scope, V), writer.variable(scope, V)
    scope.add(f"{name} = nearly_identity({name}, {argument})")
    writer.assign(scope, V, f"lax.custom_linear_solve({name}, {right}, solve_once, solve_once)")


def root(writer: Writer, scope: Scope) -> None:
    """A root of a function near the identity, differentiated implicitly."""
    name, _ = writer.function(scope, [(writer.name("a"), V)], (V,), returned="({})[0]", forward=True, reverse=True)
    writer.assign(scope, V, f"root_near({writer.variable(scope, V)}, {name})")


def region(writer: Writer, scope: Scope) -> None:
    """A function whose dtypes the user fixes, or a nested autocast."""
    decorator = writer.choose(
        (
            "@mpjax.autocast",
            "@mpjax.float_function",
            "@mpjax.promote_function",
            "@without_autocast",
            "@mpjax.half_function",
        )
    )
    writer.used.append(decorator)
    _call(writer, scope, decorator)


def linearize(writer: Writer, scope: Scope) -> None:
    """A linearised function, called at two tangents; or a pullback."""
    arguments, operands = _arguments(writer, scope, 2)
    name, types = writer.function(scope, arguments, forward=True, reverse=True)
    tangents = ", ".join(f"strong_like({writer.variable(scope, type_)})" for _, type_ in arguments)
    linear = writer.name("linear")
    scope.add(f"{linear} = jax.linearize({name}, {', '.join(operands)})[1]")
    writer.bind(scope, types, f"{linear}({tangents})")


HIGHER_ORDER: dict[str, Callable[[Writer, Scope], None]] = {
    fun.__name__: fun
    for fun in (
        jit,
        scan,
        remat,
        cond,
        custom_vjp,
        custom_jvp,
        fori_loop,
        vmap,
        switch,
        grad,
        jvp,
        shard_map,
        auto_axes,
        while_loop,
        linearize,
        linear_solve,
        root,
        region,
    )
}
