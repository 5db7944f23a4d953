"""Where a rank's weights come from, and how full weights are written.

A source gives one parameter's local shard at a time, so that no rank ever holds the whole model.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from autopar.errors import PlanError
from autopar.recipe import Recipe, from_json, play, to_json
from autopar.runtime.modules import dtype_of
from autopar.runtime.program import Parameter, Program, VocabularyProgram
from autopar.runtime.shards import Index, Positions, read_shard, slice_shard, unshard

__all__ = [
    "FileSource",
    "RecipeSource",
    "Source",
    "StateSource",
    "materialize",
    "open_source",
    "save_state",
    "slice_shard",
    "unshard",
    "unstacked",
    "whole",
]

WEIGHTS_FILE: Final = "weights.safetensors"
RECIPES_FILE: Final = "recipes.json"


class Source(Protocol):
    """Where weights come from: a state in memory, a file, or init recipes."""

    def local(self, parameter: Parameter, axes: Positions) -> torch.Tensor:
        """What this rank stores of ``parameter``, in the master's dtype, on any device; padding is zeros. It is
        contiguous and in memory of its own.

        Raises PlanError where the source lacks it, under its name and aliases, or has another shape or dtype;
        ShardingError where its types don't divide.
        """

    def save(self, directory: Path) -> tuple[str, str]:
        """Write the source into ``directory``: the file's name (for :func:`open_source`), and what it is."""


@dataclass(frozen=True)
class StateSource:
    """Full tensors in memory, by name; they are copied, never shared with a rank."""

    state: Mapping[str, torch.Tensor]

    def local(self, parameter: Parameter, axes: Positions) -> torch.Tensor:
        return read_shard(_reader(parameter, self._read), parameter, axes)

    def _read(self, parameter: Parameter) -> Reader:
        full = self.state[_find(parameter, self.state, "the state")]
        if full.is_meta:
            raise PlanError(f"{parameter.name!r} is on the meta device and has no values; use its init recipe")
        _check(parameter, full.shape, full.dtype, "the state")
        return full.detach().__getitem__

    def save(self, directory: Path) -> tuple[str, str]:
        save_state(directory / WEIGHTS_FILE, self.state)
        return WEIGHTS_FILE, "the weights to start from, whole, under the model's own names"


@dataclass(frozen=True)
class FileSource:
    """A safetensors file of full tensors; of each, only the bytes of the shard are read."""

    path: Path

    @cached_property
    def _file(self) -> Any:
        try:
            return safe_open(self.path, framework="pt", device="cpu")
        except FileNotFoundError as error:
            raise PlanError(f"there is no weights file {self.path}; write the job again") from error
        except (SafetensorError, OSError) as error:
            raise PlanError(f"{self.path} is not a whole safetensors file ({error}); write it again") from error

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self._file.keys())

    def local(self, parameter: Parameter, axes: Positions) -> torch.Tensor:
        return read_shard(_reader(parameter, self._read), parameter, axes)

    def _read(self, parameter: Parameter) -> Reader:
        lazy = self._file.get_slice(_find(parameter, self._names, str(self.path)))
        shape = lazy.get_shape()
        nothing = lazy[tuple(slice(0, 0) for _ in shape)]  # knows the dtype
        _check(parameter, shape, nothing.dtype, str(self.path))
        read: Reader = lazy.__getitem__
        return read

    def save(self, directory: Path) -> tuple[str, str]:
        shutil.copyfile(self.path, directory / WEIGHTS_FILE)
        return WEIGHTS_FILE, "the weights to start from, whole, under the model's own names"


@dataclass(frozen=True)
class RecipeSource:
    """Init recipes, played one whole parameter at a time and cut: the same values on every mesh."""

    recipes: Mapping[str, Recipe]
    seed: int

    def local(self, parameter: Parameter, axes: Positions) -> torch.Tensor:
        return read_shard(_reader(parameter, self._read), parameter, axes)

    def _read(self, parameter: Parameter) -> Reader:
        recipe = self.recipes[_find(parameter, self.recipes, "the recipes")]
        _check(parameter, recipe.shape, recipe.dtype, "the recipes")
        return play(recipe, self.seed).__getitem__

    def save(self, directory: Path) -> tuple[str, str]:
        text = json.dumps(to_json(self.recipes), allow_nan=False)
        (directory / RECIPES_FILE).write_text(text + "\n", encoding="utf-8")
        return RECIPES_FILE, "how the model initialises each weight; ranks play it with the job's seed"


def open_source(path: Path, seed: int) -> FileSource | RecipeSource:
    """The source that :meth:`Source.save` wrote; ``seed`` is that of recipes. Raises PlanError."""
    if path.suffix != ".json":
        return FileSource(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} holds no init recipes ({error}); write the job again") from error
    return RecipeSource(from_json(data), seed)


