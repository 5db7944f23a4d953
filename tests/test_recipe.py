"""Init recipes: recorded on the meta device, played as the model itself would initialise, written as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar import recipe
from autopar.errors import CaptureError, PlanError
from autopar.recipe import Recipe

SIGMAS = 5


def gpt2() -> nn.Module:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=96, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def llama(tied: bool = False) -> nn.Module:
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(32, 24))


class PlainNorm(nn.Module):
    """Sets its weight in the constructor only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class NanoBlock(nn.Module):
    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = norm(width)
        self.fc = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(2 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8), persistent=False)


class Nano(nn.Module):
    """Initialised as nanoGPT is: ``apply`` in the constructor, then residual projections again, scaled."""

    def __init__(self, norm: Callable[[int], nn.Module] = PlainNorm) -> None:
        super().__init__()
        self.wte = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(NanoBlock(32, norm) for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.wte.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(4))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Odd(nn.Module):
    """Every awkward way to fill a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.truncated = nn.Parameter(torch.empty(16, 32))
        self.orthogonal = nn.Parameter(torch.empty(8, 16))
        self.sparse = nn.Parameter(torch.empty(16, 4))
        self.halves = nn.Parameter(torch.empty(8, 8))
        self.scaled = nn.Parameter(torch.empty(16, 32))
        self.clipped = nn.Parameter(torch.empty(32, 16).t())
        self.decay = nn.Parameter(torch.empty(3, 4))
        self.register_buffer("eye", torch.empty(4, 4))
        self.register_buffer("limits", torch.empty(3))
        self.register_buffer("mask", torch.empty(4, 4, dtype=torch.bool))
        self.register_buffer("steps", torch.empty((), dtype=torch.long))
        self.table = nn.Embedding(16, 32, padding_idx=3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.truncated, std=0.02, a=-0.03, b=0.03)
        nn.init.orthogonal_(self.orthogonal, gain=2.0)
        nn.init.sparse_(self.sparse, 0.5)
        for half in self.halves.chunk(2):
            nn.init.orthogonal_(half)
        self.scaled.data.uniform_(-1.0, 1.0, generator=torch.Generator()).mul_(0.1)
        with torch.no_grad():
            self.clipped.normal_(0.0, 0.1).clamp_(-0.05, 0.05)
            nn.init.eye_(self.eye)
            self.limits.copy_(torch.tensor([1.0, float("inf"), float("nan")]))
            self.mask.copy_(torch.tril(torch.ones(4, 4)).bool())
            self.steps.zero_()
        self.decay.data = torch.log(torch.arange(1, 5, dtype=torch.float32).repeat(3, 1)).to(self.decay.device)


def on_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return factory()


def recorded(factory: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Recipe]]:
    model = on_meta(factory)
    return model, recipe.record(model)


def tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def is_random(made: Recipe) -> bool:
    return any(step.stream is not None for step in made.steps)


def assert_alike(played: torch.Tensor, real: torch.Tensor, name: str) -> None:
    """Mean and standard deviation agree as two samples of one distribution do."""
    count, spread = real.numel(), float(real.std())
    assert float(played.mean() - real.mean()) == pytest.approx(0, abs=SIGMAS * spread * math.sqrt(2 / count)), name
    assert float(played.std()) == pytest.approx(spread, rel=SIGMAS / math.sqrt(count)), name


def text(made: Recipe) -> list[str]:
    return [step.op for step in made.steps]


@pytest.mark.parametrize("how", [recorded, recipe.construct])
@pytest.mark.parametrize("factory", [gpt2, llama, lambda: llama(tied=True), encoder, Odd])
def test_played_as_constructed(
    how: Callable[[Callable[[], nn.Module]], tuple[nn.Module, dict[str, Recipe]]],
    factory: Callable[[], nn.Module],
) -> None:
    model, recipes = how(factory)
    values = recipe.initialize(model, recipes, seed=0)
    real = dict(tensors(factory()))
    assert list(values) == list(real) == list(recipes)
    for name, value in values.items():
        assert (value.shape, value.dtype) == (real[name].shape, real[name].dtype)
        if is_random(recipes[name]):
            assert_alike(value, real[name].detach(), name)
        else:
            assert torch.equal(value.nan_to_num(), real[name].nan_to_num()), name


@pytest.mark.parametrize("factory", [gpt2, llama])
def test_a_replica_trains(factory: Callable[[], nn.Module]) -> None:
    model, recipes = recorded(factory)
    twin = recipe.replica(model, recipe.initialize(model, recipes, seed=0))
    ids = torch.arange(16).view(2, 8)
    loss = twin(input_ids=ids, labels=ids).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.log(96), abs=0.2)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in twin.parameters())


def test_record_modifies_nothing() -> None:
    model, before = on_meta(llama), torch.get_rng_state()
    attributes = {path: dict(vars(module)) for path, module in model.named_modules()}
    own = {name: id(tensor) for name, tensor in tensors(model)}
    recipe.record(model)
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == attributes
    assert {name: id(tensor) for name, tensor in tensors(model)} == own
    assert all(tensor.is_meta for _, tensor in tensors(model))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_was_marked_as_initialised_is_recorded_all_the_same() -> None:
    model = on_meta(gpt2)
    model.initialize_weights()
    assert recipe.record(model) == recipe.record(on_meta(gpt2))


def test_constructor_only_values_need_construct() -> None:
    with pytest.raises(CaptureError, match=r"nothing initialises blocks\.0\.norm\.weight \(PlainNorm\)") as info:
        recorded(Nano)
    assert "blocks.0.mask (NanoBlock)" in str(info.value)
    assert "construct" in str(info.value)
    model, recipes = recipe.construct(Nano)
    values = recipe.initialize(model, recipes, seed=0)
    real = Nano()
    for name, tensor in tensors(real):
        if is_random(recipes[name]):
            assert_alike(values[name], tensor.detach(), name)
        else:
            assert torch.equal(values[name], tensor), name
    assert float(values["blocks.1.proj.weight"].std()) == pytest.approx(0.01, rel=0.1)


def test_tied_weights_have_one_recipe_and_stay_tied() -> None:
    model, recipes = recipe.construct(Nano)
    assert "head.weight" not in recipes
    twin = recipe.replica(model, recipe.initialize(model, recipes, seed=0))
    assert twin.head.weight is twin.wte.weight  # type: ignore[union-attr]
    assert not twin.blocks[0].mask.is_meta  # type: ignore[index,union-attr]


class Overridden(Nano):
    """As record sees it: torch's own norm, and no mask."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm)
        for block in self.blocks:
            del block.mask


