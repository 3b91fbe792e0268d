"""The text of a compiled program (optimized HLO), and its instructions: module path, source line, kind of work."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from mpjax.program.source import informative_frame, path_of, split_scopes, without_einsums

# By name: XLA's opcodes.

Place = tuple[str, str]  # file and line


@dataclasses.dataclass(frozen=True)
class Line:
    """An instruction of the text."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    called: tuple[str, ...]
    number: int = 0  # The number of a parameter, or the value of an integer constant.

    def attribute(self, pattern: str) -> str:
        return _found(pattern, self.attributes)

    @property
    def is_fusion(self) -> bool:
        """Whether it is a fusion. XLA's GPU backend starts some asynchronously."""
        return self.opcode in ("fusion", "fusion-start")

    @property
    def op_name(self) -> str:
        """JAX's name of the instruction: scopes and primitive. For merged instructions, the first name."""
        return self.attribute(r'op_name="([^";]*)')


def _found(pattern: str, text: str) -> str:
    """The first group of a pattern in a text; empty if the pattern is not there."""
    match = re.search(pattern, text)
    return match[1] if match else ""


def sizes(type: str) -> list[tuple[str, int]]:
    """The dtype, in JAX's names, and the bytes of each array of a type.

    Example:
        >>> sizes("(bf16[8,4]{1,0}, pred[3]{0})")
        [('bfloat16', 64), ('bool', 3)]
    """
    found = []
    for kind, bits, rest, shape in _SHAPE.findall(type):
        count = math.prod(int(size) for size in shape.split(",") if size)
        dtype = _KINDS_OF_DTYPES[kind] + bits + rest.replace("e", "_e", 1)  # f4e2m1fn is float4_e2m1fn
        found.append((dtype if bits else "bool", count * int(bits or 8) // 8))
    return found


_KINDS_OF_DTYPES = {"s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex", "": ""}
_SHAPE = re.compile(r"\b(?:pred|(bf|[sufc])(\d+)((?:e\dm\d\w*)?))\[([\d,]*)\]")


class HloModule:
    """A compiled program.

    Args:
        text: The output of `jax.stages.Compiled.as_text`.

    Attributes:
        name: The program's name in traces, as `jit_step`.
        computations: For each computation by name, its lines by name. A fusion calls one computation, a loop two.
        entry: Name of the entry computation.
    """

    def __init__(self, text: str):
        self.name = _found(r"\AHloModule ([\w.\-]+)", text)
        self.computations = dict(_computations(text))
        self.entry = _found(r"(?m)^ENTRY %?([\w.\-]+)", text)
        self._frames = _frames(text)

    def inside(self, line: Line) -> Iterator[tuple[Line, Mapping[str, Line]]]:
        """The lines of a fusion's computation, root first, each with all lines of its computation."""
        for name in line.called if line.is_fusion else ():
            lines = self.computations.get(name, {})
            for inner in reversed(list(lines.values())):
                yield inner, lines
                yield from self.inside(inner)

    def named(self, line: Line) -> Line:
        """A line with a name in the program: of a fusion without one, such as of a cast that XLA made, its last one."""
        return next((each for each in (line, *(inner for inner, _ in self.inside(line))) if each.op_name), line)

    def places(self, line: Line) -> list[Place]:
        """The traceback of a line, innermost frame first."""
        return self._frames.get(line.attribute(r"stack_frame_id=(\d+)"), [])


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|[^\s(]\S*) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")


def _computations(text: str) -> Iterator[tuple[str, dict[str, Line]]]:
    name, lines = "", dict[str, Line]()
    for row in text.splitlines():
        if not name:
            start = _COMPUTATION.match(row)
            name, lines = (start[1] if start else ""), {}
        elif row.startswith("}"):
            yield name, lines
            name = ""
        elif found := _INSTRUCTION.match(row):
            operands, attributes = _arguments(found[4])
            branches = _found(r"\bbranch_computations=\{([^}]*)\}", attributes)
            called = [*_CALLED.findall(attributes), *re.findall(r"[\w.\-]+", branches)]
            number = int(_found(r"\A(-?\d+)\)", found[4]) or 0)
            lines[found[1]] = Line(found[1], found[2], found[3], operands, attributes, tuple(called), number)


def _arguments(rest: str) -> tuple[tuple[str, ...], str]:
    """The operands' names, and the text after the closing parenthesis."""
    depth = 1
    for end, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if not depth:
            return tuple(re.findall(r"%([\w.\-]+)", rest[:end])), rest[end + 1 :]
    return (), rest


def _frames(text: str) -> dict[str, list[Place]]:
    """The tracebacks, innermost frame first, by frame number. They are at the head of the program's text."""
    tables = {name: dict(re.findall(r"(?m)^(\d+) (.*)$", rows)) for name, rows in _TABLE.findall(text)}
    files, locations, frames = (tables.get(name, {}) for name in ("FileNames", "FileLocations", "StackFrames"))
    parents = {frame: _found(r"\bparent_frame_id=(\d+)", fields) for frame, fields in frames.items()}
    # XLA prints the outermost frame as its own parent if its parent numbers are one too high.
    shift = any(frame == parent for frame, parent in parents.items())
    chains: dict[str, list[Place]] = {}
    for frame in sorted(frames, key=int):  # A frame follows its parents.
        location = locations.get(_found(r"\bfile_location_id=(\d+)", frames[frame]), "")
        file = files.get(_found(r"\bfile_name_id=(\d+)", location), "").strip('"')
        parent = str(int(parents[frame] or 0) - shift)
        chains[frame] = [(file, _found(r"\bline=(\d+)", location)), *chains.get(parent, ())]
    return chains


_TABLE = re.compile(r"(?m)^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)")
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
    exact: bool = False
    triton: bool = False
    differentiated: bool = False


UNKNOWN = Instruction()


def instructions(program: HloModule) -> dict[str, Instruction]:
    """The instructions of a program by name, without those inside of fusions, which are no kernels of their own."""
    every = [line for lines in program.computations.values() for line in lines.values()]
    inside = {name for line in every if line.is_fusion for name in line.called}
    return {
        line.name: _instruction(program, computation, line)
        for computation, lines in program.computations.items()
        if computation not in inside
        for line in lines.values()
    }


def module_path(op_name: str) -> str:
    """The module path in an `op_name` of HLO's metadata, without transformations and the primitive.

    Example:
        >>> module_path("jit(step)/transpose(jvp(ResNet))/Block_0/while/body/Conv_0/conv_general_dilated")
        'ResNet/Block_0/Conv_0'
    """
    parts = split_scopes(_STRUCTURE.sub("", op_name))[:-1]
    return without_einsums(path_of("/".join(filter(None, parts))))


# Parts of a name that JAX and mpjax add for their own structure. All other parts are the user's named scopes.
_STRUCTURE = re.compile(
    r"(?<![^/(])(while|body|cond|scan|closed_call|core_call|eval_jaxpr|remat\d?|checkpoint|rematted_computation"
    r"|branch_\d+_fun|custom_[jv][vj]p_call(_jaxpr)?|p?jit\([^()]*\)|pjit|shard_map|shmap_body|pmap|xla_pmap"
    r"|mpjax\.\w*)(?![^/)])"
)


def _instruction(program: HloModule, computation: str, line: Line) -> Instruction:
    parts = [(line, program.computations[computation]), *program.inside(line)]
    kinds = [_own_kind(part) for part, _ in parts]
    # A fusion has the metadata of its last operation, but its matmul is more informative.
    matmul = next((part for part, kind in zip(parts, kinds, strict=True) if kind in ON_TENSOR_CORES), None)
    named = matmul[0] if matmul and matmul[0].op_name else program.named(line)
    module = module_path(named.op_name)
    places = program.places(named)
    which = informative_frame([path for path, _ in places])
    types = [matmul[1][name].type for name in matmul[0].operands[:2] if name in matmul[1]] if matmul else []
    return Instruction(
        name=line.name,
        kind=_kind(kinds, [part for part, _ in parts]),
        module=module,
        source="" if which is None else f"{places[which][0].rsplit('/', 1)[-1]}:{places[which][1]}",
        path=places[0][0] if places else "",
        backward="transpose(" in named.op_name,
        dtypes=frozenset(type_.partition("[")[0] for type_ in types if "[" in type_),
        exact=bool(matmul and re.search(r"highest|dot_f32_f32_f32\b", matmul[0].attributes.lower())),
        triton="__triton" in line.attributes,
        differentiated="jvp(" in named.op_name,
    )


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


# The trip counts of compiled loops.


def iterations(program: HloModule, loop: Line, siblings: Mapping[str, Line]) -> int:
    """The trip count of a loop; 1 if it is unknown.

    XLA for TPUs prints none. There the loop's counter tells it, if it starts and ends at constants.

    Args:
        program: The program.
        loop: A line with opcode `while`.
        siblings: The lines of its computation.

    Example:
        >>> program = HloModule('''HloModule jit_step
        ... %test (p: (s32[], f32[4])) -> pred[] {
        ...   %p = (s32[], f32[4]) parameter(0)
        ...   %i = s32[] get-tuple-element(%p), index=0
        ...   %end = s32[] constant(11)
        ...   ROOT %less = pred[] compare(%i, %end), direction=LT
        ... }
        ... %step (q: (s32[], f32[4])) -> (s32[], f32[4]) {
        ...   %q = (s32[], f32[4]) parameter(0)
        ...   %j = s32[] get-tuple-element(%q), index=0
        ...   %x = f32[4] get-tuple-element(%q), index=1
        ...   %two = s32[] constant(2)
        ...   %next = s32[] add(%j, %two)
        ...   ROOT %both = (s32[], f32[4]) tuple(%next, %x)
        ... }
        ... ENTRY %main (y: f32[4]) -> (s32[], f32[4]) {
        ...   %y = f32[4] parameter(0)
        ...   %start = s32[] constant(1)
        ...   %counter = s32[] copy(%start)
        ...   %all = (s32[], f32[4]) tuple(%counter, %y)
        ...   ROOT %loop = (s32[], f32[4]) while(%all), condition=%test, body=%step
        ... }''')
        >>> lines = program.computations["main"]
        >>> iterations(program, lines["loop"], lines)
        5
    """
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    try:
        return _counted(program, loop, siblings)
    except (LookupError, ValueError):
        return 1


def _counted(program: HloModule, loop: Line, siblings: Mapping[str, Line]) -> int:
    """The trips of a loop of the form `while counter < end: counter += step`; `LookupError` for any other."""
    condition, body = (
        program.computations[loop.attribute(rf"\b{name}=%?([\w.\-]+)")] for name in ("condition", "body")
    )
    test, results = (list(lines.values())[-1] for lines in (condition, body))  # XLA prints the root last.
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        raise LookupError(test.name)
    place = _place(condition, test.operands[0])
    start = _integer(siblings, _origin(siblings, loop.operands[0]).operands[place])
    update = _origin(body, results.operands[place])
    if update.opcode != "add" or _place(body, update.operands[0]) != place:
        raise LookupError(update.name)
    return len(range(start, _integer(condition, test.operands[1]), _integer(body, update.operands[1])))


def _origin(lines: Mapping[str, Line], name: str) -> Line:
    """The line whose value this is, before copies."""
    line = lines[name]
    return _origin(lines, line.operands[0]) if line.opcode in ("copy", "bitcast") else line


def _place(lines: Mapping[str, Line], name: str) -> int:
    """The position of a value in the loop's state; `ValueError` if it is no part of it."""
    return int(_origin(lines, name).attribute(r"\bindex=(\d+)"))


def _integer(lines: Mapping[str, Line], name: str) -> int:
    line = _origin(lines, name)
    if line.opcode != "constant" or not re.match(r"[su]\d+\[\]", line.type):
        raise LookupError(name)
    return line.number
