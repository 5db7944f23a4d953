"""A module and a sample become one flat ``torch.fx`` graph of the loss.

The only file that touches ``torch.export``'s corners. Capture is non-strict export with static shapes under fake
tensors, in the training path: ``transformers`` is told that nothing is exported, so that attention keeps
``is_causal`` instead of an explicit mask. Those overrides are scoped and restored; the model is never changed.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from autopar.batch import Structure, batch_size, flatten
from autopar.errors import BatchError, CaptureError
from autopar.graph import Info, InputInfo, Meta, ParameterInfo, info, is_getitem, is_random, op_name, set_info

Loss = Callable[[Any, Any], torch.Tensor]
_PREFIX = "model"


@dataclass
class Flat:
    """A captured model before folding: placeholders, then live ops in order, then the loss."""

    name: str
    graph: fx.Graph
    nodes: list[fx.Node]
    loss: fx.Node
    parameters: dict[str, ParameterInfo]
    inputs: list[InputInfo]
    classes: dict[str, str]
    constants: dict[str, torch.Tensor]
    batch_size: int


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


def capture(model: nn.Module, sample: Any, *, loss: Loss | None = None, batch_dim: int = 0) -> Flat:
    """Trace ``model`` called with ``sample`` (global batch) to the loss.

    Raises CaptureError naming the user's source line where the model can't be traced, BatchError where the sample
    doesn't suit the model.
    """
    tensors, structure = flatten(sample)
    tensors = _on_model_device(model, tensors)
    wrapper = _WithLoss(model, structure, list(tensors), loss)
    wrapper.train(model.training) if wrapper.training != model.training else None
    fresh = tuple(torch.empty_like(t) for t in tensors.values())  # apart, even where the user passes one tensor twice
    exported = _export(wrapper, fresh)
    return _flat(model, exported, tensors, batch_dim)


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
    model: nn.Module, exported: torch.export.ExportedProgram, tensors: dict[str, torch.Tensor], batch_dim: int
) -> Flat:
    graph = exported.graph
    _inline_regions(exported.graph_module, graph)
    parameters, constants = _name_placeholders(model, exported)
    inputs = _name_inputs(exported, tensors, batch_dim)
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    loss = output.args[0][0]
    nodes = _live(graph, loss)
    classes: dict[str, str] = {"": type(model).__name__}
    for node in nodes:
        _describe(node, classes)
    if not info(loss).meta.needs_grad:
        raise CaptureError("the loss doesn't depend on any trainable parameter")
    size = batch_size(tensors, batch_dim)
    name = type(model).__name__
    return Flat(name, graph, nodes, loss, parameters, inputs, classes, constants, size)


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


def _inline_regions(module: fx.GraphModule, graph: fx.Graph) -> None:
    """``no_grad`` and disabled-autocast regions become plain ops; what enters a no_grad region is detached."""
    for node in list(graph.nodes):
        kind = op_name(node) if node.op == "call_function" else ""
        if kind == "wrap_with_set_grad_enabled":
            enabled, region, *values = node.args
            _inline(module, graph, node, region, values, detach=not enabled)
        elif kind == "wrap_with_autocast":
            _device, _dtype, enabled, _cache, region, *values = node.args
            if enabled:
                raise CaptureError(f"the model opens an autocast region at {_source(node)}; cast explicitly there")
            _inline(module, graph, node, region, values, detach=False)


def _inline(
    module: fx.GraphModule, graph: fx.Graph, node: fx.Node, region: Any, values: list[Any], *, detach: bool
) -> None:
    inner = getattr(module, region.target)
    env: dict[fx.Node, Any] = {}
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
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    if not region.users:
        graph.erase_node(region)
    _inline_regions(inner, graph) if any(n.op == "get_attr" for n in inner.graph.nodes) else None


def _detached(graph: fx.Graph, value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    node = graph.call_function(torch.ops.aten.detach.default, (value,))
    node.meta = dict(value.meta)
    return node


def _live(graph: fx.Graph, loss: fx.Node) -> list[fx.Node]:
    """The ops that the loss depends on, in order (drops logits, caches and metadata asserts)."""
    needed: set[fx.Node] = {loss}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [n for n in graph.nodes if n in needed and n.op == "call_function"]


def _describe(node: fx.Node, classes: dict[str, str]) -> None:
    """Replace torch's metadata by ours: shapes, gradient, module path, source line."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for raw_path, kind in stack.values():
        path = _strip(raw_path.split("@")[0])
        if path or raw_path == _PREFIX:
            classes.setdefault(path, kind.rsplit(".", 1)[-1] if isinstance(kind, str) else kind.__name__)
    flows = any(info(o).meta.needs_grad for o in node.all_input_nodes) and "detach" not in op_name(node)
    value = node.meta["val"]
    values = value if isinstance(value, list | tuple) else (value,)
    if is_getitem(node):
        index = node.args[1]
        parent = info(node.args[0])  # type: ignore[arg-type]
        outputs: tuple[Meta, ...] = (parent.outputs[index],)  # type: ignore[index]
    else:
        outputs = tuple(_meta(v, flows) for v in values)
    set_info(node, Info(outputs, module=path, source=_source(node), random=is_random(node)))


def _meta(value: Any, flows: bool) -> Meta:
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"a value of type {type(value).__name__} flows through the graph; only tensors may")
    return Meta(tuple(int(s) for s in value.shape), value.dtype, flows and value.is_floating_point())


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
