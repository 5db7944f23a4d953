"""mixed_precision and what follows it: the casts are those of torch.autocast, and where they stand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.api import prepare
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.graph import Autocast, Model, info, op_name, print_block
from autopar.passes.canonicalize import canonicalize
from autopar.passes.mixed_precision import has_autocast, mixed_precision
from autopar.passes.place_casts import cast_dtype, place_casts
from autopar.passes.working_copies import working_copies
from tests import models
from tests.codegen.programs import emit_alone
from tests.codegen.test_golden import without_lines
from tests.models import Case, prepared
from tests.passes.autocast_graphs import Result, folded, lowered, run_flat, run_folded, under_autocast

BF16, FP16 = torch.bfloat16, torch.float16
NAMES = [name for name in models.CASES if name != "mlp"]


def single(name: str) -> Case:
    return prepared(lambda: models.CASES[name](2), torch.float32)


def case_of(module: nn.Module, *shape: int) -> Case:
    """A module that makes a loss of one tensor."""
    return Case(*case_parts(module, *shape))


def case_parts(module: nn.Module, *shape: int) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return module, (torch.randn(shape),)


def assert_same(found: Result, wanted: Result, *, bitwise: bool = True) -> None:
    assert torch.equal(found[0], wanted[0]), (found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert found[1][name].dtype == gradient.dtype
        if bitwise:
            assert torch.equal(found[1][name], gradient), name
        else:
            scale = float(gradient.abs().max())
            assert float((found[1][name] - gradient).abs().max()) <= 0.02 * scale + 1e-6, name


# --- the graph with casts is the model under autocast, bit for bit -------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_model(name: str, precision: str) -> None:
    one = single(name)
    assert_same(run_flat(lowered(one, precision), one), under_autocast(one, precision), bitwise=False)


class Regions(nn.Module):
    """Autocast regions of its own, nested, of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e, self.f = (nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            h = self.a(x)
            with torch.autocast("cpu", enabled=False):
                h = self.b(h.float()).softmax(-1)
            h = self.c(h)
        with torch.no_grad(), torch.autocast("cpu", FP16):
            scale = self.d(x).abs().mean()
        h = self.e(h.float())
        return (self.f(h.to(x.dtype)) * scale).pow(2).mean()


class InPlace(nn.Module):
    """In-place ops keep the dtype of what they write to, whatever autocast says of the op."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h += x
        h.mul_(x.sin())
        h[:, 1:].add_(torch.cat([x, x], -1)[:, 1:8])
        return self.down(torch.stack([h, x])).sum()


class Dtypes(nn.Module):
    """Code that asks for dtypes: it sees those of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        wide = h.float().pow(2).mean(-1, keepdim=True)
        h = (h.float() * torch.rsqrt(wide)).to(h.dtype)
        return F.mse_loss(h + 1 if h.dtype == x.dtype else h, x)


@pytest.mark.parametrize("module", [Regions, InPlace, Dtypes])
@pytest.mark.parametrize("precision", ["model", "bf16", "fp16"])
def test_a_module(module: Callable[[], nn.Module], precision: str) -> None:
    torch.manual_seed(0)
    one = case_of(module(), 4, 8)
    flat = lowered(one, precision)
    assert_same(run_flat(flat, one), under_autocast(one, precision))


@pytest.mark.parametrize(("device", "wanted"), [("cpu", torch.float32), ("cuda", FP16)])
def test_a_region_of_another_device_is_idle(device: str, wanted: torch.dtype) -> None:
    """(torch itself turns a region for CUDA off where there is no CUDA, with a warning.)"""
    flat = capture(*case_parts(Dtypes(), 4, 8))
    for node in flat.nodes:
        info(node).autocast = (Autocast("cuda", FP16, True),)
    assert has_autocast(flat, "model")
    mixed_precision(flat, device, "model")
    assert [info(n).meta.dtype for n in flat.nodes if "linear" in op_name(n)] == [wanted]


def test_nothing_to_do() -> None:
    one = single("llama")
    assert not has_autocast(capture(one.model, one.batch), "model")
    assert has_autocast(capture(one.model, one.batch), "bf16")
    double = models.make("gpt2", 2)
    assert len(lowered(double, "bf16").nodes) == len(lowered(double, "model").nodes), "float64 is never cast"


def test_an_autocast_around_the_capture_is_not_seen() -> None:
    one = case_of(Dtypes(), 4, 8)
    with torch.autocast("cpu", BF16):
        flat = capture(one.model, one.batch)
    assert {info(n).meta.dtype for n in flat.nodes} == {torch.float32}


# --- policies of CUDA that the CPU has not ----------------------------------------------------------------


class Mixture(nn.Module):
    """Ops that CUDA's lists name and the CPU's don't."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        p = h.softmax(-1)
        return (torch.addcmul(h, h, x) * p).exp().sum() + F.layer_norm(h, (8,)).sum()


def test_policies_of_cuda() -> None:
    flat = lowered(case_of(Mixture(), 4, 8), "bf16", "cuda")
    dtypes = {op_name(n): info(n).meta.dtype for n in flat.nodes}
    assert dtypes["aten.linear.default"] == BF16
    wide = ("softmax.int", "addcmul.default", "exp.default", "layer_norm.default", "sum.default")
    assert {dtypes[f"aten.{name}"] for name in wide} == {torch.float32}
    softmax = next(n for n in flat.nodes if op_name(n) == "aten.softmax.int")
    assert info(softmax.all_input_nodes[0]).meta.dtype == BF16, "its result is wide, its operand isn't cast"


class Probability(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.binary_cross_entropy(self.up(x).sigmoid().float(), torch.ones_like(x))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).scatter_add(1, torch.zeros(4, 8, dtype=torch.int64), x).sum()


def test_what_cant_be_is_refused() -> None:
    with pytest.raises(CaptureError, match="binary_cross_entropy_with_logits"):
        lowered(case_of(Probability(), 4, 8), "bf16", "cuda")
    flat = capture(*case_parts(Mixed(), 4, 8))
    with pytest.raises(CaptureError, match=r"scatter_add.*can't take bf16\[4, 8\].*f32\[4, 8\].*cast its operands"):
        mixed_precision(flat, "cpu", "bf16")


class Chosen(nn.Module):
    """Its product and its argmax are made ops whose results depend on values, which no capture lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return (h * (x > 0)).sum() + h.argmax(1).sum()


def test_what_depends_on_values_keeps_its_dtype_or_is_refused() -> None:
    """No run without values tells: integers stay integers, of what is cast nothing is known."""
    aten = torch.ops.aten
    flat = capture(*case_parts(Chosen(), 4, 8))
    index = next(node for node in flat.nodes if op_name(node) == "aten.argmax.default")
    index.target, index.args = aten.nonzero.default, index.args[:1]
    mixed_precision(flat, "cpu", "bf16")
    assert info(index).meta.dtype == torch.int64
    flat = capture(*case_parts(Chosen(), 4, 8))
    product = next(node for node in flat.nodes if op_name(node) == "aten.mul.Tensor")
    product.target = aten.masked_select.default
    with pytest.raises(CaptureError, match=r"masked_select.*is given bf16\[4, 8\].* without values .*disable autocast"):
        mixed_precision(flat, "cpu", "bf16")
    flat = capture(*case_parts(Chosen(), 4, 8))
    product = next(node for node in flat.nodes if op_name(node) == "aten.mul.Tensor")
    product.target = aten.masked_select.default
    mixed_precision(flat, "cpu", "model")  # nothing is cast
    assert info(product).meta.dtype == torch.float32


# --- where casts stand --------------------------------------------------------------------------------


def casts(model: Model) -> list[tuple[str, str]]:
    """(what is cast, who reads it first) of all casts."""
    found = []
    for block in model.blocks:
        for node in block.ops:
            if cast_dtype(node) is not None:
                found.append((node.all_input_nodes[0].name, next(iter(node.users)).name))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_placing_casts_keeps_values(name: str) -> None:
    one = single(name)
    before = folded(one, "bf16")
    count = len(casts(before))
    after = place_casts(before)
    assert len(casts(after)) < count if name.startswith("llama") else len(casts(after)) <= count
    wanted = under_autocast(one, "bf16")
    assert_same(run_folded(after, one), wanted, bitwise=False)
    loss, _ = run_folded(working_copies(canonicalize(after)), one)  # a bias is rounded by itself there
    assert float((loss - wanted[0]).abs() / wanted[0]) < 1e-3


class Shared(nn.Module):
    """A value in two products behind different views, one in a product and a sum, a product that two ops want wide."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Parameter(torch.randn(8))
        self.up, self.down = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        h, both = x * self.inward, (x - self.inward).view(2, 2, 8)
        a = F.linear(h.view(2, 2, 8).transpose(0, 1), self.up) @ F.linear(h, self.down).view(2, 2, 8).transpose(1, 2)
        b = F.linear(both.transpose(0, 1), self.up)
        return torch.prod(a, 0).sum() + torch.prod(a) + b.sum() + both.sum()


def test_casts_are_shared_early_and_late(golden: Callable[[str, str], None]) -> None:
    one = case_of(Shared(), 4, 8)
    placed = canonicalize(place_casts(folded(one, "bf16")))
    assert_same(run_folded(placed, one), under_autocast(one, "bf16"), bitwise=False)
    golden("passes/place_casts.txt", "\n".join(map(print_block, placed.blocks)) + "\n")


def test_working_copies() -> None:
    """What is only cast is stored so; an embedding that is the head too, and norms, are not."""
    stored = {}
    for name in ("llama", "llama_tied"):
        one = single(name)
        made = working_copies(prepare(one.model, one.batch, precision="bf16")[0])
        stored[name] = {n: p for n, p in made.parameters.items() if p.master is not None}
        assert all(p.meta.dtype == BF16 and p.master == torch.float32 for p in stored[name].values())
    layer = [n for n in stored["llama"] if n.startswith("model.layers.0.")]
    assert len(layer) == 7
    assert {*stored["llama"]} - {*stored["llama_tied"]} == {"lm_head.weight"}
    assert not [n for n in stored["llama"] if "norm" in n or "embed" in n]


class Sharing(nn.Module):
    """The last of three layers has a weight that is used wide, too; the last two are one block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).sum() + self.layers[2].weight.sum()


