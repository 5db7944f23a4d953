"""A mixture of experts of transformers, unmodified, with its experts split over 4 simulated ranks of this process.

What you see: where experts are and what is sent for them, how many tokens each expert got, that the ranks compute what
one device does, and what changes once hot experts are stored apart. It takes about 20 seconds.
"""

from __future__ import annotations

import torch
from rich.console import Console
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from autopar.report import load_table

EXPERTS, RANKS = 8, 4


def build_model() -> MixtralForCausalLM:
    """Two layers of 8 experts, of which each token takes 2; some experts are liked better than others."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight *= torch.linspace(2.0, 0.1, EXPERTS).unsqueeze(1) * 20
    return model


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def main() -> None:
    console = Console(width=110)
    model = build_model()
    tokens = torch.randint(0, 256, (8, 32))
    batch = {"input_ids": tokens, "labels": tokens}

    mesh = {"dp": RANKS, "ep": RANKS}
    job = autopar.compile(model, gpus=RANKS, sample=batch, mesh=mesh, optimizer=sgd, cluster="h100")
    console.rule("the plan")
    console.print("\n".join(str(job.plan).splitlines()[:4]), highlight=False, markup=False, soft_wrap=True)
    console.print(job.plan.explain_experts(), highlight=False, markup=False, soft_wrap=True)

    console.rule("loads of experts in the second step")
    result = job.simulate(batch, steps=2)
    console.print(load_table(result.expert_load[-1], job.plan.experts))

    console.rule("against one device")
    verification = job.verify(batch, steps=2)
    console.print(f"equal: {verification.ok}; relative error of the loss {verification.loss_error:.1e}\n")

    console.rule("hot experts apart")
    loads = result.expert_load[-1]
    apart = autopar.compile(
        model, gpus=RANKS, sample=batch, mesh=mesh, optimizer=sgd, cluster="h100", expert_load=loads
    )
    console.print(apart.plan.explain_experts(), highlight=False, markup=False, soft_wrap=True)
    again = apart.simulate(batch, steps=2)
    console.print(load_table(again.expert_load[-1], apart.plan.experts))
    text = f"losses before {result.losses} and after {again.losses}: the same computation"
    console.print(text, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
