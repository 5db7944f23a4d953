"""Shards of full weights: cut, put together, read from every source, written whole."""

from __future__ import annotations

import json
import math
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from autopar import recipe
from autopar.errors import PlanError, ShardingError
from autopar.mesh import AXES, Mesh
from autopar.runtime import Axes, Parameter, Program, declare
from autopar.runtime.shards import Place
from autopar.runtime.weights import (
    FileSource,
    RecipeSource,
    Source,
    StateSource,
    materialize,
    open_source,
    save_state,
    slice_shard,
    unshard,
    whole,
)
from autopar.spmd import parse
from tests.runtime.ranks import part

GIB = 2**30


def stored(name: str, tensor: torch.Tensor, mesh: Mesh, **types: str) -> Parameter:
    """``tensor`` as a parameter of a program, stored as ``types`` say."""
    shape = list(tensor.shape)
    for axis, kind in types.items():
        if (shard := parse(kind)).is_shard:
            shape[shard.dim] //= mesh.size(axis)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Parameter(name, tuple(shape), tuple(tensor.shape), dtype, types, is_buffer=False)


def program(mesh: Mesh, *parameters: Parameter) -> Program:
    return Program(0, 1, mesh.to_json(), 1, (), (), (), (), parameters)


def everywhere(mesh: Mesh) -> list[Axes]:
    return [Axes.alone(mesh, rank, "cpu") for rank in range(mesh.world)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[torch.Tensor, Mesh, dict[str, str]]:
    """A tensor and types that split it: several axes, also on one dim, plain and strided."""
    mesh = Mesh(pp=1, dp=draw(st.sampled_from([1, 2, 3])), tp=draw(st.sampled_from([1, 2, 4])))
    shape = [24 * draw(st.integers(1, 2)) for _ in range(draw(st.integers(1, 3)))]
    types = {}
    for axis in draw(st.permutations(["dp", "tp"])):
        dim, outer = draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([1, 2]))
        types[axis] = draw(st.sampled_from(["R", "I", f"S({dim})", f"S({dim},{outer})"]))
    count = torch.Size(shape).numel()
    return torch.arange(count).view(shape), mesh, types


@given(layouts())
def test_shards_are_by_definition_and_make_the_whole(
    layout: tuple[torch.Tensor, Mesh, dict[str, str]],
) -> None:
    whole, mesh, types = layout
    shards = []
    for rank in range(mesh.world):
        at = mesh.coordinates(rank)
        expected = whole
        for axis in AXES:
            expected = part(expected, parse(types.get(axis, "I")), at[axis], mesh.size(axis))
        shard = slice_shard(whole, types, {a: Place(mesh.size(a), at[a]) for a in AXES})
        assert torch.equal(shard, expected)
        shards.append((at, shard))
    parameter = Parameter("w", tuple(shards[0][1].shape), tuple(whole.shape), "int64", types)
    assert torch.equal(unshard(parameter, shards[::-1]), whole)


