"""A module and a sample become one flat ``torch.fx`` graph of the loss.

The only file that touches ``torch.export``'s corners. Capture is non-strict export with static shapes under fake
tensors, in the training path: ``transformers`` is told that nothing is exported, so that attention keeps
``is_causal`` instead of an explicit mask. Those overrides are scoped and restored; the model is never changed.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from autopar.batch import Structure, batch_size, flatten
from autopar.errors import BatchError, CaptureError
from autopar.graph import (
    Autocast,
    Info,
    InputInfo,
    Meta,
    ParameterInfo,
    info,
    is_aten,
    is_getitem,
    is_mutating,
    is_random,
    op_name,
    set_info,
)

Loss = Callable[[Any, Any], torch.Tensor]
Memory = Mapping[fx.Node, frozenset[int]]
"""A number for each piece of memory that a node's tensors lie in; tensors of one number share it."""
Regions = dict[fx.Node, tuple[Autocast, ...]]
"""The autocast regions that an op is in, outermost first."""

_PREFIX = "model"


@dataclass
class Flat:
    """A captured model before folding: placeholders, then live ops in order, then the loss.

    ``memory`` says of each placeholder and op which others share its memory.
    """

    name: str
    graph: fx.Graph
    nodes: list[fx.Node]
    loss: fx.Node
    parameters: dict[str, ParameterInfo]
    inputs: list[InputInfo]
    classes: dict[str, str]
    constants: dict[str, torch.Tensor]
    batch_size: int
    memory: Memory


