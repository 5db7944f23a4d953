"""Mixtures of experts in plain PyTorch, as people write them: Python loops over experts that take their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import VOCABULARY, Case, tokens

WIDTH, HIDDEN, EXPERTS, SEQUENCE = 16, 24, 4, 8


class Gated(nn.Module):
    """Mixtral's expert: SwiGLU without biases."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, hidden, bias=False)
        self.w2 = nn.Linear(hidden, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Plain(nn.Sequential):
    """An MLP with biases, as ``nn.Sequential``."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))


class Normed(nn.Module):
    """An MLP behind a norm of its own, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, dim=-1)
        return self.down(torch.cat((gate * up.sigmoid(), up), dim=-1)) * self.scale


class Mixture(nn.Module):
    """What the loops below have in common: a linear router over all tokens, and a list of experts."""

    def __init__(self, expert: Callable[[], nn.Module] = Gated, experts: int = EXPERTS, choices: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList([expert() for _ in range(experts)])
        self.choices = choices

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = self.gate(x).softmax(dim=-1).topk(self.choices, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), index

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        return self.mix(x, *self.choose(x)).view(h.shape)

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        raise NotImplementedError


class ByWhere(Mixture):
    """``where`` of the condition, ``index_add_``."""

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Mixtral(Mixture):
    """The loop that transformers' Mixtral had: a one-hot mask, and an index with None."""

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros((x.shape[0], WIDTH), dtype=x.dtype, device=x.device)
        mask = F.one_hot(index, num_classes=len(self.experts)).permute(2, 1, 0)
        for e in range(len(self.experts)):
            slot, token = torch.where(mask[e])
            state = x[None, token].reshape(-1, WIDTH)
            state = self.experts[e](state) * weights[token, slot, None]
            out.index_add_(0, token, state.to(x.dtype))
        return out


class ByMask(Mixture):
    """Boolean indexing on both sides."""

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            chosen = index == e
            mask = chosen.any(dim=-1)
            out[mask] += expert(x[mask]) * (weights * chosen).sum(dim=-1)[mask].unsqueeze(-1)
        return out


class ByNonzero(Mixture):
    """A matrix of coordinates; out of place."""

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = x.new_zeros(x.shape)
        for e, expert in enumerate(self.experts):
            places = (index == e).nonzero()
            y = weights[places[:, 0], places[:, 1]].unsqueeze(1) * expert(x.index_select(0, places[:, 0]))
            out = out.index_add(0, places[:, 0], y)
        return out


class Shazeer(Mixture):
    """Noiseless top-k gates scattered over all experts; a token is its expert's where the gate isn't zero."""

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        gates = torch.zeros(x.shape[0], len(self.experts), dtype=x.dtype).scatter(1, index, weights)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            (token,) = gates[:, e].nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * gates[token, e].view(-1, 1))
        return out


class Switch(Mixture):
    """One expert for each token (Switch Transformer), which replaces the token; the weight comes after the loop."""

    def __init__(self, expert: Callable[[], nn.Module] = Plain, experts: int = EXPERTS) -> None:
        super().__init__(expert, experts, choices=1)

    def forward(self, h: Tensor) -> Tensor:
        weight, choice = self.gate(h).softmax(dim=-1).max(dim=-1)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            out[choice == e] = expert(h[choice == e])
        return out * weight.unsqueeze(-1)


