"""Small language models made at random of what real ones are made of, and random plans to compile them under.

:class:`Recipe` says what a model is made of; its defaults are the plainest. :func:`random_recipe` and
:func:`random_plan` draw from a generator, so that a seed names a model and a plan.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import Case

HEADS, HEAD_WIDTH, SEQUENCE, BATCH = 4, 8, 8, 8
WIDTH: Final = HEADS * HEAD_WIDTH
HIDDEN: Final = -1e4
"""What is added to scores of positions that are not seen; float16 has it."""


@dataclass(frozen=True)
class Recipe:
    """What a model is made of. Each field is one choice, the default the plainest."""

    layers: int = 2
    vocabulary: int = 48
    key_heads: int = HEADS
    positions: str = "none"  # learned, rotary, bias
    norm: str = "layer"  # rms, none
    mlp: str = "gelu"  # swiglu, merged, squared, experts, shared
    window: int = 0  # of every other layer
    parallel: bool = False
    query_norm: bool = False
    post_norm: bool = False
    bias: bool = True
    merged: bool = False  # one product for queries, keys and values
    scores: str = "sdpa"  # written, capped
    stem: str = "embedding"  # convolution, scaled
    tied: bool = False
    head_bias: bool = False
    cap: bool = False
    loss: str = "mean"  # ignored, smoothed, z, sum, shifted, two, outside, weighted
    mixer: str = "attention"  # of every other layer: convolution, mean
    frozen: str = ""  # embedding, norms, first, body
    twice: int = 0  # so many of the first layers are applied again at the end
    uneven: bool = False  # layers differ in width
    residual: str = "plain"  # scaled, skip (to the last layer)
    batch: str = "tuple"  # dict, none (a mask of None), mask


class RMS(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def norm_of(recipe: Recipe, width: int = WIDTH) -> nn.Module:
    return {"layer": nn.LayerNorm, "rms": RMS, "none": lambda _: nn.Identity()}[recipe.norm](width)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with ``key_heads`` heads of keys and values."""

    bias: Tensor

    def __init__(self, recipe: Recipe, window: int) -> None:
        super().__init__()
        self.recipe, self.window = recipe, window
        keys = recipe.key_heads * HEAD_WIDTH
        if recipe.merged:
            self.qkv = nn.Linear(WIDTH, WIDTH + 2 * keys, bias=recipe.bias)
        else:
            self.q = nn.Linear(WIDTH, WIDTH, bias=recipe.bias)
            self.k = nn.Linear(WIDTH, keys, bias=recipe.bias)
            self.v = nn.Linear(WIDTH, keys, bias=recipe.bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=recipe.bias)
        if recipe.query_norm:
            self.q_norm, self.k_norm = norm_of(recipe, HEAD_WIDTH), norm_of(recipe, HEAD_WIDTH)
        if recipe.positions == "bias":
            self.slopes = nn.Parameter(torch.linspace(0.1, 0.5, HEADS))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        keys = self.recipe.key_heads * HEAD_WIDTH
        parts = (
            self.qkv(x).split((WIDTH, keys, keys), dim=-1) if self.recipe.merged else (self.q(x), self.k(x), self.v(x))
        )
        q, k, v = (part.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for part in parts)
        if self.recipe.query_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.recipe.positions == "rotary":
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        plain = mask is None and not self.window and self.recipe.positions != "bias"
        if self.recipe.scores == "sdpa" and plain:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != HEADS)
        k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
        seen = self.seen(q, mask)
        if self.recipe.scores == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_WIDTH)
        if self.recipe.scores == "capped":
            scores = 5.0 * torch.tanh(scores / 5.0)
        return (scores + seen).softmax(-1) @ v

    def seen(self, q: Tensor, mask: Tensor | None) -> Tensor:
        """What is added to scores."""
        at = torch.arange(q.shape[2], device=q.device)
        distance = at[:, None] - at[None, :]
        hidden = distance < 0
        if self.window:
            hidden = hidden | (distance >= self.window)
        added = torch.zeros_like(distance, dtype=q.dtype).masked_fill(hidden, HIDDEN)[None, None]
        if self.recipe.positions == "bias":
            added = added - self.slopes[:, None, None] * distance.clamp(min=0)
        return added if mask is None else added + (1.0 - mask[:, None, None, :].to(q.dtype)) * HIDDEN


