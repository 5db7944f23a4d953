"""Training steps on ranks against the same model on one device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar import simulate
from autopar.errors import BatchError, DeadRankError, MismatchError, ScheduleError
from autopar.mesh import Mesh
from autopar.runtime import Axes, Input, Parameter, Program
from autopar.runtime import Tensor as Spec
from autopar.runtime.executor import Executor
from autopar.schedules import Schedule, generate, lower, parse_list
from tests.runtime.parity import assert_equal_to_one_device, train_rank
from tests.runtime.ranks import on_ranks
from tests.runtime.stages import make_batch, make_executor, make_program, make_stage, make_weights


@pytest.mark.parametrize(
    ("mesh", "microbatches", "schedule"),
    [
        (Mesh(), 1, "gpipe"),
        (Mesh(), 4, "1f1b"),
        (Mesh(dp=2), 1, "gpipe"),
        (Mesh(dp=4), 2, "gpipe"),
        (Mesh(tp=2), 1, "gpipe"),
        (Mesh(tp=4), 2, "gpipe"),
        (Mesh(pp=2), 1, "gpipe"),
        (Mesh(pp=2), 4, "1f1b"),
        (Mesh(pp=4), 8, "gpipe"),
        (Mesh(pp=4), 8, "1f1b"),
        (Mesh(dp=2, tp=2), 4, "gpipe"),
        (Mesh(pp=2, dp=2, tp=2), 4, "gpipe"),
        (Mesh(pp=2, dp=2, tp=2), 4, "1f1b"),
        (Mesh(pp=4, dp=2, tp=2), 8, "1f1b"),
    ],
    ids=str,
)
def test_three_steps_equal_one_device(mesh: Mesh, microbatches: int, schedule: str) -> None:
    ranks = on_ranks(mesh, lambda axes: train_rank(axes, microbatches, schedule))
    assert_equal_to_one_device(ranks, mesh)


def test_a_parameter_that_nothing_uses_has_no_gradient_and_stays() -> None:
    (trained,) = on_ranks(Mesh(), lambda axes: train_rank(axes, 2, "gpipe"))
    assert "model.unused.weight" not in trained.gradients[0]
    assert torch.equal(trained.weights["model.unused.weight"], make_weights()["model.unused.weight"])


class Double(nn.Module):
    """Two stages of it make x -> w1 w0 x; the second returns the sum as the loss."""

    def __init__(self, weight: float, last: bool) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.tensor(weight)), last

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor]:
        y = self.weight * x
        return y.sum() if self.last else (y,)


def test_two_stages_on_one_rank_pass_values_without_messages() -> None:
    def program(stage: int) -> Program:
        between = (Spec("x", (2,), "float32"),)
        x, weight = Input("x", "x", (4,), "float32", 0), Parameter("weight", (), (), "float32")
        return Program(
            stage, 2, Mesh().to_json(), 2,
            receives=between if stage else (), inputs=() if stage else (x,), totals=(),
            sends=() if stage else between, parameters=(weight,),
        )  # fmt: skip

    order = parse_list("F0@0 F1@0 F0@1 B0@1 B0@0 F1@1 B1@1 B1@0")
    schedule = lower(Schedule("local", 2, 2, (0, 0), (order,)))
    modules = {0: Double(2.0, False), 1: Double(3.0, True)}
    gradients: list[float] = []

    class Keep(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            gradients.extend(float(p.grad) for group in self.param_groups for p in group["params"])

    optimizer = Keep([p for m in modules.values() for p in m.parameters()], lr=0.1)
    axes = Axes.build(Mesh(), 0, "cpu")
    executor = Executor(
        modules, {0: program(0), 1: program(1)}, schedule, axes, optimizer,
    )  # fmt: skip
    loss = executor.step({"x": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    assert loss.item() == 60
    assert gradients == [30, 20]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_leaves_no_activation_behind(schedule: str) -> None:
    def program(axes: Axes) -> list[object]:
        executor = make_executor(axes, 4, schedule)
        made: list[weakref.ref[Tensor]] = []

        def remember(module: nn.Module, args: object, out: Tensor | tuple[Tensor, ...]) -> None:
            made.extend(weakref.ref(x) for x in (out if isinstance(out, tuple) else (out,)))

        (stage,) = executor.stages.values()
        stage.register_forward_hook(remember)
        stage.model.layers[stage.layers[0]].register_forward_hook(remember)
        executor.step(make_batch(0))
        gc.collect()
        assert len(made) >= 8
        return [ref() for ref in made if ref() is not None]

    assert on_ranks(Mesh(pp=2), program) == [[], []]


def test_what_was_received_is_freed_by_its_backward() -> None:
    def program(axes: Axes) -> list[int]:
        executor, alive = make_executor(axes, 4), []
        received: list[weakref.ref[Tensor]] = []

        def remember(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            alive.append(sum(ref() is not None for ref in received))
            received.append(weakref.ref(args[0]))

        (stage,) = executor.stages.values()
        stage.register_forward_pre_hook(remember)
        executor.step(make_batch(0))
        return alive

    assert on_ranks(Mesh(pp=2), program)[1] == [0, 0, 0, 0]


def test_1f1b_keeps_fewer_activations_than_gpipe() -> None:
    def peak(schedule: str) -> int:
        def program(rank: int) -> None:
            executor = make_executor(Axes.build(Mesh(pp=2), rank, "cpu"), 8, schedule)
            executor.step(make_batch(0))

        return simulate.run(program, 2).peak_bytes[1]

    assert peak("1f1b") < 0.6 * peak("gpipe")


def test_steps_and_microbatches_move_the_random_stream() -> None:
    def program(axes: Axes) -> list[tuple[int, int]]:
        executor, seen = make_executor(axes, 2), []
        (module,) = executor.stages.values()
        module.register_forward_pre_hook(lambda *_: seen.append((axes.stream.step, axes.stream.microbatch)))
        for step in range(2):
            executor.step(make_batch(step))
        return seen

    assert on_ranks(Mesh(), program)[0] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def refused(change: Callable[[dict[str, Tensor]], object]) -> str:
    executor = make_executor(Axes.build(Mesh(), 0, "cpu"), 2)
    batch = make_batch(0)
    change(batch)
    with pytest.raises(BatchError) as caught:
        executor.step(batch)
    return str(caught.value)


def test_batches_of_another_form_are_refused() -> None:
    missing = refused(lambda batch: batch.pop("ids"))
    assert missing == "the batch has no 'ids'; it has '0.labels', 'scale'"
    shape = refused(lambda batch: batch.update(ids=batch["ids"][:8]))
    assert "'ids' has shape (8, 8) and dtype int64, but the program was compiled for shape (16, 8)" in shape
    dtype = refused(lambda batch: batch.update(scale=batch["scale"].float()))
    assert "'scale' has shape (16,) and dtype float32, but" in dtype
    assert "dtype float64" in dtype


def test_rows_that_do_not_divide_are_refused() -> None:
    axes = Axes.build(Mesh(), 0, "cpu")
    program = make_program(Mesh(), 3, 0, 1)
    schedule = lower(generate("gpipe", 1, 3))
    executor = Executor({0: make_stage(axes, program)}, {0: program}, schedule, axes, None)
    with pytest.raises(BatchError, match="'ids' has 16 rows, which don't divide over 3 microbatches x dp 1"):
        executor.step(make_batch(0))


def test_actions_of_another_rank_are_refused() -> None:
    axes = Axes.build(Mesh(), 0, "cpu")
    program = make_program(Mesh(), 2, 0, 1)
    schedule = lower(generate("gpipe", 2, 2))
    schedule = replace(schedule, lists=schedule.lists[::-1])
    with pytest.raises(ScheduleError, match=r"run stages \[1\], but this rank has modules for \[0\]"):
        Executor({0: make_stage(axes, program)}, {0: program}, schedule, axes, None)


def test_a_module_of_another_plan_is_named_before_anything_is_sent() -> None:
    def program(axes: Axes) -> None:
        executor = make_executor(axes, 2)
        for module in executor.stages.values():
            module.register_forward_hook(lambda m, args, out: (out[0][:1], out[1]) if len(out) == 2 else out)
        executor.step(make_batch(0))

    with pytest.raises(DeadRankError) as caught:
        simulate.run(lambda rank: program(Axes.build(Mesh(pp=2), rank, "cpu")), 2)
    assert isinstance(caught.value.__cause__, MismatchError)
    assert "F0@0 made [((1, 8, 8), torch.float64)" in str(caught.value.__cause__)
