"""Mixture-of-experts models in plain PyTorch that compute with masks: every expert has a fixed number of slots.

GShard (Lepikhin et al., ICLR 2021), Switch (Fedus et al., JMLR 2022), expert choice (Zhou et al., NeurIPS 2022) and
soft mixtures (Puigcerver et al., ICLR 2024), as their authors' codes and papers write them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import SEQUENCE, VOCABULARY, Attention, Case, tokens

WIDTH, HIDDEN, EXPERTS = 16, 24, 8
Routed = tuple[Tensor, Tensor]
"""What a layer of experts returns: tokens, and the losses of its router as one scalar."""


def stack(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / shape[-2] ** 0.5)


class Experts(nn.Module):
    """``[E, slots, width]`` to the same: two products with a weight per expert, each with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = stack(EXPERTS, WIDTH, HIDDEN), stack(EXPERTS, HIDDEN, WIDTH)
        self.up_bias, self.down_bias = stack(EXPERTS, 1, HIDDEN), stack(EXPERTS, 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.down_bias, F.gelu(torch.bmm(x, self.up) + self.up_bias), self.down)


class GShard(nn.Module):
    """Each row of the batch is a group with slots of its own; a token's second expert is drawn by its probability.

    Algorithm 1 of the paper: einsums with a mask ``[group, token, expert, slot]``, tokens beyond the capacity dropped.
    """

    def __init__(self, capacity_factor: float = 1.5, *, is_random: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.wi, self.wo = stack(EXPERTS, WIDTH, HIDDEN), stack(EXPERTS, HIDDEN, WIDTH)
        self.capacity_factor, self.is_random = capacity_factor, is_random

    def forward(self, x: Tensor) -> Routed:
        combine, loss = self.route(self.gate(x).softmax(-1))
        dispatch = (combine > 0).to(x.dtype)
        slots = torch.einsum("gsec,gsm->egcm", dispatch, x)
        h = F.relu(torch.einsum("egcm,emh->egch", slots, self.wi))
        slots = torch.einsum("egch,ehm->egcm", h, self.wo)
        return torch.einsum("gsec,egcm->gsm", combine, slots), loss

    def route(self, gates: Tensor) -> Routed:
        capacity = int(2 * self.capacity_factor * gates.shape[1] / EXPERTS)
        first = F.one_hot(gates.argmax(-1), EXPERTS).to(gates.dtype)
        others = gates * (1 - first)
        second = F.one_hot(others.argmax(-1), EXPERTS).to(gates.dtype)
        loss = (first.mean(1) * gates.mean(1)).sum(-1).mean() * EXPERTS
        g1, g2 = (gates * first).sum(-1), (gates * second).sum(-1)
        total = g1 + g2 + 1e-9
        g1, g2 = g1 / total, g2 / total
        if self.is_random:
            second = second * (2 * g2 > torch.rand_like(g2)).to(gates.dtype).unsqueeze(-1)
        place1 = (first.cumsum(1) - 1) * first
        place2 = (second.cumsum(1) - 1 + first.sum(1, keepdim=True)) * second
        first, second = first * (place1 < capacity), second * (place2 < capacity)
        slot1 = one_hot_or_none((place1 * first).sum(-1), capacity)
        slot2 = one_hot_or_none((place2 * second).sum(-1), capacity)
        combine = torch.einsum("gs,gse,gsc->gsec", g1, first, slot1)
        return combine + torch.einsum("gs,gse,gsc->gsec", g2, second, slot2), loss


def one_hot_or_none(places: Tensor, slots: int) -> Tensor:
    """One-hot places; zeros for those past the last slot."""
    return (places.unsqueeze(-1) == torch.arange(slots, device=places.device)).to(places.dtype)


class Switch(nn.Module):
    """One expert a token, with a capacity for all tokens of the batch; auxiliary and z loss; jitter on what routes."""

    def __init__(self, capacity_factor: float = 1.25, jitter: float = 0.0) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        self.capacity_factor, self.jitter = capacity_factor, jitter

    def forward(self, x: Tensor) -> Routed:
        tokens = x.reshape(-1, WIDTH)
        capacity = int(self.capacity_factor * tokens.shape[0] / EXPERTS)
        logits = self.router(self.shaken(tokens)).float()
        probabilities = logits.softmax(-1)
        gate, expert = probabilities.max(-1)
        chosen = F.one_hot(expert, EXPERTS)
        place = chosen.cumsum(0) * chosen - 1
        kept = chosen * (place < capacity)
        mask = F.one_hot((place * kept).sum(-1), capacity).unsqueeze(1) * kept.unsqueeze(-1)
        dispatch = mask.to(x.dtype)
        slots = self.experts(torch.einsum("tec,tm->ecm", dispatch, tokens))
        y = torch.einsum("tec,ecm->tm", dispatch * gate.to(x.dtype)[:, None, None], slots)
        balance = EXPERTS * (chosen.to(gate.dtype).mean(0) * probabilities.mean(0)).sum()
        return y.view(x.shape), balance + 0.1 * (logits.logsumexp(-1) ** 2).mean()

    def shaken(self, x: Tensor) -> Tensor:
        """Multiplied by noise around 1, in training."""
        if not self.training or not self.jitter:
            return x
        return x * (1 + self.jitter * (2 * torch.rand_like(x) - 1))


class ExpertChoice(nn.Module):
    """Each expert takes the tokens of a row that like it best, by one-hot masks."""

    def __init__(self, capacity_factor: float = 2.0) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = stack(EXPERTS, WIDTH, HIDDEN), stack(EXPERTS, HIDDEN, WIDTH)
        self.capacity_factor = capacity_factor

    def forward(self, x: Tensor) -> Routed:
        slots = int(self.capacity_factor * x.shape[1] / EXPERTS)
        scores = self.router(x).softmax(-1)
        gates, index = scores.transpose(1, 2).topk(slots, dim=-1)
        taken = F.one_hot(index, x.shape[1]).to(x.dtype)
        h = F.silu(torch.einsum("becm,emh->bech", torch.einsum("becs,bsm->becm", taken, x), self.up))
        y = torch.einsum("bech,ehm->becm", h, self.down)
        return torch.einsum("becs,bec,becm->bsm", taken, gates, y), scores.new_zeros(())


class ExpertChoiceOfBatch(nn.Module):
    """Each expert takes the tokens of the whole batch that like it best, by index."""

    def __init__(self, capacity_factor: float = 2.0) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.capacity_factor = capacity_factor

    def forward(self, x: Tensor) -> Routed:
        tokens = x.reshape(-1, WIDTH)
        slots = int(self.capacity_factor * tokens.shape[0] / EXPERTS)
        scores = self.router(tokens).softmax(-1)
        gates, index = scores.t().topk(slots, dim=-1)
        y = self.experts(tokens[index]) * gates.unsqueeze(-1)
        out = torch.zeros_like(tokens).index_add(0, index.reshape(-1), y.reshape(-1, WIDTH))
        return out.view(x.shape), scores.new_zeros(())


class Dense(nn.Module):
    """Every expert computes every token, weighted by a sigmoid of its score where it is among the best two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Routed:
        tokens = x.reshape(-1, WIDTH)
        logits = self.router(tokens)
        best, index = logits.topk(2, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter(1, index, best).transpose(0, 1).sigmoid()
        routed = tokens.repeat(EXPERTS, 1) * scores.reshape(-1, 1)
        y = self.experts(routed.view(EXPERTS, -1, WIDTH))
        taken = F.one_hot(index, EXPERTS).to(logits.dtype).mean((0, 1))
        return y.sum(0).view(x.shape), EXPERTS * (taken * logits.softmax(-1).mean(0)).sum()


class Soft(nn.Module):
    """Each slot of each expert is a mixture of a row's tokens, each token one of all slots."""

    def __init__(self, slots: int = 2) -> None:
        super().__init__()
        self.phi = stack(WIDTH, EXPERTS * slots)
        self.up, self.down = stack(EXPERTS, WIDTH, HIDDEN), stack(EXPERTS, HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Routed:
        logits = (x @ self.phi).unflatten(-1, (EXPERTS, -1))
        slots = torch.einsum("bsec,bsm->becm", logits.softmax(1), x)
        y = torch.einsum("bech,ehm->becm", F.gelu(torch.einsum("becm,emh->bech", slots, self.up)), self.down)
        return torch.einsum("bsec,becm->bsm", logits.flatten(2).softmax(-1).view_as(logits), y), x.new_zeros(())


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.experts = Attention(WIDTH, 4), experts

    def forward(self, x: Tensor) -> Routed:
        x = x + self.attention(self.attention_norm(x))
        y, loss = self.experts(self.norm(x))
        return x + y, loss


class Decoder(nn.Module):
    """Layers of attention and experts; cross entropy plus the routers' losses."""

    def __init__(self, experts: Callable[[], nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(experts()) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x, losses = self.embedding(ids), []
        for layer in self.layers:
            x, loss = layer(x)
            losses.append(loss)
        entropy = F.cross_entropy(self.head(x).view(-1, VOCABULARY), targets.view(-1))
        return entropy + 0.1 * torch.stack(losses).sum()


LAYERS: Final[dict[str, Callable[[], nn.Module]]] = {
    "gshard": lambda: GShard(is_random=False),
    "switch": Switch,
    "expert_choice": ExpertChoice,
    "expert_choice_of_batch": ExpertChoiceOfBatch,
    "dense": Dense,
    "soft": Soft,
}


def decoder(experts: Callable[[], nn.Module], batch: int, *, layers: int = 2, sequence: int = SEQUENCE) -> Case:
    ids = tokens(batch, sequence=sequence)
    return Case(Decoder(experts, layers), (ids, ids.roll(-1, dims=1)))