class Convolution(nn.Module):
    """What a position and the two before it have, channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.taps = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def forward(self, x: Tensor, *_: Tensor | None) -> Tensor:
        taken: Tensor = self.taps(F.pad(self.enter(x).transpose(1, 2), (2, 0)))
        return taken.transpose(1, 2)


class Mean(nn.Module):
    """The mean of all positions so far, gated."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *_: Tensor | None) -> Tensor:
        values, gate = self.enter(x).chunk(2, dim=-1)
        mean = values.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        out: Tensor = self.out(mean * F.silu(gate))
        return out


def mixer_of(recipe: Recipe, index: int) -> nn.Module:
    if index % 2 == 0 or recipe.mixer == "attention":
        return Attention(recipe, recipe.window if index % 2 else 0)
    return Convolution() if recipe.mixer == "convolution" else Mean()


class Gated(nn.Module):
    def __init__(self, recipe: Recipe, hidden: int) -> None:
        super().__init__()
        self.merged = recipe.mlp == "merged"
        if self.merged:
            self.gate_up = nn.Linear(WIDTH, 2 * hidden, bias=recipe.bias)
        else:
            self.gate = nn.Linear(WIDTH, hidden, bias=recipe.bias)
            self.up = nn.Linear(WIDTH, hidden, bias=recipe.bias)
        self.down = nn.Linear(hidden, WIDTH, bias=recipe.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1) if self.merged else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


class Plain(nn.Module):
    def __init__(self, recipe: Recipe, hidden: int) -> None:
        super().__init__()
        self.squared = recipe.mlp == "squared"
        self.up = nn.Linear(WIDTH, hidden, bias=recipe.bias)
        self.down = nn.Linear(hidden, WIDTH, bias=recipe.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(F.relu(h).square() if self.squared else F.gelu(h))


class Experts(nn.Module):
    """Two of four experts for each token in a Python loop, with or without one for all."""

    def __init__(self, recipe: Recipe, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList([Gated(recipe, hidden) for _ in range(4)])
        self.shared = Gated(recipe, hidden) if recipe.mlp == "shared" else None

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weights, index = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).to(out.dtype))
        return (out if self.shared is None else out + self.shared(x)).view(h.shape)


def mlp_of(recipe: Recipe, hidden: int) -> nn.Module:
    kinds = {"swiglu": Gated, "merged": Gated, "experts": Experts, "shared": Experts}
    made: nn.Module = kinds.get(recipe.mlp, Plain)(recipe, hidden)
    return made


class Layer(nn.Module):
    def __init__(self, recipe: Recipe, index: int) -> None:
        super().__init__()
        self.recipe = recipe
        self.norm_1, self.norm_2 = norm_of(recipe), norm_of(recipe)
        self.attention = mixer_of(recipe, index)
        self.mlp = mlp_of(recipe, WIDTH * (2 + (index % 2 if recipe.uneven else 0)))
        if recipe.post_norm:
            self.norm_3 = norm_of(recipe)
        if recipe.residual == "scaled":
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        attended = self.attention(self.norm_1(x), cos, sin, mask)
        if self.recipe.parallel:
            return self.added(x, attended + self.mlp(self.norm_2(x)))
        x = self.added(x, attended)
        h = self.mlp(self.norm_2(x))
        return self.added(x, self.norm_3(h) if self.recipe.post_norm else h)

    def added(self, x: Tensor, change: Tensor) -> Tensor:
        return x + (self.scale * change if self.recipe.residual == "scaled" else change)