def test_init_weights_overrides_defaults_and_leaves_no_dead_steps() -> None:
    _, recipes = recorded(Overridden)
    made = recipes["blocks.0.fc.weight"]
    assert text(made) == ["aten.empty.memory_format", "aten.normal_.default"]
    assert made.steps[1].args[1:] == (0.0, 0.02)
    assert text(recipes["blocks.0.norm.weight"]) == ["aten.empty.memory_format", "aten.fill_.Scalar"]


def test_parts_of_a_plain_model_initialise_themselves() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = llama().model
            self.head = nn.Linear(32, 96)

    model, recipes = recorded(Wrapper)
    made = recipes["body.layers.1.self_attn.q_proj.weight"]
    assert made.steps[-1].args[1:] == (0.0, 0.02)
    assert text(recipes["head.weight"])[-1] == "aten.uniform_.default"
    recipe.initialize(model, recipes, seed=0)


def test_functions_that_skip_meta_tensors_are_played_whole() -> None:
    _, recipes = recorded(Odd)
    values = {name: recipe.play(made, seed=3) for name, made in recipes.items()}
    assert bool((values["truncated"].abs() <= 0.03).all())
    assert torch.allclose(values["orthogonal"] @ values["orthogonal"].T, 4 * torch.eye(8), atol=1e-5)
    assert (values["sparse"] == 0).sum(0).tolist() == [8] * 4
    for half in values["halves"].chunk(2):
        assert torch.allclose(half @ half.T, torch.eye(4), atol=1e-5)
    assert values["table.weight"][3].tolist() == [0.0] * 32
    assert bool((values["table.weight"][4] != 0).all())


@pytest.mark.parametrize("factory", [gpt2, Odd])
def test_values_depend_on_the_seed_alone(factory: Callable[[], nn.Module]) -> None:
    model, recipes = recorded(factory)
    first = recipe.initialize(model, recipes, seed=1)
    torch.manual_seed(77)
    before = torch.get_rng_state()
    with torch.device("meta"):
        again = {name: recipe.play(recipes[name], 1) for name in reversed(recipes)}
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name].nan_to_num(), again[name].nan_to_num()) for name in first)
    other = recipe.initialize(model, recipes, seed=2)
    changed = {name for name in first if not torch.equal(first[name].nan_to_num(), other[name].nan_to_num())}
    assert changed == {name for name, made in recipes.items() if is_random(made)}


