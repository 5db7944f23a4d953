"""Models by name, for the command line: ``hf:path/to/config.json`` or ``package.module:factory``."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from autopar.errors import ArgumentError

_LONGEST: Final = 300
"""Characters of a message that transformers lists all its models in."""


@dataclass(frozen=True)
class Named:
    """A model, what it is called with, and its loss if it returns none."""

    model: nn.Module
    sample: Any
    loss: Callable[[Any, Any], torch.Tensor] | None = None


def resolve(name: str, *, batch: int, sequence: int, dtype: str, meta: bool, seed: int = 0) -> Named:
    """Build the model that ``name`` names, with random weights, and a random sample.

    ``hf:config.json`` is a causal language model of ``transformers``, called with ``batch`` x ``sequence`` random
    tokens. ``package.module:factory`` is called without arguments and returns ``(model, sample)`` or
    ``(model, sample, loss)``.
    Raises ArgumentError where there is no such model, or a size or dtype is none.
    """
    torch.manual_seed(seed)
    for option, size in (("batch", batch), ("sequence", sequence)):
        if size < 1:
            raise ArgumentError(f"{option}={size}; it must be a whole number of at least 1")
    wanted = _dtype(dtype)
    kind, _, rest = name.partition(":")
    if not (kind and rest):
        raise ArgumentError(f"{name!r} names no model; write hf:path/to/config.json or package.module:factory")
    if kind == "hf":
        return _transformers(Path(rest), batch, sequence, wanted, meta)
    return _factory(kind, rest)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(f"{name!r} is not a floating-point dtype; write float32, bfloat16 or float64")
    return dtype


def _transformers(path: Path, batch: int, sequence: int, dtype: torch.dtype, meta: bool) -> Named:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"can't read the config {path}: {error}") from error
    if not isinstance(settings, dict):
        raise ArgumentError(f"{path} is no transformers config: it has a {type(settings).__name__} at its top")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ArgumentError("hf: models need transformers: pip install 'autopar[hf]'") from error
    kind = settings.pop("model_type", None)
    if kind is None:
        raise ArgumentError(f"{path} has no model_type; it is not a transformers config")
    try:
        config = AutoConfig.for_model(kind, **settings)
        with torch.device("meta" if meta else "cpu"):
            model = AutoModelForCausalLM.from_config(config).to(dtype).train()
        if getattr(model, "loss_type", "") is None:  # takes this one anyway, with a warning that its class names none
            model.loss_type = "ForCausalLM"
    except Exception as error:  # a config's own classes raise what they like
        problem = str(error).partition("\n")[0]
        why = f"{problem[:_LONGEST]} …" if len(problem) > _LONGEST else problem
        raise ArgumentError(
            f"transformers makes no causal language model of {path} (model_type {kind!r}): {why}"
        ) from error
    try:
        tokens = torch.randint(0, config.vocab_size, (batch, sequence))
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"batch={batch} and sequence={sequence} are more tokens than this machine holds") from error
    return Named(model, {"input_ids": tokens, "labels": tokens.clone()})


def _factory(module: str, attribute: str) -> Named:
    """What goes wrong inside of the module or the factory is the caller's, and raised as it is."""
    if module.startswith("."):
        raise ArgumentError(f"{module!r} is a relative name; write the package out")
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise ArgumentError(f"can't import {module!r}: {error}") from error
    factory = getattr(imported, attribute, None)
    if not callable(factory):
        raise ArgumentError(f"{module!r} has no function {attribute!r}; name one that returns (model, sample)")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ArgumentError(f"{module}:{attribute} is called without arguments: {error}") from error
    made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ArgumentError(f"{module}:{attribute} must return (model, sample) or (model, sample, loss)")
    return Named(*made)
