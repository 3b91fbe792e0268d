"""The instructions of a compiled program: module path, source line, kind of work."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from mpjax._jaxpr.primitives import MATMULS
from mpjax._jaxpr.source import MARK, informative_frame, split_scopes
from mpjax.inspection.profile.hlo_text import HloModule, Line

MATMUL, CONVOLUTION, ATTENTION, COLLECTIVE = "matmul", "convolution", "attention", "collective"
CAST, COPY, REDUCTION, ELEMENTWISE = "cast", "copy", "reduction", "elementwise"
CONTROL, CALLBACK, OTHER = "loop or branch", "host callback", "other"

# Work that can use Tensor Cores, and work that is memory-bound in every dtype.
ON_TENSOR_CORES = frozenset({MATMUL, CONVOLUTION, ATTENTION})
MEMORY_BOUND = frozenset({COPY, REDUCTION, ELEMENTWISE})

_TARGETS = (  # Parts of custom call targets of XLA's GPU and CPU backends; the first match decides.
    (ATTENTION, ("fmha", "attention", "sdpa")),
    (CONVOLUTION, ("conv",)),
    (MATMUL, ("cublas", "gemm", "matmul", "dot")),
)
_NOTHING = frozenset("parameter constant bitcast tuple get-tuple-element iota broadcast reshape".split())
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-", "send", "recv")
_OPCODES = {
    MATMUL: "dot scaled-dot ragged-dot",
    CONVOLUTION: "convolution",
    CONTROL: "while conditional call",
    REDUCTION: "reduce reduce-window select-and-scatter",
    COPY: "copy copy-start copy-done transpose slice dynamic-slice dynamic-update-slice concatenate pad reverse",
    CAST: "convert",
    OTHER: "sort scatter gather fft cholesky triangular-solve rng rng-bit-generator",
}
_KINDS = {opcode: kind for kind, opcodes in _OPCODES.items() for opcode in opcodes.split()}  # elementwise: all others
_NEAR = 5  # The maximum distance to a named consumer; a step into a fusion counts.


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program that runs as its own kernel. The defaults describe an unknown one.

    Args:
        name: Unique name in the program, as `fusion.3`.
        kind: The kind of work, from the opcodes of all operations fused into it.
        module: Module path, from named scopes.
        source: The user's line, `file.py:12`.
        path: The file of the innermost frame, mpjax's own files included.
        backward: Whether it belongs to the transposed part of a gradient.
        dtypes: The floating dtypes that its matmuls and convolutions read, in HLO's names (`f16`, `bf16`, `f32`).
        shapes: Operands of the matmul or convolution, as `f32[8,16]`; empty for other kinds.
        exact: Whether full float32 precision was requested (`precision="highest"`), which rules out TF32.
        triton: Whether XLA's Triton backend generates it.
        differentiated: Whether it belongs to a differentiated function or to its gradient.
    """

    name: str = ""
    kind: str = OTHER
    module: str = ""
    source: str = ""
    path: str = ""
    backward: bool = False
    dtypes: frozenset[str] = frozenset()
    shapes: tuple[str, ...] = ()
    exact: bool = False
    triton: bool = False
    differentiated: bool = False


def instructions(program: HloModule) -> dict[str, Instruction]:
    """The instructions of a program by name."""
    return {
        line.name: _instruction(program, computation, line)
        for computation, lines in program.computations.items()
        for line in lines.values()
    }


def module_path(op_name: str) -> str:
    """The module path in an `op_name` of HLO's metadata, without transformations and the primitive.

    Example:
        >>> module_path("jit(step)/transpose(jvp(ResNet))/Block_0/while/body/Conv_0/conv_general_dilated")
        'ResNet/Block_0/Conv_0'
    """
    found: list[str] = []
    for part in split_scopes(op_name)[:-1]:
        scopes = _scopes(part)
        if "jvp(" in part and scopes and found[:1] == scopes:
            found = []  # The backward pass of a remat repeats the whole path.
        found += scopes
    return "/".join(found)