TABLE = torch.arange(6.0)
FIRST, LAST = TABLE[:3], TABLE[3:]


class OnTheCpu(nn.Module):
    """Prepares its values on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.scaled = nn.Parameter(torch.empty(256)), nn.Parameter(torch.empty(3))
        self.first, self.last = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))
        self.order, self.filled = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.noise.copy_(torch.randn(256))
            self.scaled.fill_(torch.rand(()).item())
            self.first.copy_(FIRST)
            self.last.copy_(LAST)
            self.order.copy_(FIRST[torch.tensor([2, 0, 1])])
            self.filled[torch.arange(3)] = 4.0


def test_values_prepared_on_the_cpu() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model, recipes = recorded(OnTheCpu)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert recipe.record(model) == recipes, "recipes must not depend on the state of the generator"
    values, others = (recipe.initialize(model, recipes, seed) for seed in (0, 1))
    assert_alike(values["noise"], torch.randn(256), "noise")
    assert not torch.equal(values["noise"], others["noise"])
    assert values["first"].tolist() == [0.0, 1.0, 2.0]
    assert values["last"].tolist() == [3.0, 4.0, 5.0]
    assert values["order"].tolist() == [2.0, 0.0, 1.0]
    assert values["filled"].tolist() == [4.0, 4.0, 4.0]


def test_different_parameters_draw_different_numbers() -> None:
    _, recipes = recorded(gpt2)
    first, second = (recipes[f"transformer.h.{i}.mlp.c_fc.weight"] for i in range(2))
    assert not torch.equal(recipe.play(first, 0), recipe.play(second, 0))


def test_a_copy_of_another_parameter_stays_a_copy() -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
            self.init_weights()

        def init_weights(self) -> None:
            self.right.load_state_dict(self.left.state_dict())
            with torch.no_grad():
                self.left.weight.add_(1.0)

    model, recipes = recorded(Siamese)
    values = recipe.initialize(model, recipes, seed=0)
    assert torch.equal(values["left.weight"], values["right.weight"] + 1)
    assert torch.equal(values["left.bias"], values["right.bias"])


def test_tensors_that_hold_values_keep_them() -> None:
    model = on_meta(lambda: nn.Linear(3, 3))
    model.register_buffer("scale", torch.tensor([1.0, 2.0]))
    made = recipe.record(model)
    assert text(made["scale"]) == ["constant"]
    assert recipe.play(made["scale"], 0).tolist() == [1.0, 2.0]


def test_the_default_dtype_of_another_day_does_not_matter() -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4))

    torch.set_default_dtype(torch.float64)
    try:
        model, recipes = recipe.construct(factory)
    finally:
        torch.set_default_dtype(torch.float32)
    assert recipe.initialize(model, recipes, 0)["0.weight"].dtype == torch.float64


@pytest.mark.parametrize("factory", [gpt2, llama, encoder, Odd])
def test_json_round_trip(factory: Callable[[], nn.Module]) -> None:
    _, recipes = recorded(factory)
    written = json.dumps(recipe.to_json(recipes), allow_nan=False)
    assert recipe.from_json(json.loads(written)) == recipes


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(1.5),
        torch.tensor([0.1, -0.0, 1e-45]),
        torch.tensor([math.inf, math.nan]),
        torch.tensor([True, False]),
        torch.tensor([[2**62, -1]]),
        torch.tensor([0.1, 3.0], dtype=torch.bfloat16),
        torch.tensor([0.1 + 0.2], dtype=torch.float64),
        torch.tensor([1 + 2j]),
        torch.empty(0, 3),
        torch.arange(5000.0).view(50, 100).t(),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_constants_are_exact(value: torch.Tensor) -> None:
    written = json.dumps(recipe.to_json({"c": recipe.constant(value)}), allow_nan=False)
    back = recipe.play(recipe.from_json(json.loads(written))["c"], 0)
    assert back.dtype == value.dtype
    assert torch.equal(back.nan_to_num(7) if value.is_floating_point() else back, value.nan_to_num(7))


def test_a_large_constant_is_written_small() -> None:
    mask = torch.tril(torch.ones(512, 512))
    assert len(json.dumps(recipe.to_json({"mask": recipe.constant(mask)}))) < mask.numel() // 10


FILL = {
    "shape": [2],
    "dtype": "float32",
    "result": {"value": [0, 0]},
    "steps": [
        {"op": "aten.empty.memory_format", "args": [[2]], "kwargs": {"dtype": {"torch": "float32"}}},
        {"op": "aten.fill_.Scalar", "args": [{"value": [0, 0]}, {"float": "inf"}]},
    ],
}


def test_json_as_documented_plays() -> None:
    assert recipe.play(recipe.from_json({"w": FILL})["w"], 0).tolist() == [math.inf] * 2


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        {"w": None},
        {"w": {**FILL, "dtype": "float31"}},
        {"w": {**FILL, "dtype": "save"}},
        {"w": {"shape": [2], "dtype": "float32"}},
        {"w": {**FILL, "steps": [{"op": "os.system", "args": ["true"]}]}},
        {"w": {**FILL, "steps": [{"op": "aten.fill_.Scalar", "args": [{"code": "1"}]}]}},
        {
            "w": {
                **FILL,
                "steps": [{"op": "constant", "args": [{"tensor": {"shape": [2], "dtype": "int8", "packed": "?"}}]}],
            }
        },
        {
            "w": {
                **FILL,
                "steps": [
                    {
                        "op": "constant",
                        "args": [{"tensor": {"shape": [2], "dtype": "int8", "packed": "eNpjAAAAAQAB"}}],
                    }
                ],
            }
        },
    ],
)
def test_damaged_json_is_refused(damaged: object) -> None:
    with pytest.raises(PlanError, match="write the job again"):
        recipe.from_json(damaged)


def test_a_recipe_of_another_torch_is_refused() -> None:
    unknown = {**FILL, "steps": [{"op": "aten.fill_of_the_future_.Scalar", "args": [1.0]}]}
    with pytest.raises(PlanError, match=r"uses aten\.fill_of_the_future_\.Scalar, which torch"):
        recipe.play(recipe.from_json({"w": unknown})["w"], 0)
    with pytest.raises(PlanError, match=r"for torch\.float32\[3\] makes torch\.float32\[2\]"):
        recipe.play(recipe.from_json({"w": {**FILL, "shape": [3]}})["w"], 0)


def test_an_initialiser_that_needs_values_is_named() -> None:
    class Curious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

        def reset_parameters(self) -> None:
            self.weight.data.fill_(float(self.weight.sum()))

    model = nn.Sequential(nn.Linear(2, 2), on_meta(Curious))
    with pytest.raises(CaptureError, match=r"reset_parameters of '1' \(Curious\) can't run on the meta device"):
        recipe.record(model)


def test_a_constructor_that_needs_values_is_named() -> None:
    def factory() -> nn.Module:
        return nn.Linear(2, int(torch.ones(2).sum()))

    with pytest.raises(CaptureError, match="the model's constructor can't run on the meta device"):
        recipe.construct(factory)


def test_half_an_initialisation_is_none() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 4))

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weight[0].zero_()

    with pytest.raises(CaptureError, match=r"nothing initialises weight \(Table\)"):
        recorded(Table)
    with pytest.raises(CaptureError, match=r"nothing initialises weight \(Table\)"):
        recipe.construct(Table)


def test_a_value_made_from_nothing_is_none() -> None:
    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seed, self.weight = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(4))

        def reset_parameters(self) -> None:
            self.weight.data.copy_(self.seed * 2)

    with pytest.raises(CaptureError, match=r"nothing initialises seed \(Echo\), weight \(Echo\)"):
        recorded(Echo)


def test_a_long_list_of_names_is_cut() -> None:
    with pytest.raises(CaptureError, match=r"and 12 more on the meta device"):
        recorded(lambda: nn.Sequential(*(PlainNorm(4) for _ in range(20))))


def test_a_model_that_cannot_be_copied_is_named() -> None:
    model = on_meta(lambda: nn.Linear(2, 2))
    model.stream = (row for row in range(0))  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="Linear can't be copied to record its initialisation"):
        recipe.record(model)


def test_initialize_wants_the_recipes_of_its_model() -> None:
    model, recipes = recorded(lambda: nn.Linear(2, 3))
    with pytest.raises(PlanError, match="no recipe initialises 'bias'"):
        recipe.initialize(model, {"weight": recipes["weight"]}, 0)
    with pytest.raises(PlanError, match=r"the recipe of 'weight' makes torch.float32\[3, 2\], the model has"):
        recipe.initialize(on_meta(lambda: nn.Linear(2, 4)), recipes, 0)
    with pytest.raises(PlanError, match="the state holds no 'bias'"):
        recipe.replica(model, {"weight": torch.zeros(3, 2)})
