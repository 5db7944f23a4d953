"""Layers and losses that few language models have: samples are split, and it is the same as on one device."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import simulate
from autopar.errors import CaptureError, ShardingError
from autopar.runtime.job import run_rank
from tests.fast_cluster import FAST
from tests.pinned import compile_pinned

ROWS, WIDTH, STEPS = 8, 8, 8

Body = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """``x [b, width]`` to ``shape`` for each row, through ``body``, to a mean that tells elements apart."""

    def __init__(self, shape: tuple[int, ...], body: Body, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.enter, self.shape = nn.Linear(WIDTH, prod(shape)), shape
        self.layer, self.body = layer or nn.Identity(), body

    def forward(self, x: Tensor) -> Tensor:
        made = self.body(self.layer, self.enter(x).unflatten(-1, self.shape))
        return (made * torch.linspace(0.5, 1.5, made.shape[-1], dtype=made.dtype)).square().mean()


class Loss(nn.Module):
    """The mean loss of a product and a target."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.body = nn.Linear(WIDTH, WIDTH), body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(self.enter(x), y)


def first(layer: Any, x: Tensor) -> Tensor:
    """Of a recurrent layer, the outputs."""
    return layer(x)[0]


def ends(layer: Any, x: Tensor) -> Tensor:
    """Of an LSTM, outputs and both states at the end."""
    outputs, (hidden, cell) = layer(x)
    return outputs.sum(1) + hidden[-1] * cell[0]


def steps_first(layer: Any, x: Tensor) -> Tensor:
    return layer(x.transpose(0, 1))[0].transpose(0, 1)


def plain(layer: Any, x: Tensor) -> Tensor:
    return layer(x)


def last_step(_: Any, x: Tensor) -> Tensor:
    """The step of each row that is largest, and one that the batch's number of rows doesn't say."""
    rows, last = torch.arange(len(x)), x[..., 0].argmax(-1)
    return x[rows, last] + x[rows[:, None], torch.stack([last - STEPS, last], 1)].sum(1)


IMAGE = (4, 4, 4)
LAYERS: dict[str, Callable[[], Model]] = {
    "gru": lambda: Model((STEPS, 4), first, nn.GRU(4, 6, batch_first=True)),
    "gru_both_ways": lambda: Model((STEPS, 4), first, nn.GRU(4, 6, 2, batch_first=True, bidirectional=True)),
    "lstm": lambda: Model((STEPS, 4), ends, nn.LSTM(4, 6, batch_first=True)),
    "lstm_projected": lambda: Model((STEPS, 4), first, nn.LSTM(4, 6, batch_first=True, proj_size=2)),
    "rnn_steps_first": lambda: Model((STEPS, 4), steps_first, nn.RNN(4, 6)),
    "lstm_cell": lambda: Model((4,), first, nn.LSTMCell(4, 6)),
    "gru_cell": lambda: Model((4,), plain, nn.GRUCell(4, 6)),
    "transposed": lambda: Model(IMAGE, plain, nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, output_padding=1)),
    "transposed_groups": lambda: Model(IMAGE, plain, nn.ConvTranspose2d(4, 8, 3, groups=2)),
    "same": lambda: Model(IMAGE, plain, nn.Conv2d(4, 8, 3, padding="same")),
    "bilinear": lambda: Model((8,), lambda layer, x: layer(x, x.exp()), nn.Bilinear(8, 8, 4)),
    "instances": lambda: Model((4, 6), plain, nn.InstanceNorm1d(4, affine=True)),
    "pool": lambda: Model(IMAGE, plain, nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1))),
    "upsample": lambda: Model(IMAGE, plain, nn.Upsample(scale_factor=2, mode="bilinear")),
    "shuffle": lambda: Model(IMAGE, plain, nn.Sequential(nn.PixelShuffle(2), nn.PReLU())),
    "folds": lambda: Model(IMAGE, plain, nn.Sequential(nn.Unfold(2, stride=2), nn.Fold(4, 2, stride=2))),
    "warped": lambda: Model(
        (2, 3),
        lambda _, x: F.grid_sample(
            x.sin().unsqueeze(1), F.affine_grid(x, [len(x), 1, 4, 4], align_corners=False), align_corners=False
        ),
    ),
    "spectrum": lambda: Model((STEPS,), lambda _, x: torch.fft.irfft(torch.fft.rfft(x) * 2)[..., :4]),
    "inverse": lambda: Model((3, 3), lambda _, x: torch.linalg.inv(x + 4 * torch.eye(3, dtype=x.dtype))),
    "last_step": lambda: Model((STEPS, 4), last_step),
    "glu": lambda: Model((8,), lambda _, x: F.glu(x)),
}