class _WithLoss(nn.Module):
    """Calls the model the way the user does and returns the scalar loss only."""

    def __init__(self, model: nn.Module, structure: Structure, paths: list[str], loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self._structure = structure
        self._paths = paths
        self._loss = loss

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        named = dict(zip(self._paths, tensors, strict=True))
        args, kwargs = self._structure.call_arguments(named)
        output = self.model(*args, **kwargs)
        return loss_of(output, self._structure.batch(named), self._loss)


def loss_of(output: Any, batch: Any, loss: Loss | None) -> torch.Tensor:
    """The scalar loss of a model's output. Raises CaptureError where there is none."""
    found: Any
    if loss is not None:
        found = loss(output, batch)
    elif isinstance(output, torch.Tensor):
        found = output
    elif isinstance(output, Mapping) and output.get("loss") is not None:
        found = output["loss"]
    elif isinstance(output, list | tuple) and output:
        found = output[0]
    else:
        found = getattr(output, "loss", None)
    if not isinstance(found, torch.Tensor):
        raise CaptureError(
            f"the model returned {type(output).__name__} with no loss in it; put labels into the sample, "
            "or pass loss=lambda output, batch: ..."
        )
    if found.dim() != 0 or not found.is_floating_point():
        raise CaptureError(
            f"the loss has shape {list(found.shape)} and dtype {found.dtype}; it must be a floating-point scalar "
            "(pass loss=lambda output, batch: ... that reduces it)"
        )
    return found


def capture(
    model: nn.Module,
    sample: Any,
    *,
    loss: Loss | None = None,
    batch_dim: int = 0,
    autocast: torch.dtype | None = None,
) -> Flat:
    """Trace ``model`` called with ``sample`` (global batch) to the loss.

    With ``autocast``, the lower precision of an autocast around the call: the model's code sees the dtypes that it
    would see there. The graph's ops are without casts all the same (:mod:`autopar.passes.mixed_precision`).
    Raises CaptureError naming the user's source line where the model can't be traced, BatchError where the sample
    doesn't suit the model.
    """
    tensors, structure = flatten(sample)
    tensors = _on_model_device(model, tensors)
    wrapper = _WithLoss(model, structure, list(tensors), loss)
    wrapper.train(model.training) if wrapper.training != model.training else None
    fresh = tuple(torch.empty_like(t) for t in tensors.values())  # apart, even where the user passes one tensor twice
    device = next(model.parameters()).device.type
    with _autocast(device, autocast):
        exported = _export(wrapper, fresh)
    return _flat(model, exported, tensors, batch_dim, device)


def _autocast(device: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """Tensors of the meta device know no autocast: code that asks for dtypes there sees the model's own."""
    if device == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device, dtype, enabled=dtype is not None)


def _on_model_device(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    devices = {p.device for p in model.parameters()}
    if not devices:
        raise CaptureError(f"{type(model).__name__} has no parameters; there is nothing to train")
    if len(devices) > 1:
        raise CaptureError(f"the model's parameters lie on several devices {sorted(map(str, devices))}; put it on one")
    device = devices.pop()
    if device.type == "meta":
        return {path: t.to("meta") for path, t in tensors.items()}
    for path, tensor in tensors.items():
        if tensor.device != device:
            raise BatchError(
                f"sample tensor {path!r} is on {tensor.device}, the model on {device}; "
                f"move one: sample.to({str(device)!r})"
            )
    return tensors


def _export(wrapper: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.export.ExportedProgram:
    try:
        with _training_path(wrapper), _no_cache(wrapper):
            return torch.export.export(wrapper, args, strict=False)
    except (CaptureError, BatchError):
        raise
    except Exception as error:
        line = _user_line(error)
        raise CaptureError(
            f"the model can't be traced into one graph: {_first_line(error)}\n  at {line}\n"
            "Control flow and shapes must not depend on tensor values; use torch.where or masks there."
        ) from error


@contextlib.contextmanager
def _training_path(wrapper: nn.Module) -> Iterator[None]:
    """Let transformers build attention as in eager training: no explicit mask where is_causal will do."""
    masking = sys.modules.get("transformers.masking_utils")
    replacements: dict[str, Any] = {}
    if masking is not None:
        replacements = {
            "is_torchdynamo_exporting": lambda: False,
            "find_packed_sequence_indices": lambda *args, **kwargs: None,
        }
    saved = {name: getattr(masking, name) for name in replacements if hasattr(masking, name)}
    try:
        for name in saved:
            setattr(masking, name, replacements[name])
        yield
    finally:
        for name, value in saved.items():
            setattr(masking, name, value)


@contextlib.contextmanager
def _no_cache(wrapper: nn.Module) -> Iterator[None]:
    """Generation caches play no part in the loss; transformers' configs turn them on by default."""
    found = [getattr(m, "config", None) for m in wrapper.modules()]
    configs: list[Any] = [config for config in found if getattr(config, "use_cache", None) is True]
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True


def _user_line(error: BaseException) -> str:
    """The innermost frame of the user's own code, of the error or of what caused it."""
    torch_root = str(Path(torch.__file__).parent)
    chain: BaseException | None = error
    while chain is not None:
        for frame in reversed(traceback.extract_tb(chain.__traceback__)):
            if not frame.filename.startswith((torch_root, str(Path(__file__).parent), "<")):
                return f"{frame.filename}:{frame.lineno}: {frame.line}"
        chain = chain.__cause__ or chain.__context__
    return "an unknown line"


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _flat(
    model: nn.Module,
    exported: torch.export.ExportedProgram,
    tensors: dict[str, torch.Tensor],
    batch_dim: int,
    device: str,
) -> Flat:
    graph = exported.graph
    regions = _inline_regions(exported.graph_module, graph, device)
    memory = _memory(graph)
    parameters, constants = _name_placeholders(model, exported)
    inputs = _name_inputs(exported, tensors, batch_dim)
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    loss = output.args[0][0]
    nodes = _live(graph, loss, memory, constants)
    classes: dict[str, str] = {"": type(model).__name__}
    for position, node in enumerate(nodes):
        _describe(node, classes, regions.get(node, ()))
        if is_mutating(node) and info(node).meta.needs_grad:
            _pass_gradient_on(node, nodes[:position], memory)
    if not info(loss).meta.needs_grad:
        raise CaptureError("the loss doesn't depend on any trainable parameter")
    size = batch_size(tensors, batch_dim)
    name = type(model).__name__
    return Flat(name, graph, nodes, loss, parameters, inputs, classes, constants, size, memory)


def _name_placeholders(
    model: nn.Module, exported: torch.export.ExportedProgram
) -> tuple[dict[str, ParameterInfo], dict[str, torch.Tensor]]:
    """Mark parameter, buffer and constant placeholders; tied ones share their first name."""
    signature = exported.graph_signature
    first, aliases = _tied_names(model)
    found: dict[str, ParameterInfo] = {}
    constants: dict[str, torch.Tensor] = {}
    for node in exported.graph.nodes:
        if node.op != "placeholder":
            continue
        target = signature.inputs_to_parameters.get(node.name) or signature.inputs_to_buffers.get(node.name)
        lifted = signature.inputs_to_lifted_tensor_constants.get(node.name)
        if target is None and lifted is None:
            continue
        name = _strip(target) if target is not None else _constant_name(lifted)
        name = first.get(name, name)
        is_buffer = node.name not in signature.inputs_to_parameters
        if lifted is not None:
            constants[name] = exported.constants[lifted]
        trainable = not is_buffer and model.get_parameter(name).requires_grad
        meta = _meta(node.meta["val"], trainable)
        set_info(node, Info((meta,), role="buffer" if is_buffer else "parameter", name=name))
        found[name] = ParameterInfo(name, meta, aliases.get(name, ()), trainable, is_buffer)
    return found, constants


def _constant_name(lifted: str | None) -> str:
    return _strip(lifted or "constant").replace(".", "_")


def _strip(name: str) -> str:
    return name.removeprefix(f"{_PREFIX}.") if name != _PREFIX else ""


def _tied_names(model: nn.Module) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Every name of a tensor -> its first name, and first name -> the others."""
    seen: dict[int, str] = {}
    first: dict[str, str] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    pairs = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in pairs:
        owner = seen.setdefault(id(tensor), name)
        first[name] = owner
        if owner != name:
            aliases[owner] = (*aliases.get(owner, ()), name)
    return first, aliases


def _name_inputs(
    exported: torch.export.ExportedProgram, tensors: dict[str, torch.Tensor], batch_dim: int
) -> list[InputInfo]:
    size = batch_size(tensors, batch_dim)
    names = [n for n in exported.graph_signature.user_inputs if isinstance(n, str)]
    by_name = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    found: list[InputInfo] = []
    for name, (path, tensor) in zip(names, tensors.items(), strict=True):
        split = tensor.dim() > batch_dim and tensor.shape[batch_dim] == size
        meta = Meta(tuple(tensor.shape), tensor.dtype)
        readable = path.replace(".", "_") if not path[0].isdigit() else f"input_{path.replace('.', '_')}"
        set_info(by_name[name], Info((meta,), role="input", name=readable))
        found.append(InputInfo(readable, path, meta, batch_dim if split else None))
    return found


def _inline_regions(module: fx.GraphModule, graph: fx.Graph, device: str) -> Regions:
    """``no_grad`` and autocast regions become plain ops; what enters a no_grad region is detached.

    Returns the autocast regions of each op that is in one; those of ``device``, the model's, are of any device.
    """
    regions: Regions = {}
    _inline_each(module, graph, list(graph.nodes), device, regions)
    return regions


def _inline_each(
    module: fx.GraphModule, graph: fx.Graph, nodes: Sequence[fx.Node], device: str, regions: Regions
) -> None:
    for node in nodes:
        kind = op_name(node) if node.op == "call_function" else ""
        around = regions.pop(node, ())
        if kind == "wrap_with_set_grad_enabled":
            enabled, region, *values = node.args
            copied = _inline(module, graph, node, region, values, detach=not enabled)
        elif kind == "wrap_with_autocast":
            name, dtype, on, _cache, region, *values = node.args
            lower = dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(str(name))
            around = (*around, Autocast("" if name == device else str(name), lower, bool(on)))
            copied = _inline(module, graph, node, region, values, detach=False)
        else:
            if around:
                regions[node] = around
            continue
        regions |= dict.fromkeys(copied, around) if around else {}
        _inline_each(getattr(module, region.target), graph, copied, device, regions)  # type: ignore[union-attr,arg-type]
        if not region.users:  # type: ignore[union-attr]
            graph.erase_node(region)  # type: ignore[arg-type]


def _inline(
    module: fx.GraphModule, graph: fx.Graph, node: fx.Node, region: Any, values: list[Any], *, detach: bool
) -> list[fx.Node]:
    """Put the ops of a region in the place of ``node``; returns them."""
    inner = getattr(module, region.target)
    env: dict[fx.Node, Any] = {}
    copied: list[fx.Node] = []
    waiting = iter(values)
    results: Any = ()
    with graph.inserting_before(node):
        for child in inner.graph.nodes:
            if child.op == "placeholder":
                env[child] = _detached(graph, next(waiting)) if detach else next(waiting)
            elif child.op == "output":
                results = fx.map_arg(child.args[0], lambda n: env[n])
            else:
                env[child] = graph.node_copy(child, lambda n: env[n])
                copied.append(env[child])
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    return copied


def _detached(graph: fx.Graph, value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    node = graph.call_function(torch.ops.aten.detach.default, (value,))
    node.meta = dict(value.meta)
    return node


def _memory(graph: fx.Graph) -> dict[fx.Node, frozenset[int]]:
    """The memory of every node's tensors, as eager execution has it: fake tensors share storage just as real ones."""
    numbers: dict[torch.UntypedStorage, int] = {}
    found: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        tensors = [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, torch.Tensor)]
        found[node] = frozenset(numbers.setdefault(t.untyped_storage(), len(numbers)) for t in tensors)
    return found


def written_operands(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory the op writes to, as its schema says."""
    if not is_aten(node):
        return []
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    marked = [(i, a.name) for i, a in enumerate(schema) if a.alias_info is not None and a.alias_info.is_write]
    given = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in marked]
    found: list[fx.Node] = []
    fx.map_arg(tuple(given), found.append)
    return found


def _live(graph: fx.Graph, loss: fx.Node, memory: Memory, constants: Collection[str]) -> list[fx.Node]:
    """The ops that the loss depends on, in order (drops logits, caches and metadata asserts).

    A write in place is one of them if something live reads that memory after it. A write to a parameter, a buffer or
    a batch tensor that anything live reads is refused: the next step would see it. What nothing reads (a counter of
    batches) is left as it is. ``constants`` are literals in the model's code, of which what is written to is a copy.
    """
    found = live(list(graph.nodes), loss, memory)
    read = {number for n in (loss, *found) for o in n.all_input_nodes for number in memory[o]}
    outside = [n for n in graph.nodes if n.op == "placeholder" and info(n).name not in constants]
    owners = {number: n for n in outside for number in memory[n]}
    for node in graph.nodes:
        for number in (number for o in written_operands(node) for number in memory[o] & read):
            if number in owners:
                raise _refused_write(node, info(owners[number]))
    return list(found)


def _refused_write(node: fx.Node, owner: Info) -> CaptureError:
    kind = "batch tensor" if owner.role == "input" else owner.role
    return CaptureError(
        f"{op_name(node)} at {_source(node)} changes {kind} {owner.name!r} in place, or a view of it, which outlives "
        "the step; change a copy (x = x.clone()), or write it out of place (x = x + y instead of x += y)"
    )


def live(nodes: Sequence[fx.Node], loss: fx.Node, memory: Memory) -> dict[fx.Node, None]:
    """The ops among ``nodes`` (in order) that ``loss`` depends on, through operands or through what they write."""
    needed: set[fx.Node] = {loss}
    read = set(memory.get(loss, ()))
    for node in reversed(nodes):
        if any(memory[operand] & read for operand in written_operands(node)):
            needed.add(node)
        if node in needed:
            needed.update(node.all_input_nodes)
            read.update(number for operand in node.all_input_nodes for number in memory.get(operand, ()))
    return {n: None for n in nodes if n in needed and n.op == "call_function"}


def _describe(node: fx.Node, classes: dict[str, str], autocast: tuple[Autocast, ...]) -> None:
    """Replace torch's metadata by ours: shapes, gradient, module path, source line, regions of autocast."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for raw_path, kind in stack.values():
        path = _strip(raw_path.split("@")[0])
        if path or raw_path == _PREFIX:
            classes.setdefault(path, kind.rsplit(".", 1)[-1] if isinstance(kind, str) else kind.__name__)
    flows = gradient_flows(node)
    value = node.meta["val"]
    values = value if isinstance(value, list | tuple) else (value,)
    if is_getitem(node):
        index = node.args[1]
        parent = info(node.args[0])  # type: ignore[arg-type]
        outputs: tuple[Meta, ...] = (parent.outputs[index],)  # type: ignore[index]
    else:
        outputs = tuple(_meta(v, flows) for v in values)
    if is_mutating(node):  # autocast leaves in-place ops alone; what functionalize makes of one isn't in place
        autocast = (*autocast, Autocast("", outputs[0].dtype, False))
    set_info(node, Info(outputs, module=path, source=_source(node), random=is_random(node), autocast=autocast))


def gradient_flows(node: fx.Node) -> bool:
    """Whether an operand's gradient can come from the result's; the result must be a floating-point tensor, too."""
    parts = op_name(node).split(".")
    kind = parts[1] if len(parts) > 1 else parts[0]
    constant = kind == "detach" or kind.startswith("new_") or kind.endswith("_like")
    return not constant and any(meta.needs_grad for o in node.all_input_nodes for meta in info(o).outputs)


def differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _pass_gradient_on(write: fx.Node, before: Sequence[fx.Node], memory: Memory) -> None:
    """What shares memory with a tensor that was written to may have its gradient from now on."""
    for node in [*before, *write.all_input_nodes]:
        if memory[node] & memory[write]:
            data = info(node)
            data.outputs = tuple(replace(m, needs_grad=differentiable(m.dtype)) for m in data.outputs)


def _meta(value: Any, flows: bool) -> Meta:
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"a value of type {type(value).__name__} flows through the graph; only tensors may")
    return Meta(tuple(int(s) for s in value.shape), value.dtype, flows and differentiable(value.dtype))


def _source(node: fx.Node) -> str:
    """``file.py:line`` of the innermost frame outside of torch: the user's own line."""
    lines = [ln for ln in (node.meta.get("stack_trace") or "").splitlines() if ln.lstrip().startswith("File ")]
    if not lines:
        return ""
    torch_root = str(Path(torch.__file__).parent)
    own = [line for line in lines if torch_root not in line]
    parts = (own or lines)[-1].strip().split('"')
    number = parts[2].split("line ")[1].split(",")[0] if "line " in parts[2] else "?"
    return f"{Path(parts[1]).name}:{number}"
