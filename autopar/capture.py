"""A module and a sample become one flat ``torch.fx`` graph of the loss.

The only file that touches ``torch.export``'s corners. Capture is non-strict export with static shapes under fake
tensors, in the training path: ``transformers`` is told that nothing is exported, so that attention keeps
``is_causal`` instead of an explicit mask. Those overrides are scoped and restored; the model is never changed.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from autopar.batch import Structure, batch_size, call_arguments, check_call, check_read, flatten, readable_name
from autopar.documents import check_documents, check_positions, gives_positions
from autopar.errors import BatchError, CaptureError
from autopar.expert_capture import expert_operations
from autopar.function_capture import Freezes, TracedValues, check_hooks, traceable_calls
from autopar.graph import (
    Autocast,
    Info,
    InputInfo,
    Meta,
    ParameterInfo,
    copied,
    info,
    is_getitem,
    is_mutating,
    is_random,
    op_name,
    set_info,
)
from autopar.liveness import Memory, live_of_loss, memory_of
from autopar.loop_capture import EveryExpert
from autopar.quick_export import quick_export
from autopar.region_capture import inline_regions
from autopar.row_capture import ASKED, Somewhere, largest
from autopar.source_lines import line_of_error, line_of_trace
from autopar.state_capture import Kept, check_averages
from autopar.value_capture import KnownValues

Loss = Callable[[Any, Any], torch.Tensor]
_PREFIX = "model"
_LOGS = [logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")]


@dataclass
class Flat:
    """A captured model before folding: placeholders, then live ops in order, then the loss.

    ``others``: the same, as captured under other answers to what code asked that depends on values
    (:mod:`autopar.row_capture`), the last as if no token chose any expert.

    ``memory`` says of each placeholder and op which others share its memory; ``remarks`` and ``packs`` are for
    :class:`autopar.graph.Model`.
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
    remarks: list[str] = field(default_factory=list)
    packs: bool = False
    others: list[Flat] = field(default_factory=list)

    @property
    def read(self) -> set[str]:
        """Paths of the batch's tensors that anything reads."""
        used = {info(node).name for node in self.graph.nodes if node.op == "placeholder" and node.users}
        return {item.path for item in self.inputs if item.name in used}

    def copy(self) -> Flat:
        """Another with the same content: passes, which work in place, leave this one as it is."""
        graph, twins = copied(self.graph)
        return replace(
            self,
            graph=graph,
            nodes=[twins[node] for node in self.nodes],
            loss=twins[self.loss],
            parameters=dict(self.parameters),
            inputs=list(self.inputs),
            memory={twins[node]: pieces for node, pieces in self.memory.items() if node in twins},
            remarks=list(self.remarks),
            others=[other.copy() for other in self.others],
        )