# Parts of a name that JAX adds for its own structure. All other parts are the user's named scopes.
_STRUCTURE = re.compile(
    r"while|body|cond|scan|closed_call|core_call|eval_jaxpr|remat\d?|checkpoint|rematted_computation|branch_\d+_fun"
    r"|custom_[jv][vj]p_call(_jaxpr)?|pjit|shard_map|shmap_body|pmap|xla_pmap|"
)
_TRANSFORMATION = re.compile(r"(\w+)\((.*)\)")


def _scopes(part: str) -> list[str]:
    found = _TRANSFORMATION.fullmatch(part)
    if found:
        return [] if found[1] in ("jit", "pjit") else [s for inner in split_scopes(found[2]) for s in _scopes(inner)]
    return [] if _STRUCTURE.fullmatch(part) or part.startswith(MARK) else [part]


def _instruction(program: HloModule, computation: str, line: Line) -> Instruction:
    parts = [(line, program.computations[computation]), *program.inside(line)]
    kinds = [_own_kind(part) for part, _ in parts]
    # A fusion has the metadata of its last operation, but its matmul is more informative.
    matmul = next((part for part, kind in zip(parts, kinds, strict=True) if kind in ON_TENSOR_CORES), None)
    named = next((part for part, _ in ([matmul] if matmul else []) + parts if part.op_name), None)
    if named is None:
        named = _named_by_readers(program, computation, line, bool(matmul)) or line
    module = module_path(named.op_name)
    places = program.places(named)
    which = informative_frame([path for path, _ in places], in_layer=bool(module))
    shapes = tuple(_shapes(*matmul)) if matmul else ()
    return Instruction(
        name=line.name,
        kind=_kind(kinds, [part for part, _ in parts]),
        module=module,
        source="" if which is None else f"{places[which][0].rsplit('/', 1)[-1]}:{places[which][1]}",
        path=places[0][0] if places else "",
        backward="transpose(" in named.op_name,
        dtypes=frozenset(shape.split("[")[0] for shape in shapes),
        shapes=shapes,
        exact=bool(matmul and re.search(r"highest|dot_f32_f32_f32\b", matmul[0].attributes.lower())),
        triton="__triton" in line.attributes,
        differentiated="jvp(" in named.op_name,
    )


def _named_by_readers(program: HloModule, computation: str, line: Line, matmul: bool) -> Line | None:
    """The nearest named consumer. XLA's rewrites lose some names, such as those of convolutions' gradients."""
    named = [reader for reader in program.readers(computation, line, _NEAR) if reader.op_name]
    alike = [reader for reader in named if matmul and reader.op_name.rpartition("/")[2] in MATMULS]
    return next(iter(alike or named), None)


def _shapes(line: Line, siblings: Mapping[str, Line]) -> Iterator[str]:
    for operand in line.operands[:2]:
        if operand in siblings and "[" in siblings[operand].type:
            yield siblings[operand].type.partition("{")[0]


def _own_kind(line: Line) -> str:
    if line.opcode == "custom-call":
        target = line.attribute(r'custom_call_target="([^"]*)"').lower()
        if "python" in target and "callback" in target:
            return CALLBACK
        return next((kind for kind, parts in _TARGETS if any(part in target for part in parts)), OTHER)
    if line.opcode.startswith(_COLLECTIVES):
        return COLLECTIVE
    return _KINDS.get(line.opcode, ELEMENTWISE)


def _kind(kinds: list[str], lines: list[Line]) -> str:
    """The kind of a kernel: the heaviest kind of its parts, except parts that do no work."""
    parts = {k for k, line in zip(kinds, lines, strict=True) if line.opcode not in _NOTHING and not line.is_fusion}
    order = (CALLBACK, CONVOLUTION, MATMUL, ATTENTION, COLLECTIVE, CONTROL, OTHER, REDUCTION, ELEMENTWISE, CAST, COPY)
    return next((kind for kind in order if kind in parts), COPY)
