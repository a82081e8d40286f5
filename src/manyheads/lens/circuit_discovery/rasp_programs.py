"""RASP programs as matrices: Tracr compiles them (arXiv 2301.05062), without jax."""

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise, product
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError, MissingPackageError

Value = Hashable
Matrix = Float[np.ndarray, "_ _"]
BEGIN, PAD = "compiler_bos", "compiler_pad"
# A step of an MLP must be over within half the distance of two values; floats differ by rounding.
MARGIN, ROUNDING = 2.2, 1e-9
# tracr-pypi requires jax too, which is not used here, and the others require nothing.
PACKAGES = ("tracr-pypi", "absl-py", "networkx")


def tracr(module: str) -> Any:
    """A module of Tracr, such as "rasp.rasp" or "compiler.lib".

    The package `tracr.compiler` imports jax for a function that is not used here; where jax is
    missing, a stub takes its place.
    """
    if module.startswith("compiler") and find_spec("haiku") is None:
        stub = ModuleType("tracr.compiler.compiling")
        vars(stub)["compile_rasp_to_model"] = None
        sys.modules.setdefault(stub.__name__, stub)
    try:
        return import_module(f"tracr.{module}")
    except ImportError:
        options = ("--no-deps",)
        raise MissingPackageError("compiling RASP", *PACKAGES, options=options) from None


@dataclass(frozen=True, slots=True, eq=False)
class BilinearHead:
    """An attention head: score = x qk y, output = x ov, in the basis of the residual stream."""

    qk: Matrix
    ov: Matrix


@dataclass(frozen=True, slots=True, eq=False)
class ReluLayer:
    """relu(x expand) contract."""

    expand: Matrix
    contract: Matrix


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ProgramWeights:
    """A compiled program: each direction of the residual stream has one meaning.

    `tokens` and `outputs` are the values of the rows of `embed` and of the columns of `unembed`; a
    numerical program has `outputs=None` and one column.
    """

    tokens: tuple[Value, ...]
    outputs: tuple[Value, ...] | None
    embed: Matrix
    positions: Matrix
    layers: tuple[tuple[tuple[BilinearHead, ...], ReluLayer | None], ...]
    unembed: Matrix


@dataclass(frozen=True, slots=True)
class LibraryProgram:
    """A program with the vocabulary and the longest input that it is compiled for."""

    name: str
    program: Any
    vocabulary: tuple[Value, ...]
    max_length: int
    causal: bool = False


def library_programs() -> tuple[LibraryProgram, ...]:
    """The programs of Tracr's library."""
    lib, rasp = tracr("compiler.lib"), tracr("rasp.rasp")
    tokens, letters, numbers = rasp.tokens, tuple("abcd"), (1, 2, 3, 4)
    pairs = ("(", ")", "{", "}")
    sums = lib.make_nary_sequencemap(lambda x, y, z: x + y - z, tokens, rasp.indices, tokens == 2)
    return (
        LibraryProgram("length", rasp.categorical(lib.make_length()), letters, 6),
        LibraryProgram("reverse", lib.make_reverse(tokens), letters, 6),
        LibraryProgram("frac_prevs", lib.make_frac_prevs(tokens == "a"), letters, 6),
        LibraryProgram("frac_prevs causal", lib.make_frac_prevs(tokens == "a"), letters, 6, True),
        LibraryProgram("shift_by", lib.shift_by(2, tokens), letters, 6),
        LibraryProgram("detect_pattern", lib.detect_pattern(tokens, "abc"), tuple("abc"), 6),
        LibraryProgram("pair_balance", lib.make_pair_balance(tokens, "(", ")"), pairs, 6),
        LibraryProgram("shuffle_dyck", lib.make_shuffle_dyck(["()"]), ("(", ")", "a"), 6),
        LibraryProgram("shuffle_dyck2", lib.make_shuffle_dyck2(), pairs, 6),
        LibraryProgram("hist", lib.make_hist(), letters, 6),
        LibraryProgram("sort_unique", lib.make_sort_unique(tokens, tokens), (1, 2, 3, 4, 5), 5),
        LibraryProgram("sort", lib.make_sort(tokens, tokens, max_seq_len=5, min_key=1), numbers, 5),
        LibraryProgram("sort_freq", lib.make_sort_freq(max_seq_len=5), tuple("abc"), 5),
        LibraryProgram("count_less_freq", lib.make_count_less_freq(2), letters, 6),
        LibraryProgram("count", lib.make_count(tokens, "a"), letters, 6),
        LibraryProgram("nary_sequencemap", sums, (1, 2, 3), 5),
    )