def test_a_shard_has_memory_of_its_own() -> None:
    whole = torch.zeros(4, 4)
    for types in ({}, {"tp": "S(0)"}, {"tp": "S(1)"}):
        shard = slice_shard(whole, types, {"tp": Place(2, 0)})
        assert shard.is_contiguous()
        assert shard.untyped_storage().nbytes() == shard.nbytes
        shard.fill_(1)
        assert not whole.any()


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ({"tp": "S(1)"}, r"shape \[4, 6\] can't be stored as S\(1\)@tp on 4 ranks"),
        ({"tp": "S(2)"}, r"can't be stored as S\(2\)@tp"),
        ({"tp": "P"}, r"can't be stored as P@tp .* types of weights are I, R, or a shard"),
        ({"tp": "S(0)", "dp": "S(0)"}, r"shape \[2, 6\] can't be stored as S\(0\)@tp"),
        ({"sp": "S(0)"}, r"unknown mesh axes \['sp'\]; known axes are"),
    ],
)
def test_types_that_cannot_be_stored(types: dict[str, str], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        slice_shard(torch.zeros(4, 6), types, {"dp": Place(2, 0), "tp": Place(4, 0)})


def test_a_missing_shard_is_noticed() -> None:
    parameter = Parameter("w", (2,), (8,), "float32", {"tp": "S(0)"})
    shards = [({"tp": i}, torch.zeros(2)) for i in range(4)]
    with pytest.raises(ShardingError, match="parts of 'w' are missing"):
        unshard(parameter, shards[1:])
    with pytest.raises(ShardingError, match=r"rank at {'tp': 0} holds 'w' as \[2\], but its part of \[8\]"):
        unshard(parameter, shards[:2])
    with pytest.raises(ShardingError, match="no shard of 'w'"):
        unshard(parameter, [])


@st.composite
def padded_layouts(draw: st.DrawFn) -> tuple[torch.Tensor, Mesh, Parameter]:
    """A table whose rows, padded, are split over pp and then tp; some ranks may hold padding alone."""
    mesh = Mesh(pp=draw(st.sampled_from([1, 2, 4])), dp=draw(st.sampled_from([1, 2])), tp=draw(st.sampled_from([1, 2])))
    rows, dim = draw(st.integers(1, 20)), draw(st.integers(0, 1))
    multiple = 2 * mesh.pp * mesh.tp
    total = -(-rows // multiple) * multiple
    table = torch.arange(rows * 3).view(rows, 3) + 1
    local = [total // (mesh.pp * mesh.tp), 3]
    types = {"pp": f"S({dim})", "tp": f"S({dim})"}
    padding = (dim, total - rows) if total > rows else None
    if dim:
        table, local = table.t().contiguous(), local[::-1]
    return table, mesh, Parameter("w", tuple(local), tuple(table.shape), "int64", types, padding=padding)


@given(padded_layouts())
def test_padding_is_zeros_on_ranks_and_nowhere_else(layout: tuple[torch.Tensor, Mesh, Parameter]) -> None:
    whole, mesh, parameter = layout
    dim, added = parameter.padding or (0, 0)
    extra = [
        count if d == dim else extent for d, extent, count in zip((0, 1), whole.shape, (added, added), strict=True)
    ]
    padded = torch.cat([whole, torch.zeros(extra, dtype=whole.dtype)], dim)
    source, shards = StateSource({"w": whole}), []
    for axes in everywhere(mesh):
        shard = source.local(parameter, axes)
        assert tuple(shard.shape) == parameter.shape
        assert torch.equal(shard, slice_shard(padded, parameter.types, axes))
        shards.append((mesh.coordinates(axes.rank), shard + 0))
    assert torch.equal(unshard(parameter, shards[::-1]), whole)


@pytest.mark.parametrize(
    ("local", "stored"),
    [((2, 6, 4), (1, 3, 4)), ((2, 5, 4), (1, 3, 4)), ((2, 3), (1, 2)), ((6, 3), (2, 3)), ((1,), (1,))],
    ids=str,
)
def test_rows_of_stacks_shorter_than_the_ranks_that_share_them(local: tuple[int, ...], stored: tuple[int, ...]) -> None:
    """ZeRO over four ranks, of a part on two others."""
    mesh, full = Mesh(dp=4, ep=2), (2 * local[0], *local[1:])
    whole = torch.arange(1.0, 1 + math.prod(full)).reshape(full)
    parameter = Parameter("w", local, full, "float32", {"ep": "S(0)"}, zero=4)
    shards = [(mesh.coordinates(a.rank), StateSource({"w": whole}).local(parameter, a)) for a in everywhere(mesh)]
    assert {tuple(shard.shape) for _, shard in shards} == {stored}
    assert sum(int(shard.count_nonzero()) for _, shard in shards) == whole.numel()
    assert torch.equal(unshard(parameter, shards[::-1]), whole)


def test_a_missing_shard_of_padding_is_noticed_too() -> None:
    parameter = Parameter("w", (2,), (3,), "float32", {"pp": "S(0)"}, padding=(0, 5))
    shards = [({"pp": i}, torch.zeros(2)) for i in range(4)]
    assert unshard(parameter, shards).shape == (3,)
    with pytest.raises(ShardingError, match="parts of 'w' are missing"):
        unshard(parameter, [shards[0], shards[1], shards[3]])


def state() -> dict[str, torch.Tensor]:
    return {
        "qkv.weight": torch.randn(12, 4),
        "out.weight": torch.randn(4, 8).to(torch.bfloat16),
        "scale": torch.tensor(0.5, dtype=torch.float64),
        "flags": torch.tensor([True, False, True, True]),
    }


def from_memory(tmp_path: Path) -> tuple[Source, dict[str, torch.Tensor]]:
    full = state()
    return StateSource(full), full


def from_file(tmp_path: Path) -> tuple[Source, dict[str, torch.Tensor]]:
    full = state()
    save_state(tmp_path / "w.safetensors", full)
    return FileSource(tmp_path / "w.safetensors"), full


def from_recipes(tmp_path: Path) -> tuple[Source, dict[str, torch.Tensor]]:
    full = state()
    return RecipeSource({name: recipe.constant(tensor) for name, tensor in full.items()}, 0), full


SOURCES = [from_memory, from_file, from_recipes]
MakeSource = Callable[[Path], tuple[Source, dict[str, torch.Tensor]]]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("again", [False, True], ids=["as made", "saved and opened"])
def test_every_source_gives_every_shard(make: MakeSource, again: bool, tmp_path: Path) -> None:
    source, full = make(tmp_path)
    if again:
        (tmp_path / "job").mkdir()
        name, note = source.save(tmp_path / "job")
        assert note
        source = open_source(tmp_path / "job" / name, 0)
    mesh = Mesh(dp=2, tp=2)
    padded = Parameter("qkv.weight", (7, 4), (12, 4), "float32", {"tp": "S(0)"}, padding=(0, 2))
    for axes in everywhere(mesh):
        found, row = source.local(padded, axes), 7 * axes["tp"].index
        assert torch.equal(found, nn.functional.pad(full["qkv.weight"], (0, 0, 0, 2))[row : row + 7])
    parameters = [
        stored("qkv.weight", full["qkv.weight"], mesh, dp="S(1)", tp="S(0,3)"),
        stored("out.weight", full["out.weight"], mesh, tp="S(1)"),
        stored("scale", full["scale"], mesh, tp="R"),
        stored("flags", full["flags"], mesh, dp="S(0)"),
    ]
    for axes in everywhere(mesh):
        for parameter in parameters:
            shard = source.local(parameter, axes)
            assert shard.dtype == full[parameter.name].dtype
            assert torch.equal(shard, slice_shard(full[parameter.name], parameter.types, axes))
            assert shard.untyped_storage().nbytes() == shard.nbytes


@pytest.mark.parametrize("make", SOURCES)
def test_weights_of_another_model_are_refused(make: MakeSource, tmp_path: Path) -> None:
    source, full = make(tmp_path)
    mesh = Mesh()
    (axes,) = everywhere(mesh)
    weight = full["out.weight"]
    with pytest.raises(PlanError, match=r"holds no 'out\.weigth' \(it has 'out\.weight'\)"):
        source.local(stored("out.weigth", weight, mesh), axes)
    with pytest.raises(PlanError, match=r"holds 'out\.weight' as bfloat16\[4, 8\], the plan expects float32\[4, 8\]"):
        source.local(stored("out.weight", weight.float(), mesh), axes)
    with pytest.raises(PlanError, match=r"as bfloat16\[4, 8\], the plan expects bfloat16\[8, 4\]"):
        source.local(stored("out.weight", weight.t(), mesh), axes)


@pytest.mark.parametrize("make", SOURCES)
def test_a_parameter_is_found_under_its_other_names(make: MakeSource, tmp_path: Path) -> None:
    source, full = make(tmp_path)
    weight = full["qkv.weight"]
    parameter = Parameter("head.weight", (12, 4), (12, 4), "float32", aliases=("tail", "qkv.weight"))
    (axes,) = everywhere(Mesh())
    assert torch.equal(source.local(parameter, axes), weight)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def test_only_the_shard_is_read(tmp_path: Path) -> None:
    """From a file much larger than what this process has ever held: its data is a hole that takes no disk."""
    rows, columns = 9 * 2**20, 1024
    size = rows * columns
    header = json.dumps({"w": {"dtype": "I8", "shape": [rows, columns], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    before = peak_bytes()
    assert before < size - GIB, "the process holds too much already for this test to tell anything"
    parameter = Parameter("w", (rows // 512, columns), (rows, columns), "int8", {"tp": "S(0,3)"})
    shard = FileSource(path).local(parameter, {"tp": Place(512, 300)})
    assert shard.shape == parameter.shape
    assert peak_bytes() - before < 64 * 2**20


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.safetensors", None, "there is no weights file"),
        ("w.safetensors", b"\x08", "is not a whole safetensors file"),
        ("recipes.json", None, "holds no init recipes"),
        ("recipes.json", b'{"w": {"sha', "holds no init recipes"),
        ("recipes.json", b'{"w": {}}', "the init recipe of 'w' can't be read"),
    ],
)
def test_damaged_files_are_refused(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    (axes,) = everywhere(Mesh())
    with pytest.raises(PlanError, match=message):
        open_source(tmp_path / name, 0).local(stored("w", torch.zeros(1), Mesh()), axes)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    source, full = from_file(tmp_path)
    path = tmp_path / "w.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (axes,) = everywhere(Mesh())
    with pytest.raises(PlanError, match="is not a whole safetensors file"):
        source.local(stored("scale", full["scale"], Mesh()), axes)


def test_values_on_meta_are_none(tmp_path: Path) -> None:
    empty = {"w": torch.zeros(2, device="meta")}
    (axes,) = everywhere(Mesh())
    with pytest.raises(PlanError, match="'w' is on the meta device and has no values"):
        StateSource(empty).local(stored("w", empty["w"], Mesh()), axes)
    with pytest.raises(PlanError, match="'w' is on the meta device and has no values to write"):
        save_state(tmp_path / "w.safetensors", empty)
    assert list(tmp_path.iterdir()) == []


def test_state_is_written_once_under_first_names(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    full = {
        "wte.weight": whole,
        "head.weight": nn.Parameter(whole),
        "first": whole[:3],
        "transposed": whole.t(),
        "empty": torch.empty(0),
        "also_empty": torch.empty(0),
        "count": torch.tensor(3),
    }
    path = tmp_path / "w.safetensors"
    save_state(path, full)
    written = load_file(path)
    assert set(written) == set(full) - {"head.weight"}
    assert all(torch.equal(written[name], full[name]) for name in written)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    save_state(path, {"w": torch.ones(2)})

    def fails(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, file, metadata)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autopar.runtime.weights.save_file", fails)
    with pytest.raises(OSError, match="No space left"):
        save_state(path, {"w": torch.zeros(2)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.safetensors"]
    assert load_file(path)["w"].tolist() == [1.0, 1.0]


def stage() -> nn.Module:
    module = nn.Module()
    declare(module, "layers.0.qkv.weight", (6, 4), torch.float32)
    declare(module, "layers.0.scale", (), torch.float64, trainable=False)
    declare(module, "rotary.flags", (4,), torch.bool, buffer=True)
    return module


def stage_program(mesh: Mesh) -> Program:
    return program(
        mesh,
        Parameter("layers.0.qkv.weight", (6, 4), (12, 4), "float32", {"tp": "S(0,3)"}),
        Parameter("layers.0.scale", (), (), "float64", trainable=False),
        Parameter("rotary.flags", (4,), (4,), "bool", trainable=False, is_buffer=True),
    )


def stage_state() -> dict[str, torch.Tensor]:
    full = state()
    return {
        "layers.0.qkv.weight": full["qkv.weight"],
        "layers.0.scale": full["scale"],
        "rotary.flags": full["flags"],
    }


def test_materialize_fills_what_a_stage_declares() -> None:
    mesh, full = Mesh(tp=2), stage_state()
    for axes in everywhere(mesh):
        module = stage()
        materialize(module, stage_program(mesh), whole(StateSource(full), axes, "cpu"))
        weight = module.get_parameter("layers.0.qkv.weight")
        assert isinstance(weight, nn.Parameter)
        assert weight.requires_grad
        assert torch.equal(weight, slice_shard(full["layers.0.qkv.weight"], {"tp": "S(0,3)"}, axes))
        assert not module.get_parameter("layers.0.scale").requires_grad
        assert torch.equal(module.get_buffer("rotary.flags"), full["rotary.flags"])
        assert not any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def test_aliases_of_one_stage_share_one_parameter() -> None:
    module = nn.Module()
    declare(module, "wte.weight", (4, 2), torch.float32)
    declare(module, "head.weight", (4, 2), torch.float32)
    tied = Parameter("wte.weight", (4, 2), (4, 2), "float32", aliases=("head.weight",))
    (axes,) = everywhere(Mesh())
    materialize(module, program(Mesh(), tied), whole(StateSource({"wte.weight": torch.ones(4, 2)}), axes, "cpu"))
    assert module.get_parameter("wte.weight") is module.get_parameter("head.weight")


def test_a_stage_and_its_program_must_agree() -> None:
    mesh = Mesh(tp=2)
    axes, source, module = everywhere(mesh)[0], StateSource(stage_state()), stage()
    declare(module, "extra", (1,), torch.float32)
    with pytest.raises(PlanError, match=r"declares \['extra'\], which its program doesn't list"):
        materialize(module, stage_program(mesh), whole(source, axes, "cpu"))
    module = stage()
    declare(module.get_submodule("layers.0.qkv"), "bias", (2,), torch.float32)
    bias = Parameter("layers.0.qkv.bias", (3,), (6,), "float32", {"tp": "S(0)"})
    wrong = program(mesh, *stage_program(mesh).parameters, bias)
    with pytest.raises(PlanError, match=r"declares float32\[2\] as 'layers\.0\.qkv\.bias', its program float32\[3\]"):
        materialize(module, wrong, whole(source, axes, "cpu"))
    with pytest.raises(PlanError, match=r"declares nothing as 'layers\.0\.qkv\.bias'"):
        materialize(stage(), wrong, whole(source, axes, "cpu"))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), Mesh(dp=2, tp=2), Mesh(dp=4)], ids=str)
def test_a_model_on_meta_starts_alike_on_every_mesh(mesh: Mesh) -> None:
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=32,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    recipes = recipe.record(model)
    whole = recipe.initialize(model, recipes, seed=5)
    kinds = {2: {"dp": "S(1)", "tp": "S(0,2)"}, 1: {"dp": "S(0)"}}
    for name, tensor in whole.items():
        parameter = stored(name, tensor, mesh, **kinds[tensor.dim()])
        shards = [
            (mesh.coordinates(axes.rank), RecipeSource(recipes, 5).local(parameter, axes)) for axes in everywhere(mesh)
        ]
        assert all(shard.shape == parameter.shape for _, shard in shards)
        assert torch.equal(unshard(parameter, shards), whole[name])