def materialize(
    module: nn.Module, program: Program | VocabularyProgram, make: Callable[[Parameter], torch.Tensor]
) -> None:
    """Give every parameter and buffer that ``module`` declares (on the meta device) what ``make`` returns for it.

    One tensor at a time. Parameters are new objects: make optimizers afterwards. Raises PlanError where
    module and program disagree, else what ``make`` raises.
    """
    declared = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    known = {name for parameter in program.parameters for name in _names(parameter)}
    if unknown := sorted(set(declared) - known):
        raise PlanError(f"{_title(program)} declares {unknown}, which its program doesn't list; emit it again")
    for parameter in program.parameters:
        places = [name for name in _names(parameter) if name in declared]
        _check_declared(program, parameter, declared, places)
        value = make(parameter)
        for name in places:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, value)


def whole(source: Source, axes: Positions, device: torch.device | str) -> Callable[[Parameter], torch.Tensor]:
    """Makes weights to compute with, as if ZeRO stored none of them in parts; for :func:`materialize`."""

    def make(parameter: Parameter) -> torch.Tensor:
        value = source.local(replace(parameter, zero=1), axes).to(device, dtype_of(parameter.dtype))
        return value if parameter.is_buffer else nn.Parameter(value, requires_grad=parameter.trainable)

    return make


def save_state(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write full weights as a safetensors file, a tensor with several names once, under its first.

    All or nothing: a file that was there stays until the new one is complete. Raises PlanError where a tensor
    has no values.
    """
    tensors = _distinct(state)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
        with partial.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _distinct(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One name per tensor, each contiguous and in memory of its own, as the format asks."""
    seen: set[tuple[Any, ...]] = set()
    storages: set[int] = set()
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if tensor.is_meta:
            raise PlanError(f"{name!r} is on the meta device and has no values to write")
        tensor = tensor.detach()
        storage = tensor.untyped_storage().data_ptr()
        view = (storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        if tensor.numel() and view in seen:
            continue
        seen.add(view)
        kept[name] = _own(tensor) if storage in storages else tensor.contiguous()
        storages.add(storage)
    return kept


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def unstacked(parameter: Parameter, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """``whole`` by the model's own names: that of ``parameter``, or those of what is stacked in it."""
    parts = parameter.parts
    return dict(zip((part.name for part in parts), whole.unbind(0), strict=True)) if parts else {parameter.name: whole}


Reader = Callable[[Index], torch.Tensor]
"""Gives a part of one full tensor."""


def _reader(parameter: Parameter, of: Callable[[Parameter], Reader]) -> Reader:
    """Reads ``parameter`` by what ``of`` reads of the model's; of stacked ones, only those that are asked for."""
    parts = parameter.parts
    if not parts:
        return of(parameter)

    def read(index: Index) -> torch.Tensor:
        pieces = [of(part)(index[1:]) for part in parts[index[0]]]
        return torch.stack(pieces) if pieces else of(parts[0])(index[1:]).unsqueeze(0)[:0]

    return read


def _names(parameter: Parameter) -> tuple[str, ...]:
    return (parameter.name, *parameter.aliases)


def _find(parameter: Parameter, names: Collection[str], where: str) -> str:
    for name in _names(parameter):
        if name in names:
            return name
    close = difflib.get_close_matches(parameter.name, names, n=1)
    hint = f" (it has {close[0]!r})" if close else ""
    raise PlanError(f"{where} holds no {parameter.name!r}{hint}; give the weights of the model that was planned")


def _check(parameter: Parameter, shape: Sequence[int], dtype: torch.dtype, where: str) -> None:
    expected = _text(dtype_of(parameter.master or parameter.dtype), parameter.full_shape)
    if (found := _text(dtype, shape)) != expected:
        raise PlanError(
            f"{where} holds {parameter.name!r} as {found}, the plan expects {expected}; "
            "convert the weights, or plan for them"
        )


def _check_declared(
    program: Program | VocabularyProgram,
    parameter: Parameter,
    declared: Mapping[str, torch.Tensor],
    places: list[str],
) -> None:
    expected = _text(dtype_of(parameter.dtype), parameter.shape)
    for name in places or [parameter.name]:
        tensor = declared.get(name)
        found = "nothing" if tensor is None else _text(tensor.dtype, tensor.shape)
        if found != expected:
            raise PlanError(f"{_title(program)} declares {found} as {name!r}, its program {expected}; emit it again")


def _title(program: Program | VocabularyProgram) -> str:
    return f"stage {program.stage}" if isinstance(program, Program) else "the vocabulary"


def _text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