def compile_program(program: Any, vocabulary: Sequence[Value], max_length: int) -> ProgramWeights:
    """The weights that Tracr gives a RASP program."""
    rasp, nodes, bases = tracr("rasp.rasp"), tracr("compiler.nodes"), tracr("craft.bases")
    begin = bases.BasisDirection(rasp.tokens.label, BEGIN)
    try:
        if problems := tracr("compiler.validating").static_validate(program):
            raise NotImplementedError("; ".join(problem.reason for problem in problems))
        if not program.children:
            raise NotImplementedError("it computes nothing")
        extracted = tracr("compiler.rasp_to_graph").extract_rasp_graph(program)
        graph = extracted.graph
        tracr("compiler.basis_inference").infer_bases(
            graph, extracted.sink, set(vocabulary), max_length
        )
        exactness = max(100.0, MARGIN / _complete_values(graph, max_length))
        tracr("compiler.expr_to_craft_graph").add_craft_components_to_rasp_graph(
            graph, bos_dir=begin, mlp_exactness=exactness
        )
        _allow_negative_values(graph)
        crafted = tracr("compiler.craft_graph_to_model").craft_graph_to_model(
            graph, extracted.sources
        )
    except Exception as error:
        # Tracr raises whatever its passes run into; its words say which expression it was.
        raise InputError(
            f"Tracr cannot compile this program: {error}",
            "use categorical selectors and defaults that it supports (tracr.compiler.validating)",
        ) from error
    space = bases.VectorSpaceWithBasis
    names = space.from_values(rasp.tokens.label, {*vocabulary, BEGIN, PAD})
    indices = space.from_values(rasp.indices.label, range(max_length))
    output = space(extracted.sink[nodes.OUTPUT_BASIS])
    stream = bases.join_vector_spaces(crafted.residual_space, names, indices, output)
    place = {direction: number for number, direction in enumerate(stream.basis)}

    def within(directions: Sequence[Any]) -> Matrix:
        """The directions as rows."""
        rows = np.zeros((len(directions), len(place)))
        rows[np.arange(len(directions)), [place[direction] for direction in directions]] = 1
        return rows

    embed = within(names.basis)
    if (constant := bases.BasisDirection("one")) in place:
        embed[:, place[constant]] = 1
    values = tuple(direction.value for direction in output.basis)
    return ProgramWeights(
        tokens=tuple(direction.value for direction in names.basis),
        outputs=values if rasp.is_categorical(extracted.sink[nodes.EXPR]) else None,
        embed=embed,
        # The first token is the mark of the beginning, which has no index.
        positions=np.concatenate((np.zeros((1, len(place))), within(indices.basis))),
        layers=tuple(_layers(crafted.blocks, within)),
        unembed=within(output.basis).T,
    )


def _complete_values(graph: Any, max_length: int) -> float:
    """Add the values that Tracr leaves out, and return the smallest distance to tell apart.

    Of the means of zeros and ones it lists 1/n alone, and not 2/3, so that maps of them round
    wrongly. With its own exactness of 100 the widths of selectors become wrong from 10 tokens on.
    """
    rasp, nodes, bases = tracr("rasp.rasp"), tracr("compiler.nodes"), tracr("craft.bases")
    try_on = tracr("utils.errors").ignoring_arithmetic_errors
    gap = 1.0
    for name in import_module("networkx").topological_sort(graph):
        node, expression = graph.nodes[name], graph.nodes[name][nodes.EXPR]
        inputs = [graph.nodes[child.label].get(nodes.VALUE_SET) for child in expression.children]
        if isinstance(expression, rasp.SelectorWidth):
            gap = min(gap, 1 / (max_length * (max_length + 1)))
        if isinstance(expression, rasp.Map) and rasp.is_numerical(expression.inner):
            function = try_on(expression.f)
            steps = [
                high - low
                for low, high in pairwise(sorted(inputs[0]))
                if function(low) != function(high) and high - low > ROUNDING
            ]
            gap = min([gap, *steps])
        if isinstance(expression, rasp.Map | rasp.SequenceMap):
            results = (try_on(expression.f)(*values) for values in product(*inputs))
            values = {result for result in results if result is not None}
        elif isinstance(expression, rasp.Aggregate):
            values = graph.nodes[expression.sop.label][nodes.VALUE_SET]
            if rasp.is_numerical(expression) and values <= {0, 1}:
                lengths = range(1, max_length + 1)
                values = {count / length for length in lengths for count in range(length + 1)}
        else:
            continue
        if values > node[nodes.VALUE_SET]:
            node[nodes.VALUE_SET] = values
            if rasp.is_categorical(expression):
                space = bases.VectorSpaceWithBasis.from_values(expression.label, values)
                node[nodes.OUTPUT_BASIS] = space.basis
    return gap