def test_working_copies_of_one_slot_agree() -> None:
    made = working_copies(prepare(*case_parts(Sharing(), 4, 8), precision="bf16")[0])
    assert {n for n, p in made.parameters.items() if p.master is not None} == {"head.weight", "layers.0.weight"}


# --- text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "precision", "device"), [("llama", "bf16", "cpu"), ("gpt2", "fp16", "cuda")])
def test_emitted_text(name: str, precision: str, device: str, golden: Callable[[str, str], None]) -> None:
    one = single(name)
    model = prepare(one.model, one.batch, device=device, precision=precision)[0]
    golden(f"codegen/{name}_{precision}_{device}.py.txt", without_lines(emit_alone(model)[0].text))


def test_rows_to_experts_travel_in_the_lower_precision() -> None:
    """Behind a float32 norm, the cast that the experts' products ask for stands before their rows are dispatched."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=32,
        use_cache=False,
    )
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model = transformers.MixtralForCausalLM(config).train()
    graph = prepare(model, {"input_ids": tokens, "labels": tokens}, device="cuda", precision="bf16")[0]
    (dispatch,) = (node for block in graph.blocks for node in block.ops if op_name(node) == "dispatch")
    assert info(dispatch).meta.dtype == info(dispatch.all_input_nodes[0]).meta.dtype == BF16