def signs() -> Tensor:
    return torch.randint(2, (ROWS,)) * 2 - 1


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], Tensor]]] = {
    "poisson": (F.poisson_nll_loss, lambda: torch.rand(ROWS, WIDTH) * 3),
    "hinge": (lambda x, y: F.hinge_embedding_loss(x, y.sign()), lambda: torch.randn(ROWS, WIDTH)),
    "ranking": (lambda x, y: F.margin_ranking_loss(x, 2 * y, y.sign(), 0.1), lambda: torch.randn(ROWS, WIDTH)),
    "cosine": (lambda x, y: F.cosine_embedding_loss(x, x.sin().roll(1, -1), y), signs),
    "triplet": (lambda x, y: F.triplet_margin_loss(x, y, x.sin(), swap=True), lambda: torch.randn(ROWS, WIDTH)),
    "margins": (lambda x, y: F.multi_margin_loss(x, y, p=2), lambda: torch.randint(WIDTH, (ROWS,))),
    "several_labels": (F.multilabel_margin_loss, lambda: torch.tensor([[1, 3, *[-1] * 6]] * ROWS)),
    "probabilities": (lambda x, y: F.cross_entropy(x, y.softmax(-1)), lambda: torch.randn(ROWS, WIDTH)),
    "distance": (lambda x, y: F.pairwise_distance(x, y).square().mean(), lambda: torch.randn(ROWS, WIDTH)),
    "likeness": (lambda x, y: F.cosine_similarity(x, y).mean(), lambda: torch.randn(ROWS, WIDTH)),
    "broadcast": (lambda x, y: F.kl_div(x[:, None].log_softmax(-1), y), lambda: torch.rand(ROWS, 4, WIDTH)),
}
MESHES = [{"dp": 2}, {"dp": 2, "tp": 2}]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("mesh", MESHES, ids=["dp", "dp-tp"])
@pytest.mark.parametrize("name", [*LAYERS, *LOSSES])
def test_samples_are_split(name: str, mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    batch: tuple[Tensor, ...] = (torch.randn(ROWS, WIDTH, dtype=torch.float64),)
    if name in LOSSES:
        body, target = LOSSES[name]
        model: nn.Module = Loss(body)
        made = target()
        batch = (*batch, made.double() if made.is_floating_point() else made)
    else:
        model = LAYERS[name]()
    job = compile_pinned(
        model.double(), prod(mesh.values()), sample=batch, cluster=FAST, mesh=mesh, microbatches=2, optimizer=tame
    )
    result = job.verify(batch, steps=2)
    assert result.ok, str(result)
    (loss,) = re.findall(r"loss_axes=(.*),\n", job.job.texts[0])
    assert '"dp"' in loss, "every rank computes all samples"


def tame(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class OtherNames(nn.Module):
    """Ops by their other names, and ops that torch computes by others; a cache that begins as a vector of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.multiply(self.a(x), x)
        h = torch.hstack([h.unsqueeze(1), torch.clip(self.b(h), -1, 1).unsqueeze(1)])
        h = torch.tensordot(h, self.a.weight, dims=([2], [0]))
        h = torch.divide(h, torch.linalg.norm(h, dim=-1, keepdim=True) + 1)
        left, right = torch.tensor_split(h.swapaxes(1, 2).moveaxis(1, 2), 2, dim=-1)
        h = torch.cat([h.new_empty(0), torch.subtract(left, torch.negative(right)).tile(1, 1, 2)], dim=1)
        h[x[:, :2] > 0] = self.b.bias.exp()
        h[h < -0.5] = 0.25
        return torch.special.expit(h).square().mean()


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_ops_by_other_names_are_split(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    given = {"sample": x, "cluster": FAST, "mesh": mesh, "microbatches": 2, "optimizer": tame}
    job = compile_pinned(OtherNames().double(), 4, **given)
    assert not job.plan.replicated_ops
    result = job.verify(x, steps=2)
    assert result.ok, str(result)


class Norms(nn.Module):
    """Batch norms with and without parameters, of images and of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, eps=0.1), nn.ReLU(), nn.Flatten())
        self.rows = nn.BatchNorm1d(16, affine=False, track_running_stats=False)
        self.leave = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.rows(self.images(x)).sigmoid()).square().mean()


