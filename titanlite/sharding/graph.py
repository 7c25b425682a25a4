"""Export a model as a graph of operators, on the meta device and not decomposed.

A linear layer with a bias becomes a product and a sum, as a bias is added after partial sums are reduced. Tied
parameters become one tensor.
"""

import contextlib
import inspect
import io
import logging
import operator
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx.config
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.fx import Node
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from titanlite.errors import Problem, ShardingError, describe
from titanlite.models.mistakes import forward_refused
from titanlite.sharding.mixtures import mixtures_as_operators

aten = torch.ops.aten

_NO_RESULT = {
    *(aten._assert_tensor_metadata.default, aten.sym_constrain_range_for_size.default),
    *(aten.result_type.Tensor, aten.result_type.Scalar, aten.promote_types.default),
}


@dataclass
class Graph:
    """The operators of a model and its tensors."""

    names: dict[Node, str]  # of all tensors; parameters and buffers have their names in the model
    parameters: set[Node]
    inputs: list[Node]  # inputs of the model, in order
    operators: list[Node]  # nodes that compute tensors, in order
    outputs: list[Node]  # tensors that the model returns
    trained: set[Node]  # tensors that have a gradient
    aliases: dict[str, Node]  # other names of tied parameters
    calls: dict[str, Node]  # the last node of each module call, by the module's name

    def home(self, node: Node) -> str:
        """Return the name of the innermost module that computes or holds a tensor, "" for the model."""
        if node.op == "placeholder":
            return self.names[node].rpartition(".")[0]
        return (modules_of(node) or [""])[-1]

    def made_of(self, sources: Iterable[Node]) -> set[Node]:
        """Return `sources`, and all tensors that are computed from these alone."""
        found = {*sources}
        for node in self.operators:
            if all(source in found for source in tensor_inputs(node)):
                found.add(node)
        return found


def export(model: nn.Module, inputs: Sequence[Tensor], stack_traces: bool = False) -> Graph:
    """Export a model as a graph of operators.

    Args:
        model: parameters on the meta device, in the dtypes that the step computes in.
        inputs: on the meta device, with the shapes of a micro-step's whole batch, and `requires_grad` as in training.
        stack_traces: record each node's source lines in `meta["stack_trace"]`, which takes a third of an export's time.

    Raises:
        ShardingError: a user's model raises an exception, or depends on the values of its tensors.
    """
    said = io.StringIO()  # on an exception torch prints the graph to stderr
    planned = _torch_config(stack_traces), _Constants(), contextlib.redirect_stderr(said), mixtures_as_operators(model)
    with contextlib.ExitStack() as stack:
        for each in planned:
            stack.enter_context(each)
        stack.enter_context(forward_refused(model, ShardingError))
        program = torch.export.export(model, tuple(inputs), strict=False)
    sys.stderr.write(said.getvalue())
    graph, signature = program.graph_module.graph, program.graph_signature
    constants = signature.inputs_to_lifted_tensor_constants
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **constants}
    tensors: dict[str, Any] = dict(program.constants)
    tensors |= dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    first: dict[Tensor, Node] = {}
    names: dict[Node, str] = {}
    parameters: set[Node] = set()
    aliases: dict[str, Node] = {}
    given: list[Node] = []
    trained: set[Node] = set()
    for node in list(graph.find_nodes(op="placeholder")):
        name = held.get(node.name)
        if name is None:
            example = inputs[len(given)]
            given.append(node)
            names[node] = node.name
        elif (example := tensors[name]) in first:
            aliases[name] = first[example]
            node.replace_all_uses_with(first[example])
            graph.erase_node(node)
            continue
        else:
            first[example] = node
            names[node] = name
            if isinstance(example, nn.Parameter):
                parameters.add(node)
        if example.requires_grad:
            trained.add(node)
    _split_biases(graph)
    operators = [n for n in graph.nodes if n.op == "call_function" and n.target not in _NO_RESULT]
    (returned,) = graph.find_nodes(op="output")
    calls: dict[str, Node] = {}
    for node in operators:
        if not _is_fixed(node):
            if not stack_traces:
                return export(model, inputs, stack_traces=True)  # to name the operator's line
            raise _not_fixed(node, inspect.getfile(type(model)))
        names[node] = node.name
        sources = tensor_inputs(node)
        if (
            node.target is not aten.detach.default
            and value(node).is_floating_point()
            and any(s in trained for s in sources)
        ):
            trained.add(node)
        for module in modules_of(node):
            calls[module] = node
    return Graph(names, parameters, given, operators, returned.all_input_nodes, trained, aliases, calls)


