"""Small mixtures of experts made at random of what real ones are made of, and random plans to compile them under.

Attention, layers and heads are those of :mod:`tests.random_models`. A :class:`Mixture` says how tokens are routed, how
the code is written that computes experts, and what their routers add to the loss.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import Case
from tests.random_models import BATCH, SEQUENCE, WIDTH, Gated, Layer, Model, Plain, Recipe, random_plan, random_recipe

HIDDEN, GROUPS = 16, 2
Routing = tuple[Tensor, Tensor]
"""The weights and the experts of each token: ``[tokens, choices]``."""


@dataclass(frozen=True)
class Mixture:
    """What a layer of experts is made of. Each field is one choice, the default the plainest."""

    experts: int = 4
    choices: int = 2
    form: str = "where"  # and those of FORMS
    expert: str = "gated"  # plain (with biases); of loops only
    scores: str = "softmax"  # sigmoid, chosen (softmax of the chosen ones)
    is_renormalized: bool = False
    scale: float = 1.0
    is_biased: bool = False  # a selection bias, which weights don't have
    is_grouped: bool = False  # experts of the better half of the groups only
    shared: str = "none"  # sum, gated
    weighted: str = "after"  # before (the tokens' rows, as Llama 4)
    router: str = "same"  # float32, biases
    auxiliary: str = "none"  # balance, z, both, entropy, masked
    dense: int = 0  # so many of the first layers have no experts


class Router(nn.Module):
    """Tokens to the experts that they get, with weights; and the logits, for the loss."""

    bias: Tensor

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture
        self.gate = nn.Linear(WIDTH, mixture.experts, bias=mixture.router == "biases")
        if mixture.is_biased:
            self.register_buffer("bias", torch.linspace(-0.1, 0.1, mixture.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.mixture
        logits = self.gate(x)
        scores = logits.sigmoid() if made.scores == "sigmoid" else logits
        if made.scores == "softmax":
            scores = F.softmax(logits, dim=-1, dtype=torch.float32 if made.router == "float32" else None)
        index = self.select(scores.detach() if made.is_biased else scores)
        weights = scores.gather(1, index)
        if made.scores == "chosen":
            weights = weights.softmax(dim=-1)
        if made.is_renormalized:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return (weights * made.scale).to(x.dtype), index, logits

    def select(self, scores: Tensor) -> Tensor:
        made = self.mixture
        scores = scores + self.bias if made.is_biased else scores
        if made.is_grouped:
            groups = scores.view(-1, GROUPS, made.experts // GROUPS)
            best = groups.amax(dim=-1).topk(GROUPS // 2, dim=-1).indices
            mask = torch.zeros_like(scores[:, :GROUPS]).scatter_(1, best, 1.0)
            hidden = ~mask.bool()[:, :, None].expand(groups.shape).reshape(scores.shape)
            scores = scores.masked_fill(hidden, -1e4)
        return scores.topk(made.choices, dim=-1, sorted=False).indices


class Looped(nn.Module):
    """A Python loop over experts, each a module."""

    def __init__(self, mixture: Mixture, recipe: Recipe) -> None:
        super().__init__()
        self.mixture = mixture
        kind = Gated if mixture.expert == "gated" else Plain
        self.experts = nn.ModuleList([kind(recipe, HIDDEN) for _ in range(mixture.experts)])

    def forward(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, token, weight in self.places(weights, index):
            rows = x[token]
            made = weight[:, None] * rows if self.mixture.weighted == "before" else rows
            made = self.experts[e](made)
            made = made if self.mixture.weighted == "before" else made * weight[:, None]
            out = self.added(out, token, made.to(x.dtype))
        return out

    def added(self, out: Tensor, token: Tensor, rows: Tensor) -> Tensor:
        return out.index_add_(0, token, rows)

    def places(self, weights: Tensor, index: Tensor) -> Any:
        """Of each expert: its number, its tokens, and the weights that they give it."""
        for e in range(len(self.experts)):
            token, slot = torch.where(index == e)
            yield e, token, weights[token, slot]


class Hit(Looped):
    """transformers 5: over the experts that are hit, of a one-hot mask."""

    def places(self, weights: Tensor, index: Tensor) -> Any:
        with torch.no_grad():
            mask = F.one_hot(index, num_classes=len(self.experts)).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            slot, token = torch.where(mask[e[0]])
            yield e[0], token, weights[token, slot]


class Skipping(Looped):
    """Experts without tokens are passed over."""

    def places(self, weights: Tensor, index: Tensor) -> Any:
        for e, token, weight in super().places(weights, index):
            if token.numel() == 0:
                continue
            yield e, token, weight


class Summed(Looped):
    """Nonzero rows of a dense matrix of weights; out of place."""

    def places(self, weights: Tensor, index: Tensor) -> Any:
        dense = torch.zeros(index.shape[0], len(self.experts), dtype=weights.dtype, device=weights.device)
        dense = dense.scatter(1, index, weights)
        for e in range(len(self.experts)):
            (token,) = (index == e).any(dim=-1).nonzero(as_tuple=True)
            yield e, token, dense[token, e]

    def added(self, out: Tensor, token: Tensor, rows: Tensor) -> Tensor:
        return out.index_add(0, token, rows)


class Stacked(nn.Module):
    """Weights of all experts in one tensor each."""

    def __init__(self, mixture: Mixture, recipe: Recipe) -> None:
        super().__init__()
        self.mixture = mixture
        self.gate_up = nn.Parameter(torch.randn(mixture.experts, 2 * HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(mixture.experts, WIDTH, HIDDEN) / HIDDEN**0.5)

    def taken(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """Weights of experts, all of them: ``[tokens, experts]``."""
        return torch.zeros(x.shape[0], self.mixture.experts, dtype=x.dtype).scatter(1, index, weights)


class StackedLoop(Stacked):
    """transformers 5: a loop over the hit ones of stacked experts."""

    def forward(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(index, num_classes=self.mixture.experts).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            e = e[0]
            slot, token = torch.where(mask[e])
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None]
            out.index_add_(0, token, rows.to(out.dtype))
        return out


class Batched(Stacked):
    """Every expert computes every token: ``bmm``."""

    def forward(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        taken = self.taken(x, weights, index).transpose(0, 1)[:, :, None]
        rows = x.repeat(self.mixture.experts, 1).view(self.mixture.experts, -1, WIDTH)
        rows = rows * taken if self.mixture.weighted == "before" else rows
        gate, up = torch.bmm(rows, self.gate_up.transpose(1, 2)).chunk(2, dim=-1)
        made = torch.bmm(F.silu(gate) * up, self.down.transpose(1, 2))
        return (made if self.mixture.weighted == "before" else made * taken).sum(dim=0)


class Einsum(Stacked):
    """The same in einsums."""

    def forward(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        gate, up = torch.einsum("nd,ehd->neh", x, self.gate_up).chunk(2, dim=-1)
        made = torch.einsum("neh,edh->ned", F.silu(gate) * up, self.down)
        return torch.einsum("ned,ne->nd", made, self.taken(x, weights, index))


class Gathered(Stacked):
    """Each token takes the weights of its experts: ``batched_mm`` of transformers."""

    def forward(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        rows = x.repeat_interleave(self.mixture.choices, dim=0)
        flat = index.reshape(-1)
        gate, up = torch.bmm(self.gate_up[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        made = torch.bmm(self.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (made * weights.reshape(-1, 1)).view(x.shape[0], -1, WIDTH).sum(dim=1)


LOOPS: Final = {"where": Looped, "hit": Hit, "skipping": Skipping, "summed": Summed}
FORMS: Final = {**LOOPS, "stacked": StackedLoop, "batched": Batched, "einsum": Einsum, "gathered": Gathered}


class Routed(nn.Module):
    """A layer's second half: tokens to tokens, and the logits of the router."""

    def __init__(self, mixture: Mixture, recipe: Recipe) -> None:
        super().__init__()
        self.mixture = mixture
        self.router = Router(mixture)
        self.experts: nn.Module = FORMS[mixture.form](mixture, recipe)
        if mixture.shared != "none":
            self.shared = Gated(recipe, HIDDEN)
        if mixture.shared == "gated":
            self.shared_gate = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        x = h.reshape(-1, WIDTH)
        weights, index, logits = self.router(x)
        out = self.experts(x, weights, index)
        if self.mixture.shared != "none":
            shared = self.shared(x)
            out = out + (shared * self.shared_gate(x).sigmoid() if self.mixture.shared == "gated" else shared)
        return out.view(h.shape), logits