class Model(nn.Module):
    """Token ids to a loss (or, where it is made outside, logits)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.embedding = nn.Embedding(recipe.vocabulary, WIDTH)
        if recipe.positions == "learned":
            self.places = nn.Embedding(SEQUENCE, WIDTH)
        if recipe.stem == "convolution":
            self.stem = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH if recipe.bias else 1)
        self.layers = nn.ModuleList([Layer(recipe, index) for index in range(recipe.layers)])
        self.norm = norm_of(recipe)
        self.head = nn.Linear(WIDTH, recipe.vocabulary, bias=recipe.head_bias)
        if recipe.tied:
            self.head.weight = self.embedding.weight
        if recipe.loss == "two":
            self.second = nn.Linear(WIDTH, 1)
        angles = torch.arange(SEQUENCE)[:, None] / 100 ** torch.linspace(0, 1, HEAD_WIDTH // 2)[None, :]
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        for module in self.frozen():
            module.requires_grad_(False)

    def frozen(self) -> list[nn.Module]:
        """What isn't trained."""
        layers, norms = list(self.layers), [layer.norm_1 for layer in self.layers if isinstance(layer, Layer)]
        first, body = [self.embedding, layers[0]], [self.embedding, self.norm, *layers]
        kinds: dict[str, list[nn.Module]] = {"": [], "embedding": [self.embedding], "norms": norms}
        return {**kinds, "first": first, "body": body}[self.recipe.frozen]

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        if self.recipe.positions == "learned":
            x = x + self.places(torch.arange(ids.shape[1], device=ids.device))
        if self.recipe.stem == "scaled":
            x = x * WIDTH**0.5
        if self.recipe.stem == "convolution":
            x = x + self.stem(x.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2)
        first = x
        for layer in [*self.layers, *list(self.layers)[: self.recipe.twice]]:
            x = layer(x, self.cos, self.sin, mask)
        x = self.norm(x + first if self.recipe.residual == "skip" else x)
        logits = self.head(x)
        if self.recipe.cap:
            logits = 3.0 * torch.tanh(logits / 3.0)
        return logits if labels is None else self.loss(x, logits, labels)

    def loss(self, x: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        kind = self.recipe.loss
        if kind == "shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        flat, targets = logits.flatten(0, 1), labels.flatten()
        if kind == "sum":
            return F.cross_entropy(flat, targets, reduction="sum") / 100.0
        if kind == "weighted":
            losses = F.cross_entropy(flat, targets, reduction="none")
            weights = (targets % 3).to(losses.dtype)
            return (losses * weights).sum() / weights.sum()
        loss = F.cross_entropy(flat, targets, label_smoothing=0.1 if kind == "smoothed" else 0.0)
        if kind == "z":
            loss = loss + 1e-2 * flat.logsumexp(-1).square().mean()
        if kind == "two":
            loss = loss + 0.3 * F.mse_loss(self.second(x).squeeze(-1), labels.clamp(min=0).to(x.dtype) / 10)
        return loss


def outside(logits: Tensor, batch: Any) -> Tensor:
    """The loss that isn't the model's."""
    return F.cross_entropy(logits.flatten(0, 1), (batch["ids"] if isinstance(batch, dict) else batch[0]).flatten())


def case_of(recipe: Recipe) -> Case:
    """The model in float64 with a batch, weights and ids from torch's generator."""
    model = Model(recipe).double()
    with torch.no_grad():
        model.embedding.weight.mul_(0.1)  # or a tied head is sure of the token that it sees, and no gradient is left
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    ids = torch.randint(recipe.vocabulary, (BATCH, SEQUENCE))
    batch: dict[str, Any] = {"ids": ids}
    if recipe.loss != "outside":
        batch["labels"] = torch.randint(recipe.vocabulary, (BATCH, SEQUENCE))
        if recipe.loss in ("ignored", "smoothed", "shifted"):
            batch["labels"][torch.rand(BATCH, SEQUENCE) < 0.3] = -100
    if recipe.batch == "mask":
        batch["mask"] = (torch.arange(SEQUENCE) < torch.randint(3, SEQUENCE + 1, (BATCH, 1))).long()
    elif recipe.batch == "none":
        batch["mask"] = None
    if recipe.batch == "tuple":
        return Case(model, tuple(batch.values()), outside if recipe.loss == "outside" else None)
    return Case(model, batch, outside if recipe.loss == "outside" else None)


_CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    "layers": (1, 2, 3, 4),
    "vocabulary": (48, 50, 53),
    "key_heads": (4, 2, 1),
    "positions": ("none", "learned", "rotary", "bias"),
    "norm": ("layer", "rms", "none"),
    "mlp": ("gelu", "swiglu", "merged", "squared", "experts", "shared"),
    "window": (0, 0, 3),
    "parallel": (False, True),
    "query_norm": (False, True),
    "post_norm": (False, True),
    "bias": (False, True),
    "merged": (False, True),
    "scores": ("sdpa", "sdpa", "written", "capped"),
    "stem": ("embedding", "scaled", "convolution"),
    "tied": (False, True),
    "head_bias": (False, True),
    "cap": (False, True),
    "loss": ("mean", "ignored", "smoothed", "z", "sum", "shifted", "two", "outside", "weighted"),
    "mixer": ("attention", "convolution", "mean"),
    "frozen": ("", "", "embedding", "norms", "first", "body"),
    "twice": (0, 0, 1, 2, 4),
    "uneven": (False, False, True),
    "residual": ("plain", "scaled", "skip"),
    "batch": ("tuple", "dict", "none", "mask"),
}