def _is_fixed(node: Node) -> bool:
    """Return whether the shapes of an operator's outputs do not depend on values of tensors."""
    if isinstance(node.target, HigherOrderOperator):
        return False
    outputs = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
    return all(v is None or (isinstance(v, Tensor) and all(type(n) is int for n in v.shape)) for v in outputs)


def _not_fixed(node: Node, file: str) -> ShardingError:
    module, line = (modules_of(node) or ["the model"])[-1], forward_line(node, file)
    if isinstance(node.target, HigherOrderOperator):
        regions = [getattr(node.graph.owning_module, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
        line = next((found for r in regions for n in r.graph.nodes if (found := forward_line(n, file))), None)
        want = "operators alone, in no region of their own"
        fix = "x.detach() for torch.no_grad(), x.to(dtype) for torch.autocast, a save-list for torch's checkpoint"
    else:
        want = "operators whose results have one shape, whatever tensors hold"
        fix = "no item(), nonzero() or x[mask]: torch.where(mask, x, 0) keeps the shape"
    where, number = (f"{module}: {line.code}", line.number) if line else (f"{node.name} of {module}", None)
    return ShardingError(describe(file, [Problem(where, str(node.target), want, fix, number)]))


class Line(NamedTuple):
    """A line of a file."""

    number: int
    code: str


def forward_line(node: Node, file: str) -> Line | None:
    """Return the innermost line of `file`, an absolute path, in an operator's stack trace, or None."""
    frames = re.findall(r'File "(.*)", line (\d+), in .*\n +(.*)', node.meta.get("stack_trace") or "")
    return next((Line(int(number), code) for path, number, code in reversed(frames) if path == file), None)


@contextlib.contextmanager
def _torch_config(stack_traces: bool) -> Iterator[None]:
    """Make torch record stack traces only if `stack_traces`, which 2.11 always does, and silence its log."""
    config: Any = torch.fx.config
    before, disabled = getattr(config, "do_not_emit_stack_traces", False), logging.root.manager.disable
    config.do_not_emit_stack_traces = not stack_traces
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before
        logging.disable(disabled)


class _Constants(TorchFunctionMode):
    """Makes tensors of Python numbers on the CPU, then moves them: on the meta device they would have no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0], Tensor):
            made = func(*args, **{**kwargs, "device": "cpu"})
            return made if kwargs.get("device") is None else made.to(kwargs["device"])
        if func is Tensor.new_tensor and not isinstance(args[1], Tensor):
            made = torch.tensor(args[1], dtype=kwargs.get("dtype") or args[0].dtype, device="cpu")
            return made.to(kwargs.get("device") or args[0].device)
        return func(*args, **kwargs)


def value(node: Node) -> Tensor:
    """Return the meta tensor of a node, the first if it has several."""
    val = node.meta["val"]
    return val[0] if isinstance(val, tuple | list) else val


def values(node: Node) -> list[Tensor]:
    """Return all meta tensors of a node."""
    val = node.meta["val"]
    return [v for v in val if v is not None] if isinstance(val, tuple | list) else [val]


def tensor_inputs(node: Node) -> list[Node]:
    """Return the tensors among a node's arguments, in order, with repetitions."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)  # type: ignore[arg-type]
    return found


def modules_of(node: Node) -> list[str]:
    """Return the names of the module calls around a node, outermost first, without the model itself."""
    return [name for name, _ in (node.meta.get("nn_module_stack") or {}).values() if name]


def is_item(node: Node) -> bool:
    """Return whether a node picks one tensor from the list that another node computes."""
    return node.target is operator.getitem


def _split_biases(graph: fx.Graph) -> None:
    for node in list(graph.find_nodes(op="call_function", target=aten.linear.default)):
        x, weight, *bias = node.args
        if not bias or bias[0] is None:
            continue
        with graph.inserting_after(node):
            total = graph.create_node("call_function", aten.add.Tensor, name=f"{node.name}_and_bias")
        node.replace_all_uses_with(total)
        node.args, total.args = (x, weight), (node, bias[0])
        total.meta = dict(node.meta)