class Thresholded(Mixture):
    """Any number of experts for a token: those whose gate is above their mean."""

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        gates = self.gate(x).sigmoid()
        wanted = gates > gates.mean(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token = wanted[:, e].nonzero().squeeze(-1)
            out.index_add_(0, token, expert(x[token]) * gates[token, e].unsqueeze(-1))
        return out


class OneTensor(Mixture):
    """Experts' weights in one tensor each, of which the loop takes one."""

    def __init__(self) -> None:
        super().__init__(nn.Identity)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(index == e)
            y = F.linear(torch.relu(x[token] @ self.up[e] + self.bias[e]), self.down[e])
            out.index_add_(0, token, y * weights[token, slot].unsqueeze(-1))
        return out


class Unequal(ByWhere):
    """Experts of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Gated(), Plain(), Gated(), Gated(HIDDEN // 2)])


class Shared(ByWhere):
    """With an expert that all tokens have, and a residual that the loop adds to."""

    def __init__(self) -> None:
        super().__init__(Plain)
        self.shared = Gated()

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = self.shared(x) + x
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Layer(nn.Module):
    """The mixture as the second half of a layer."""

    def __init__(self, mixture: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.moe = mixture()

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.mix(h)
        return h + self.moe(self.norm(h))


class Model(nn.Module):
    """Token ids to the cross entropy of the next ones, ``times`` through ``layers`` layers with a mixture each."""

    def __init__(self, mixture: Callable[[], nn.Module], layers: int = 2, times: int = 1) -> None:
        super().__init__()
        self.times = times
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(mixture) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        h = self.embedding(ids)
        for layer in [*self.layers] * self.times:
            h = layer(h)
        return F.cross_entropy(self.head(h).view(-1, VOCABULARY), targets.view(-1))


MIXTURES: Final[dict[str, Callable[[], nn.Module]]] = {
    "where": ByWhere,
    "where_biases": lambda: ByWhere(Plain),
    "where_normed": lambda: ByWhere(Normed),
    "mixtral": Mixtral,
    "mask": ByMask,
    "nonzero": ByNonzero,
    "shazeer": Shazeer,
    "switch": Switch,
    "thresholded": Thresholded,
    "one_tensor": OneTensor,
    "unequal": Unequal,
    "shared": Shared,
}


def looped(mixture: Callable[[], nn.Module], batch: int, *, layers: int = 2, times: int = 1) -> Case:
    """A case of :mod:`tests.models`."""
    ids = tokens(batch, sequence=SEQUENCE)
    return Case(Model(mixture, layers, times), (ids, ids.roll(-1, dims=1)))


class Guarded(Mixture):
    """A loop that passes over experts without tokens, by asking in some way."""

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        counts = self.counts(index)
        for e, expert in enumerate(self.experts):
            if self.skips(counts, index, e):
                continue
            token, slot = torch.where(index == e)
            if self.skips_taken(token):
                continue
            out = self.added(out, token, expert(x[token]) * weights[token, slot, None])
        return out

    def counts(self, index: Tensor) -> list[int]:
        return []

    def skips(self, counts: list[int], index: Tensor, e: int) -> bool:
        return False

    def skips_taken(self, token: Tensor) -> bool:
        return False

    def added(self, out: Tensor, token: Tensor, y: Tensor) -> Tensor:
        return out.index_add_(0, token, y)


class ByLength(Guarded):
    def skips_taken(self, token: Tensor) -> bool:
        return len(token) == 0


class BySize(Guarded):
    def skips_taken(self, token: Tensor) -> bool:
        return token.shape[0] == 0


class ByAny(Guarded):
    def skips(self, counts: list[int], index: Tensor, e: int) -> bool:
        return not (index == e).any()


class BySum(Guarded):
    def skips(self, counts: list[int], index: Tensor, e: int) -> bool:
        return bool((index == e).sum() == 0)


class ByCounts(Guarded):
    """DeepSeek's published code."""

    def counts(self, index: Tensor) -> list[int]:
        return torch.bincount(index.flatten(), minlength=EXPERTS).tolist()

    def skips(self, counts: list[int], index: Tensor, e: int) -> bool:
        return counts[e] == 0


class ByAnother(Guarded):
    """Wrong: asks for the tokens of the first expert."""

    def skips(self, counts: list[int], index: Tensor, e: int) -> bool:
        return not (index == 0).any()


class Scaled(ByLength):
    """Computes with the number of tokens."""

    def added(self, out: Tensor, token: Tensor, y: Tensor) -> Tensor:
        return out.index_add_(0, token, y * len(token))


class Otherwise(Mixture):
    """Computes something else where an expert has no tokens."""

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            if token.numel() == 0:
                out = out + 1
            else:
                out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Few(Guarded):
    """Drops experts with few tokens."""

    def skips_taken(self, token: Tensor) -> bool:
        return token.numel() < 3


class Between(ByWhere):
    """Reads what the experts so far have added."""

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out, total = torch.zeros_like(x), x.new_zeros(())
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
            total = total + out.mean()
        return out + total


class Mixed(ByWhere):
    """An expert's tokens see each other."""

    def mix(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            y = expert(x[token])
            out = out.index_add(0, token, (y - y.mean(dim=0)) * weights[token, slot, None])
        return out


class Selected(nn.Module):
    """No loop over experts at all: the rows above the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        rows = h.reshape(-1, WIDTH)
        return h + self.up(rows[rows.mean(dim=1) > 0]).mean()


class Counted(nn.Module):
    """No loop over experts: divides by a count, unless that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        count = (h > 1).sum()
        return self.up(h) / count if count > 0 else self.up(h)


GUARDED: Final = (ByLength, BySize, ByAny, BySum, ByCounts)
REFUSED: Final[dict[Callable[[], nn.Module], str]] = {
    ByAnother: "isn't the choice of the expert whose body follows",
    Scaled: "the number of these tokens is computed with",
    Otherwise: "something else is computed where it doesn't",
    Few: "data-dependent",
    Counted: "something else is computed where it doesn't",
    Between: "reads what some of the experts have added so far",
    Mixed: "mixes the tokens of an expert",
    Selected: "depends on values",
}