class Kept(nn.Module):
    """Keeps what the router said beside it, where the model's loss finds it."""

    def __init__(self, mixture: Mixture, recipe: Recipe) -> None:
        super().__init__()
        self.routed, self.said = Routed(mixture, recipe), list[Tensor]()

    def forward(self, h: Tensor) -> Tensor:
        out, logits = self.routed(h)
        self.said.append(logits)
        return cast(Tensor, out)


class Sparse(Model):
    """A model of :mod:`tests.random_models` with experts."""

    def __init__(self, recipe: Recipe, mixture: Mixture) -> None:
        super().__init__(recipe)
        self.mixture = mixture
        for layer in list(self.layers)[min(mixture.dense, recipe.layers - 1) :]:
            cast(Layer, layer).mlp = Kept(mixture, recipe)
        for module in self.frozen():
            module.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        loss, kind = super().forward(ids, labels, mask), self.mixture.auxiliary
        kept = [module for module in self.modules() if isinstance(module, Kept)]
        logits = torch.cat([each for module in kept for each in module.said])
        for module in kept:
            module.said.clear()
        if labels is None or kind == "none":
            return loss
        return loss + 0.1 * self.auxiliary(logits, kind, mask)

    def auxiliary(self, logits: Tensor, kind: str, mask: Tensor | None) -> Tensor:
        if kind == "entropy":
            return (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        z = logits.logsumexp(-1).square().mean()
        return z if kind == "z" else self.balance(logits, kind, mask) + (z if kind == "both" else 0.0)

    def balance(self, logits: Tensor, kind: str, mask: Tensor | None) -> Tensor:
        """Of all layers together, as transformers writes it; of tokens that ``mask`` keeps if ``kind`` says so."""
        probabilities = logits.softmax(-1)
        chosen = F.one_hot(probabilities.topk(self.mixture.choices, dim=-1).indices, self.mixture.experts)
        taken = chosen.to(logits.dtype)
        if kind != "masked" or mask is None:
            return self.mixture.experts * (taken.mean(0) * probabilities.mean(0)).sum()
        kept = mask.reshape(-1).repeat(logits.shape[0] // mask.numel()).to(logits.dtype)
        shares = (taken * kept[:, None, None]).sum(0) / kept.sum()
        means = (probabilities * kept[:, None]).sum(0) / kept.sum()
        return self.mixture.experts * (shares * means).sum()


def case_of(recipe: Recipe, mixture: Mixture) -> Case:
    """The model in float64 with a batch, weights and ids from torch's generator."""
    model = Sparse(recipe, mixture).double()
    with torch.no_grad():
        model.embedding.weight.mul_(0.1)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    ids = torch.randint(recipe.vocabulary, (BATCH, SEQUENCE))
    batch = {"ids": ids, "labels": torch.randint(recipe.vocabulary, (BATCH, SEQUENCE))}
    if recipe.loss in ("ignored", "smoothed", "shifted"):
        batch["labels"][torch.rand(BATCH, SEQUENCE) < 0.3] = -100
    if recipe.batch == "mask":
        batch["mask"] = (torch.arange(SEQUENCE) < torch.randint(3, SEQUENCE + 1, (BATCH, 1))).long()
    return Case(model, batch)


_CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    "experts": (4, 4, 8, 6),
    "choices": (1, 2, 3),
    "form": tuple(FORMS),
    "expert": ("gated", "plain"),
    "scores": ("softmax", "sigmoid", "chosen"),
    "is_renormalized": (False, True),
    "scale": (1.0, 2.5),
    "is_biased": (False, True),
    "is_grouped": (False, True),
    "shared": ("none", "sum", "gated"),
    "weighted": ("after", "before"),
    "router": ("same", "float32", "biases"),
    "auxiliary": ("none", "balance", "z", "both", "entropy", "masked"),
    "dense": (0, 1),
}


def random_mixture(chance: random.Random) -> tuple[Recipe, Mixture]:
    """A model with experts; every choice is as likely to be the plain one as to be drawn."""
    recipe = replace(random_recipe(chance), mlp="experts")
    if recipe.loss == "outside":
        recipe = replace(recipe, loss="mean")
    drawn = {name: chance.choice(values) for name, values in _CHOICES.items() if chance.random() < 0.6}
    mixture = Mixture(**drawn)
    if mixture.is_grouped and mixture.choices > mixture.experts // GROUPS:
        mixture = replace(mixture, choices=1)
    return recipe, mixture


def random_sparse_plan(chance: random.Random, recipe: Recipe, mixture: Mixture) -> dict[str, Any]:
    """Arguments of :func:`autopar.compile`, all degrees pinned; losses of routers are of a batch or of microbatches."""
    plan = random_plan(chance, recipe)
    mesh = plan["mesh"]
    lent = mesh.get("dp", 1) * mesh.get("cp", 1) * mesh.get("tp", 1)
    if "ep" in mesh and lent % 4 == 0 and mixture.experts % 4 == 0 and chance.random() < 0.4:
        mesh["ep"] = 4
    if mixture.experts % mesh.get("ep", 1) != 0 or mixture.form == "gathered":
        mesh.pop("ep", None)
    if mixture.auxiliary != "none" and plan.get("vocabulary", "stage") not in ("stage", "redistributed"):
        plan |= {"vocabulary": "stage", "schedule": "1f1b"}
    counts = recipe.loss in ("ignored", "sum", "shifted", "smoothed", "weighted") or mixture.auxiliary == "masked"
    if mixture.auxiliary != "none" and not counts:
        plan["statistics"] = "microbatch"
    elif mixture.auxiliary not in ("none", "z", "entropy"):
        plan["microbatches"] = 1
    return plan