def random_recipe(chance: random.Random) -> Recipe:
    """Every choice is as likely to be the plain one as to be drawn."""
    drawn = {name: chance.choice(values) for name, values in _CHOICES.items() if chance.random() < 0.5}
    return Recipe(**drawn)


_MESHES: Final[tuple[dict[str, int], ...]] = (
    *({"tp": 2}, {"tp": 4}, {"pp": 2}, {"pp": 4}, {"cp": 2}, {"dp": 4}),
    *({"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "cp": 2}),
    *({"cp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2}, {"pp": 2, "cp": 2, "tp": 2}),
)
_CHUNKS: Final = {"zb-v": 2, "v-half": 2, "v-min": 2, "dualpipe-v": 2, "interleaved": 2}
_SCHEDULES: Final = (*_CHUNKS, "1f1b", "gpipe", "naive", "zb-h1", "zb-2p", "synthesized")
_VOCABULARIES: Final = ("redistributed", "stage", "naive", "vocab-1", "vocab-2", "interlaced")
_OFFLOADS: Final = (("optimizer",), ("activations",), ("parameters",), ("parameters", "activations"))


def random_plan(chance: random.Random, recipe: Recipe) -> dict[str, Any]:
    """Arguments of :func:`autopar.compile`, all degrees pinned. Some don't fit each other, or the model."""
    mesh = dict(chance.choice(_MESHES))
    plan: dict[str, Any] = {"mesh": mesh, "microbatches": chance.choice((1, 2, 4))}
    lent = mesh.get("dp", 1) * mesh.get("cp", 1)
    lent = lent if lent > 1 else mesh.get("tp", 1)
    if recipe.mlp in ("experts", "shared") and lent > 1 and chance.random() < 0.7:
        mesh["ep"] = lent
    if mesh.get("pp", 1) > 1:
        plan |= _random_pipeline(chance, recipe, mesh["pp"])
    plan["zero"] = chance.choice((0, 0, 1, 2, 3))
    if mesh.get("cp", 1) > 1:
        plan["attention"] = chance.choice(("auto", "all_gather", "ring", "heads"))
        plan["cp_order"] = chance.choice(("auto", "contiguous"))
    optional = {
        "recompute": chance.choice(("full", "selective", "none")),
        "head_chunks": chance.choice((2, 3)),
        "offload": chance.choice(_OFFLOADS),
        "activations": "lossless",
        "clip_norm": 0.5,
    }
    return plan | {name: value for name, value in optional.items() if chance.random() < 0.35}


def _random_pipeline(chance: random.Random, recipe: Recipe, pp: int) -> dict[str, Any]:
    schedule, vocabulary = chance.choice(_SCHEDULES), chance.choice(_VOCABULARIES)
    if pp * _CHUNKS.get(schedule, 1) > recipe.layers + recipe.twice:
        schedule = "1f1b"
    if vocabulary == "interlaced":
        schedule = "interlaced"
    return {"schedule": schedule, "vocabulary": vocabulary, "microbatches": chance.choice((2, 4))}
