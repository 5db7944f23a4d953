"""What compression saves, and what it costs in exactness: for the planner's sums and for the plan's text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from torch import fx

from autopar.compression import BLOCK, LEAST_SHARE, eight_bit_bytes, sent_elements
from autopar.errors import ArgumentError
from autopar.graph import Block, Call, Model, info
from autopar.options import Options, activations_on_host
from autopar.passes.compress_activations import Compressed
from autopar.passes.vocabulary import staged_calls
from autopar.planner.saved import BlockSaved, Kept, kept_storages, saved_tensors

_NARROW: Final = {"bfloat16": 256, "float16": 2048}
"""Dtypes narrower than masters: the inverse of the largest rounding error, relative to the number."""


class KeptBytes:
    """What all calls of a local model keep of a microbatch, as blocks change (:mod:`autopar.planner.saved`)."""

    def __init__(self, model: Model, device: str) -> None:
        self._model, self._device = model, device
        self._found = [saved_tensors(block, device) for block in model.blocks]
        self._calls = staged_calls(model)

    def __call__(self, changed: int) -> int:
        """After block ``changed`` was rewritten: bytes of distinct memory, each once."""
        self._found[changed] = saved_tensors(self._model.blocks[changed], self._device)
        kept = {i: self._kept(self._model.calls[i]) for i in self._calls}
        sizes = kept_storages(self._model, self._found, self._calls, kept)
        return sum(sizes.values()) + sum(each.extra_bytes for each in kept.values())

    def _kept(self, call: Call) -> Kept:
        found, ops = self._found[call.block], self._model.block_of(call).ops
        return Kept(frozenset(found.kept(ops)), found.bytes_of((), ops))


def kept_in_8_bits(block: Block, found: BlockSaved) -> BlockSaved:
    """What a layer keeps under :func:`autopar.runtime.gist.kept_in_8_bits`: a byte a number, and a factor a block."""
    if block.kind != "layer":
        return found
    least = max((info(node).meta.numel for node in block.inputs), default=0) // LEAST_SHARE
    sizes: dict[fx.Node, int] = dict(found.owned_bytes)
    for node, bytes_ in sizes.items():
        meta = info(node).meta
        wide = meta.dtype.is_floating_point and meta.dtype.itemsize > 1
        if wide and meta.numel > least and (node.op == "call_function" or meta.needs_grad):
            sizes[node] = eight_bit_bytes(bytes_ // meta.dtype.itemsize)
    return replace(found, owned_bytes=sizes)


def check_compression(options: Options) -> None:
    """Raise ArgumentError for options that exclude each other."""
    if options.activations == "8bit" and activations_on_host(options.offload):
        raise ArgumentError(
            "activations='8bit' and offload of activations both take in what a layer saves, and only one of them can; "
            "use activations='lossless' with the offload, or leave the offload out"
        )


def describe(model: Model, options: Options, replaced: Sequence[Compressed]) -> Iterator[str]:
    """What is compressed, a line each; what is lossy says so, and by how much."""
    if replaced:
        saved = sum(found.saved_bytes for found in replaced)
        yield (
            f"{len(replaced)} ops of distinct layers keep bits or a seed in place of a tensor: all calls together "
            f"{saved / 2**20:.3g} MiB less of a microbatch; nothing is lost"
        )
    if options.float8:
        yield "products with weights are in float8 (lossy: operands by up to 1/16, gradients 1/8, tiny ones more)"
    for what, name in (("gradients travel", options.reduce_dtype), ("moments are kept", options.state_dtype)):
        if name in _NARROW:
            yield f"{what} in {name} (lossy: each by up to 1/{_NARROW[name]} of it, at every rounding)"
    if options.activations == "8bit":
        yield (
            "layers keep in 8 bits what their backward needs (lossy: each number by up to 1/254 of the largest of its "
            f"{BLOCK}; values of the forward stay exact)"
        )
    if options.powersgd:
        exact, low = sent_elements(_matrices(model).values(), options.powersgd)
        yield (
            f"gradients are summed over dp in rank {options.powersgd} (PowerSGD, lossy: what a step doesn't send stays "
            f"with its rank for the next, lost_share() of a running job says how much that is): {low:,} numbers "
            f"instead of {exact:,} for all weights of a pipeline"
        )


def _matrices(model: Model) -> Mapping[str, tuple[int, ...]]:
    """The local shapes of all weights that are trained."""
    found: dict[str, tuple[int, ...]] = {}
    for call in model.calls:
        for name, node in zip(call.parameters, model.block_of(call).parameters, strict=True):
            known = model.parameters[name]
            if known.trainable and not known.is_buffer:
                found[name] = info(node).meta.shape
    return found