def _allow_negative_values(graph: Any) -> None:
    """Look numbers up behind the activation, which would cut negative ones to zero."""
    rasp, nodes, bases = tracr("rasp.rasp"), tracr("compiler.nodes"), tracr("craft.bases")
    linear, space = tracr("craft.vectorspace_fns").Linear.from_action, bases.VectorSpaceWithBasis
    for node in graph.nodes.values():
        expression = node[nodes.EXPR]
        if not isinstance(expression, rasp.Map) or not rasp.is_numerical(expression):
            continue
        if not rasp.is_categorical(expression.inner) or min(node[nodes.VALUE_SET], default=0) >= 0:
            continue
        inner, output = (
            space(basis)
            for basis in (
                graph.nodes[expression.inner.label][nodes.OUTPUT_BASIS],
                node[nodes.OUTPUT_BASIS],
            )
        )
        hidden = space.from_values(
            f"_hidden_{expression.label}_", [direction.value for direction in inner.basis]
        )

        def copied(direction: Any, hidden: Any = hidden) -> Any:
            own = bases.BasisDirection(hidden.basis[0].name, direction.value)
            return hidden.vector_from_basis_direction(own)

        def looked_up(direction: Any, output: Any = output, function: Any = expression.f) -> Any:
            unit = output.vector_from_basis_direction(output.basis[0])
            return function(direction.value) * unit

        node[nodes.MODEL_BLOCK] = tracr("craft.transformers").MLP(
            linear(inner, hidden, copied), linear(hidden, output, looked_up)
        )


def _layers(
    blocks: Sequence[Any], within: Callable[[Sequence[Any]], Matrix]
) -> Iterator[tuple[tuple[BilinearHead, ...], ReluLayer | None]]:
    """Pairs of attention and feed-forward, one of which may be missing."""
    transformers = tracr("craft.transformers")
    heads: tuple[BilinearHead, ...] = ()
    for number, block in enumerate(blocks):
        if isinstance(block, transformers.MLP):
            expand = within(block.fst.input_space.basis).T @ block.fst.matrix
            contract = block.snd.matrix @ within(block.snd.output_space.basis)
            used = contract.any(1)
            yield heads, ReluLayer(expand[:, used], contract[used])
            heads = ()
            continue
        heads = tuple(
            BilinearHead(
                within(head.w_qk.left_space.basis).T
                @ head.w_qk.matrix
                @ within(head.w_qk.right_space.basis),
                within(head.w_ov.input_space.basis).T
                @ head.w_ov.matrix
                @ within(head.w_ov.output_space.basis),
            )
            for head in block.as_multi().heads()
        )
        follower = blocks[number + 1] if number + 1 < len(blocks) else None
        if not isinstance(follower, transformers.MLP):
            yield heads, None
            heads = ()


def evaluate(program: Any, values: Sequence[Value], *, causal: bool = False) -> list[Any] | None:
    """What a program says of an input; None where its compiled model cannot say it.

    That is an input on which the program fails, or a categorical mean of different values.
    """
    rasp = tracr("rasp.rasp")
    run = (tracr("rasp.causal_eval") if causal else rasp).evaluate
    waiting, seen = [program], set[str]()
    try:
        while waiting:
            expression = waiting.pop()
            waiting += [child for child in expression.children if child.label not in seen]
            seen.update(child.label for child in expression.children)
            if isinstance(expression, rasp.Aggregate) and rasp.is_categorical(expression):
                whole = run(expression.sop, values)
                for row in run(expression.selector, values):
                    if len({value for value, chosen in zip(whole, row, strict=True) if chosen}) > 1:
                        return None
        return list(run(program, values))
    except (ArithmeticError, TypeError, ValueError):
        return None
