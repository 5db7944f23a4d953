"""What a backward split into I and W keeps between the two: ours, and that of torch.distributed.pipelining.

    python benchmarks/split_backward.py [--layers N] [--width H] [--sequence S] [--batch B] [--json]

A pipeline stage in the middle of each model runs forward and I of one microbatch, in float32 on the CPU. Bytes are
of live storages, over those that the forward kept for the backward (the stage's input included, as both keep it).
Not counted: weights and their gradients, what was sent to the next stage, and the gradient sent to the one before.
torch's functions run the same emitted stage, and keep what its PipelineStage keeps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from models import GPT, Sizes
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from autopar.api import prepare
from autopar.batch import flatten
from autopar.codegen import EmittedStage, emit
from autopar.mesh import Mesh
from autopar.runtime import Axes
from autopar.runtime.later import accumulate
from autopar.runtime.load import load_program
from autopar.simulate.memory import MemoryTracker

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    layers: Annotated[int, typer.Option(min=1, help="Of the stage.")] = 2,
    width: Annotated[int, typer.Option(min=8, help="Hidden size, 32 per head.")] = 256,
    sequence: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a microbatch.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures instead of a table.")] = False,
) -> None:
    """Measure a few kinds of layers."""
    torch.set_num_threads(1)
    sizes = Sizes(layers + 2, width, width // 32, 512, sequence, batch)
    figures = {name: measure(make(sizes), sizes) for name, make in MODELS.items()}
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        Console().print(table(figures))


def plain(sizes: Sizes) -> nn.Module:
    return GPT(sizes)


def gpt2(sizes: Sizes) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=sizes.vocabulary,
        n_positions=sizes.sequence,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config)


def llama(sizes: Sizes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.width * 7 // 2,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=max(1, sizes.heads // 4),
        max_position_embeddings=sizes.sequence,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[Sizes], nn.Module]] = {"plain block": plain, "GPT-2": gpt2, "Llama": llama}


@dataclass(frozen=True)
class Stage:
    """A stage of layers alone, with weights; ``inputs`` are the tensors of the batch that it reads."""

    module: nn.Module
    emitted: EmittedStage
    inputs: tuple[Tensor, ...]
    axes: Axes

    def received(self) -> list[Tensor]:
        return [torch.randn(t.shape).requires_grad_(t.needs_grad) for t in self.emitted.program.receives]


def middle_stage(model: nn.Module, sizes: Sizes, *, split_backward: bool) -> Stage:
    """All layers but the first and the last."""
    ids = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.sequence))
    batch = (ids, ids) if isinstance(model, GPT) else {"input_ids": ids, "labels": ids}
    graph = prepare(model, batch, None)[0]
    units = [i for i, call in enumerate(graph.calls) if graph.block_of(call).kind != "tables"]
    layers = [i for i in units if graph.block_of(graph.calls[i]).kind == "layer" and "." in graph.calls[i].path]
    own = [i for i in layers if graph.calls[i].path.rsplit(".", 1)[1].isdigit()][1:-1]
    stages = [[i for i in units if i < own[0]], own, [i for i in units if i > own[-1]]]
    emitted = emit(graph, stages, Mesh(pp=3), microbatches=1, digest="", split_backward=split_backward)[1]
    axes = Axes.alone(Mesh(), 0, "cpu")
    module = load_program(emitted.text, filename="stage_1.py").stage(axes)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    module.load_state_dict({name: named[name].detach() for name in module.state_dict()}, assign=True)
    tensors = flatten(batch)[0]
    return Stage(module, emitted, tuple(tensors[i.path] for i in emitted.program.inputs), axes)


def measure(model: nn.Module, sizes: Sizes) -> dict[str, float]:
    """Bytes that the forward keeps, and what each side keeps between I and W over them."""
    forward, ours = run_ours(middle_stage(model, sizes, split_backward=True))
    plain_forward, theirs = run_torch(middle_stage(model, sizes, split_backward=False))
    return {"forward_bytes": forward, "ours": ours / forward, "torch": theirs / plain_forward}


def run_ours(stage: Stage) -> tuple[int, int]:
    """Bytes after F and after I of the second microbatch; the first one makes the gradients of weights."""
    later = stage.axes.later
    with MemoryTracker() as tracker:
        for microbatch in range(2):
            before = tracker.live_bytes
            received = stage.received()
            sent = stage.module(*received, *stage.inputs)
            edges = [get_gradient_edge(t) for t in sent if t.requires_grad]
            shapes = [t.shape for t in sent if t.requires_grad]
            del sent
            forward = tracker.live_bytes - before
            given = [torch.randn(shape) for shape in shapes]
            with later.putting_off((1, microbatch)):
                torch.autograd.backward(edges, given)
            del edges, given, received
            between = tracker.live_bytes - before
            later.run((1, microbatch), accumulate)
    return forward, between


def run_torch(stage: Stage) -> tuple[int, int]:
    """The same with torch's split; its PipelineStage holds the groups, the inputs, outputs and their gradients."""
    weights = [p for p in stage.module.parameters() if p.requires_grad]
    with MemoryTracker() as tracker:
        for _ in range(2):
            before = tracker.live_bytes
            received: list[Any] = stage.received()
            sent = list(stage.module(*received, *stage.inputs))
            forward = tracker.live_bytes - before - sum(t.nbytes for t in sent)
            given = [torch.randn(t.shape) if t.requires_grad else None for t in sent]
            _, groups = stage_backward_input(sent, given, received, iter(weights))
            own = sum(t.grad.nbytes for t in received if t.grad is not None)
            outputs = sum(t.nbytes for t in sent)
            between = tracker.live_bytes - before - own - outputs
            stage_backward_weight(iter(weights), groups)
            del received, sent, given, groups
    return forward, between


def table(figures: dict[str, dict[str, float]]) -> Table:
    made = Table(title="Kept between I and W / by the forward")
    for name, justify in (("layers", "left"), ("forward MiB", "right"), ("autopar", "right"), ("torch", "right")):
        made.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, found in figures.items():
        ratios = [f"{found[side]:.2f}" for side in ("ours", "torch")]
        made.add_row(name, f"{found['forward_bytes'] / 2**20:.1f}", *ratios)
    return made


if __name__ == "__main__":
    app()