def images() -> Tensor:
    return torch.randn(ROWS, 2, 4, 4, dtype=torch.float64)


@pytest.mark.parametrize("mesh", [*MESHES, {"pp": 2, "dp": 2}], ids=str)
def test_statistics_are_of_the_whole_batch(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = Norms().double(), images()
    job = compile_pinned(model, prod(mesh.values()), sample=x, cluster=FAST, mesh=mesh, microbatches=1, optimizer=tame)
    assert '"dp"' in re.findall(r"loss_axes=(.*),\n", job.job.texts[0])[0]
    assert any("running averages" in remark for remark in job.plan.remarks)
    result = job.verify(x, steps=2)
    assert result.ok, str(result)


def test_microbatches_have_statistics_of_their_own() -> None:
    torch.manual_seed(0)
    model, x = Norms().double(), images()
    given = {"sample": x, "cluster": FAST, "mesh": {"dp": 2}, "microbatches": 2, "optimizer": tame}
    with pytest.raises(ShardingError, match=r"aten.sub.*statistics='microbatch'"):
        compile_pinned(model, 2, **given)
    result = compile_pinned(model, 2, statistics="microbatch", **given).verify(x, steps=2)
    assert result.ok, str(result)


MEANS = [{"dp": 2}, {"tp": 2}, {"pp": 2, "dp": 2}]


@pytest.mark.parametrize("way", ["whole", "recomputed", "microbatches"])
@pytest.mark.parametrize("mesh", MEANS, ids=str)
def test_running_averages_are_those_of_one_device(mesh: dict[str, int], way: str) -> None:
    """On every rank, after two steps; with statistics of their own, of one microbatch after another."""
    torch.manual_seed(0)
    model, x, count = Norms().double(), images(), 1 + (way == "microbatches")
    options = {"whole": {}, "recomputed": {"recompute": "full"}, "microbatches": {"statistics": "microbatch"}}[way]
    given = {"sample": x, "cluster": FAST, "mesh": mesh, "microbatches": count, "optimizer": tame, **options}
    job = compile_pinned(model, prod(mesh.values()), **given)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ranks = simulate.run(lambda rank: run_rank(job.job, rank, {"0": x}, 2), prod(mesh.values())).results
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    expected = dict(one_device(model, x.chunk(count), 2).named_buffers())
    names = ["images.1.running_mean", "images.1.running_var"]
    assert sum(list(rank.buffers) == names for rank in ranks) == prod(mesh.values()) // mesh.get("pp", 1)
    for name, buffer in (item for rank in ranks for item in rank.buffers.items()):
        assert (buffer - before[name]).abs().min() > 1e-3
        torch.testing.assert_close(buffer, expected[name], rtol=1e-12, atol=1e-12)
    if way == "recomputed":
        assert any("recompute(" in text for text in job.job.texts)


class Shared(nn.Module):
    """Layers with one batch norm between them; and one whose averages are parts of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Sigmoid()) for _ in range(2))
        self.register_buffer("both", torch.eye(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.batch_norm(x, self.both[0], self.both[1], training=True).sigmoid().square().mean()


def test_averages_that_layers_share_move_in_order() -> None:
    torch.manual_seed(0)
    model, x = Shared().double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    job = compile_pinned(model, 2, sample=x, cluster=FAST, mesh={"dp": 2}, microbatches=1, optimizer=tame)
    result = job.verify(x, steps=2)
    assert result.ok, str(result)
    assert result.parameter_errors["layers.0.1.running_var"] < 1e-12
    remarks = "\n".join(job.plan.remarks)
    assert "several layers move layers.0.1.running_mean, layers.0.1.running_var: each stage" in remarks
    assert "averages of norms that are no buffers of the model stay" in remarks


def test_averages_that_stages_share_are_seen_to_differ() -> None:
    torch.manual_seed(0)
    model, x = Shared().double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    given = {"sample": x, "cluster": FAST, "mesh": {"pp": 2}, "microbatches": 1, "optimizer": tame}
    result = compile_pinned(model, 2, **given).verify(x, steps=2)
    assert not result.ok
    assert result.divergence.startswith("all but running averages agree: pipeline stages that share a batch norm")
    assert "layers.0.1.running_mean" in str(result)


@pytest.mark.parametrize("mesh", MEANS[:2], ids=str)
def test_moves_of_averages_cost_what_plans_say(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Model((4,), plain, nn.BatchNorm1d(4)).double()
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    job = compile_pinned(model, 2, sample=x, cluster=FAST, mesh=mesh, microbatches=1, recompute="full")
    assert "averaged(" in job.job.texts[0]
    found = job.audit()
    assert found.ok, str(found)


def one_device(model: nn.Module, microbatches: Sequence[Tensor], steps: int) -> nn.Module:
    trained = copy.deepcopy(model)
    optimizer = tame(trained.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        for x in microbatches:
            (trained(x) / len(microbatches)).backward()
        optimizer.step()
    return trained


def test_given_statistics_split_samples() -> None:
    torch.manual_seed(0)
    model, x = Norms().double(), images()
    model.images[1].eval()
    model.rows = nn.Identity()
    job = compile_pinned(model, 4, sample=x, cluster=FAST, mesh={"dp": 2, "tp": 2}, microbatches=2, optimizer=tame)
    assert not job.plan.replicated_ops
    result = job.verify(x, steps=2)
    assert result.ok, str(result)


def test_what_needs_all_samples_is_refused_by_name() -> None:
    """The largest of a batch is not the sum of those of its parts."""
    model = Model((4, 6), lambda _, x: x / x.amax(0)).double()
    with pytest.raises(ShardingError, match=r"aten.amax.*needs the whole batch at once.*Use microbatches=1"):
        compile_pinned(model, 2, sample=(torch.randn(ROWS, WIDTH).double(),), cluster=FAST, microbatches=2)


class Averaging(nn.Module):
    """A layer that keeps averages of its own: written in place, through a view, and assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name in ("first", "pairs", "assigned"):
            self.register_buffer(name, torch.zeros(WIDTH).view((4, 2) if name == "pairs" else (WIDTH,)))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x).tanh()
        with torch.no_grad():
            self.first.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.pairs[:, 1].copy_(self.first.view(4, 2)[:, 0] + self.pairs[:, 1])
        self.assigned = 0.5 * self.assigned + h.detach().square().mean(0)
        return x + h


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Averaging() for _ in range(2)))
        self.head = nn.Linear(WIDTH, 2)
        self.register_buffer("decayed", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.decayed.mul_(0.5)
        return self.head(self.layers(x)).square().mean()


BUFFERS: list[tuple[type[nn.Module], dict[str, int], dict[str, Any]]] = [
    (Averages, {"dp": 2}, {"zero": 3, "offload": ("parameters", "activations")}),
    (Averages, {"pp": 2}, {"recompute": "full", "microbatches": 2, "statistics": "microbatch"}),
    (Averages, {"dp": 2, "tp": 2}, {"zero": 1}),
]


@pytest.mark.filterwarnings("ignore:The tensor attribute")  # torch says so of what is assigned
@pytest.mark.parametrize(("made", "mesh", "options"), BUFFERS, ids=["dp", "pp", "dp tp"])
def test_buffers_that_code_writes_to_are_those_of_one_device(
    made: type[nn.Module], mesh: dict[str, int], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, x = made().double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    given = {"sample": x, "cluster": FAST, "mesh": mesh, "microbatches": 1, "optimizer": tame, **options}
    result = compile_pinned(model, prod(mesh.values()), **given).verify(x, steps=2)
    assert result.ok, str(result)
    assert {name for name, _ in model.named_buffers()} <= result.parameter_errors.keys()


class Decayed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)
        self.register_buffer("decayed", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.decayed.mul_(0.5)
        return self.head(x).square().mean()


def test_buffers_move_once_a_step() -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    with pytest.raises(ShardingError, match=r"averaged at .*moves a buffer. Use microbatches=1, or statistics='micro"):
        compile_pinned(Decayed().double(), 2, sample=x, cluster=FAST, microbatches=2)


class Fed(Averaging):
    """Computes with what it assigns."""

    def forward(self, x: Tensor) -> Tensor:
        self.assigned = 0.5 * self.assigned + x.mean(0)
        return self.linear(x - self.assigned).square().mean()


def test_what_the_next_step_would_see_is_refused_by_line() -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    with pytest.raises(CaptureError, match=r"at test_uncommon_layers.py:\d+ changes buffer 'assigned'"):
        compile_pinned(Fed().double(), 2, sample=x, cluster=FAST)
    with pytest.raises(CaptureError, match=r"BatchNorm1d 'layer' has momentum=None.*give it a number"):
        compile_pinned(Model((4,), plain, nn.BatchNorm1d(4, momentum=None)), 2, sample=x.float(), cluster=FAST)


@pytest.mark.parametrize(("mesh", "count"), [({"dp": 2}, 1), ({"pp": 2}, 2), ({"tp": 2}, 1)], ids=["dp", "pp", "tp"])
def test_instance_norms_move_averages_as_one_device_does(mesh: dict[str, int], count: int) -> None:
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    model, x = Model((4, 6), plain, norm).double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    given = {"sample": x, "cluster": FAST, "mesh": mesh, "microbatches": count, "optimizer": tame}
    result = compile_pinned(model, 2, statistics="microbatch" if count > 1 else "batch", **given).verify(x, steps=2)
    assert result.ok, str(result)
    assert {"layer.running_mean", "layer.running_var"} <= result.parameter_errors.keys()


class Contrasts(nn.Module):
    """Rows are compared with one another."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.enter(x) @ self.enter(y).t(), torch.arange(len(x)))


def test_what_compares_rows_needs_the_whole_batch() -> None:
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    what = r"aten\.matmul\S* at test_uncommon_layers\.py:\d+ needs the whole .* several rows .* Use microbatches=1\.$"
    with pytest.raises(ShardingError, match=what):
        compile_pinned(Contrasts(), 2, sample=batch, cluster=FAST, mesh={"dp": 2}, microbatches=2)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.enter(x).square().mean()


def test_spectral_norms_are_taken_in_eval() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(ROWS, WIDTH, dtype=torch.float64), Spectral().double()
    given = {"sample": x, "cluster": FAST, "mesh": {"dp": 2}, "microbatches": 2, "optimizer": tame}
    with pytest.raises(CaptureError, match=r"changes buffer .*_u' in place.*as spectral_norm, doesn't in eval\(\)"):
        compile_pinned(model, 2, **given)
    model.enter.parametrizations.weight[0].eval()
    result = compile_pinned(model, 2, **given).verify(x, steps=2)
    assert result.ok, str(result)