class _WithLoss(nn.Module):
    """Calls the model the way the user does and returns the scalar loss only."""

    def __init__(self, model: nn.Module, structure: Structure, paths: list[str], loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self._structure = structure
        self._paths = paths
        self._loss = loss
        self.kept: Kept

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        named = dict(zip(self._paths, tensors, strict=True))
        args, kwargs = call_arguments(self.model, self._structure, named, self._loss)
        buffers = dict(self.model.named_buffers())
        self.kept.begin()
        output = self.model(*args, **kwargs)
        self.kept.end()
        _write_back(self.model, buffers)
        return loss_of(output, self._structure.batch(named), self._loss)


def _write_back(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Let what the model's code assigned to a name of ``buffers`` be written there, as the next step would find it."""
    for name, tensor in model.named_buffers():
        if name in buffers and tensor is not buffers[name]:
            with torch.no_grad():
                buffers[name].copy_(tensor)


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
    if not isinstance(found, torch.Tensor) and loss is not None:
        raise CaptureError(
            f"loss={loss!r} returned {type(found).__name__}, no loss; it must return a floating-point scalar"
        )
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
    seq_dim: int = 1,
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
    check_averages(model)
    check_hooks(model)
    check_call(model, structure, tensors, loss)
    documents = _Documents(tensors)
    wrapper = _WithLoss(model, structure, list(tensors), loss)
    wrapper.train(model.training) if wrapper.training != model.training else None
    fresh = tuple(torch.empty_like(t) for t in tensors.values())  # apart, even where the user passes one tensor twice
    device = next(model.parameters()).device.type

    def captured(rows: Somewhere) -> Flat:
        known = KnownValues(model)
        wrapper.kept = Kept(model, known)
        try:
            with _autocast(device, autocast):
                exported = _export(wrapper, fresh, documents, rows, known)
        finally:
            wrapper.kept.forget()
        return _flat(model, exported, tensors, (batch_dim, seq_dim), device, known)

    flat = captured(rows := Somewhere())
    wrapper.kept.check(flat, lambda: captured(Somewhere()))
    documents.check(wrapper, structure)
    check_read(model, structure, tensors, loss, flat.read)
    others = [captured(Somewhere(spare=1))] if rows.counted else []
    others += [captured(Somewhere(False))] if rows.asked else []
    return replace(flat, packs=documents.are_kept_apart, others=others)


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


class _Documents:
    """Whether the model keeps documents apart by ``position_ids`` of the batch, as transformers' masks do."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.are_kept_apart = False

    def numbers(self, find: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of transformers' function that numbers each token's document: none without positions."""

        def found(*args: Any, **kwargs: Any) -> Any:
            if not gives_positions(self._tensors):
                return None
            self.are_kept_apart = True
            return find(*args, **kwargs)

        return found

    def check(self, wrapper: nn.Module, structure: Structure) -> None:
        """Raise BatchError where the batch doesn't agree with itself, or the model would ignore its documents."""
        packed = check_documents(self._tensors)
        if not self.are_kept_apart:
            return
        check_positions(self._tensors)
        if packed and _caching(wrapper) and structure.argument("use_cache") is not False:
            raise BatchError(
                "'position_ids' start over, so that rows pack several documents, but the model's use_cache is on, with "
                "which transformers lets tokens see other documents; set model.config.use_cache = False"
            )


def _export(
    wrapper: nn.Module,
    args: tuple[torch.Tensor, ...],
    documents: _Documents,
    rows: Somewhere,
    known: KnownValues,
) -> torch.export.ExportedProgram:
    try:
        with contextlib.ExitStack() as scoped:
            for override in (_training_path(documents), _no_cache(wrapper), expert_operations(wrapper), quick_export()):
                scoped.enter_context(override)
            for mode in (traceable_calls(), rows, EveryExpert(), TracedValues(), Freezes(), known):
                scoped.enter_context(mode)
            for log in _LOGS:
                scoped.callback(log.setLevel, log.level)
                log.setLevel(logging.CRITICAL)  # what fails is raised; a traceback beside it says no more
            scoped.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", ".*_flat_weights")  # torch's own RNNs list their parameters anew
            return torch.export.export(wrapper, args, strict=False)
    except (CaptureError, BatchError):
        raise
    except Exception as error:
        line = line_of_error(error)
        raise CaptureError(
            f"the model can't be traced into one graph: {_first_line(error)}\n  at {line}\n"
            "It has to run with this sample on one device, and control flow and shapes must not depend on tensor "
            "values; use torch.where or masks there."
        ) from error


@contextlib.contextmanager
def _training_path(documents: _Documents) -> Iterator[None]:
    """Let transformers build attention as in eager training: no explicit mask where is_causal will do."""
    masking = sys.modules.get("transformers.masking_utils")
    replacements: dict[str, Any] = {}
    if masking is not None:
        replacements = {
            "is_torchdynamo_exporting": lambda: False,
            "is_tracing": partial(_is_traced_mask, getattr(masking, "is_tracing", None)),  # what transformers 5.17 asks
            "find_packed_sequence_indices": documents.numbers(masking.find_packed_sequence_indices),
        }
    saved = {name: getattr(masking, name) for name in replacements if hasattr(masking, name)}
    try:
        for name in saved:
            setattr(masking, name, replacements[name])
        yield
    finally:
        for name, value in saved.items():
            setattr(masking, name, value)


def _is_traced_mask(is_tracing: Any, mask: torch.Tensor | None = None) -> bool:
    """Without a mask of the user's there are no values that tracing would have to read."""
    return mask is not None and bool(is_tracing(mask))


@contextlib.contextmanager
def _no_cache(wrapper: nn.Module) -> Iterator[None]:
    """Generation caches play no part in the loss; transformers' configs turn them on by default."""
    configs = _caching(wrapper)
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True


def _caching(wrapper: nn.Module) -> list[Any]:
    """Configs that turn caches on."""
    found = [getattr(m, "config", None) for m in wrapper.modules()]
    return [config for config in found if getattr(config, "use_cache", None) is True]


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _flat(
    model: nn.Module,
    exported: torch.export.ExportedProgram,
    tensors: dict[str, torch.Tensor],
    dims: tuple[int, int],
    device: str,
    known: KnownValues,
) -> Flat:
    graph = exported.graph
    regions = inline_regions(exported.graph_module, graph, device)
    memory = memory_of(graph)
    parameters, constants = _name_placeholders(model, exported)
    inputs = _name_inputs(exported, tensors, *dims)
    known.check(graph, memory)
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    loss = output.args[0][0]
    nodes = live_of_loss(graph, loss, memory, constants)
    classes: dict[str, str] = {"": type(model).__name__}
    for position, node in enumerate(nodes):
        _describe(node, classes, regions.get(node, ()))
        if is_mutating(node) and info(node).meta.needs_grad:
            _pass_gradient_on(node, nodes[:position], memory)
    if any(node.target is ASKED for node in graph.nodes):
        _describe_asked(graph, classes)
    if not info(loss).meta.needs_grad:
        raise CaptureError("the loss doesn't depend on any trainable parameter")
    size = batch_size(tensors, dims[0])
    name = type(model).__name__
    return Flat(name, graph, nodes, loss, parameters, inputs, classes, constants, size, memory)


def _describe_asked(graph: fx.Graph, classes: dict[str, str]) -> None:
    """What code asked of isn't live, but has to be told apart."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.target is ASKED or node in needed:
            needed.update(node.all_input_nodes)
    for node in graph.nodes:
        if node in needed and node.op == "call_function" and "val" in node.meta:
            _describe(node, classes, ())


def _name_placeholders(
    model: nn.Module, exported: torch.export.ExportedProgram
) -> tuple[dict[str, ParameterInfo], dict[str, torch.Tensor]]:
    """Mark parameter, buffer and constant placeholders; tied ones share their first name. A constant may be a parameter
    that code knows by itself, as a hook's function or a list does."""
    signature = exported.graph_signature
    first, aliases = _tied_names(model)
    own = {(parameter.untyped_storage(), parameter.shape): name for name, parameter in model.named_parameters()}
    found: dict[str, ParameterInfo] = {}
    constants: dict[str, torch.Tensor] = {}
    numbers = Counter[str]()
    placeholders: dict[str, fx.Node] = {}
    for node in exported.graph.nodes:
        if node.op != "placeholder":
            continue
        target = signature.inputs_to_parameters.get(node.name) or signature.inputs_to_buffers.get(node.name)
        lifted = signature.inputs_to_lifted_tensor_constants.get(node.name)
        if target is None and lifted is None:
            continue
        constant = exported.constants[lifted] if lifted is not None else None
        known = own.get((constant.untyped_storage(), constant.shape)) if isinstance(constant, torch.Tensor) else None
        if known is not None:
            node.replace_all_uses_with(placeholders[known])
            exported.graph.erase_node(node)
            continue
        name = _strip(target) if target is not None else _constant_name(lifted, numbers)
        name = first.get(name, name)
        is_buffer = node.name not in signature.inputs_to_parameters
        if constant is not None:
            constants[name] = constant
        trainable = not is_buffer and model.get_parameter(name).requires_grad
        meta = _meta(node.meta["val"], trainable)
        set_info(node, Info((meta,), role="buffer" if is_buffer else "parameter", name=name))
        found[name] = ParameterInfo(name, meta, aliases.get(name, ()), trainable, is_buffer)
        placeholders.setdefault(name, node)
    return found, constants


def _constant_name(lifted: str | None, numbers: Counter[str]) -> str:
    """Literals in code are numbered by module, as torch does through the whole model: layers that do the same are
    equal."""
    name = _strip(lifted or "constant")
    module, literal, _ = name.rpartition("lifted_tensor_")
    numbers[module] += 1
    return f"{module}{literal}{numbers[module] - 1}" if literal else name


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
    exported: torch.export.ExportedProgram, tensors: dict[str, torch.Tensor], batch_dim: int, seq_dim: int
) -> list[InputInfo]:
    size = batch_size(tensors, batch_dim)
    names = [n for n in exported.graph_signature.user_inputs if isinstance(n, str)]
    by_name = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    found: list[InputInfo] = []
    for name, (path, tensor) in zip(names, tensors.items(), strict=True):
        split = tensor.dim() > batch_dim and tensor.shape[batch_dim] == size
        meta = Meta(tuple(tensor.shape), tensor.dtype)
        readable = readable_name(path, {item.name for item in found})
        set_info(by_name[name], Info((meta,), role="input", name=readable))
        positions = split and _has_positions(tensor, batch_dim, seq_dim)
        found.append(InputInfo(readable, path, meta, batch_dim if split else None, seq_dim if positions else None))
    return found


def _has_positions(tensor: torch.Tensor, batch_dim: int, seq_dim: int) -> bool:
    """Whether the tensor has numbers, or vectors, for the tokens of sequences: a mask of pairs has other dims."""
    dims = max(batch_dim, seq_dim) + 1
    return dims <= tensor.dim() <= dims + 1 and tensor.shape[seq_dim] > 1


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
        outputs = tuple(_meta(v, flows, source_of(node)) for v in values)
    if is_mutating(node):  # autocast leaves in-place ops alone; what functionalize makes of one isn't in place
        autocast = (*autocast, Autocast("", outputs[0].dtype, False))
    set_info(node, Info(outputs, module=path, source=source_of(node), random=is_random(node), autocast=autocast))


def gradient_flows(node: fx.Node) -> bool:
    """Whether an operand's gradient can come from the result's; the result must be a floating-point tensor, too. Of
    ``x.type_as(other)`` and the like, the other is an example alone."""
    parts = op_name(node).split(".")
    kind = parts[1] if len(parts) > 1 else parts[0]
    if kind == "detach" or kind.startswith("new_") or kind.endswith("_like"):
        return False
    given = node.all_input_nodes[:1] if kind.endswith("_as") or parts[-1] == "other" else node.all_input_nodes
    return any(meta.needs_grad for operand in given for meta in info(operand).outputs)


def differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _pass_gradient_on(write: fx.Node, before: Sequence[fx.Node], memory: Memory) -> None:
    """What shares memory with a tensor that was written to may have its gradient from now on."""
    for node in [*before, *write.all_input_nodes]:
        if memory[node] & memory[write]:
            data = info(node)
            data.outputs = tuple(replace(m, needs_grad=differentiable(m.dtype)) for m in data.outputs)


def _meta(value: Any, flows: bool, place: str = "") -> Meta:
    if isinstance(value, torch.SymInt | torch.SymBool):  # the size of a tensor that depends on values
        return Meta((), torch.int64)
    if not isinstance(value, torch.Tensor):
        line = f" at {place}" if place else ""
        raise CaptureError(
            f"a {type(value).__name__} that is read from a tensor{line} is computed with, which depends on values; "
            "keep it a tensor (x.max() in the place of x.max().item())"
        )
    return Meta(tuple(map(largest, value.shape)), value.dtype, flows and differentiable(value.dtype))


def source_of(node: fx.Node) -> str:
    """``file.py:line`` of the innermost frame that is the user's own, of a node as torch captured it."""
    return line_of_trace(node.meta.get("stack_trace") or "")
