"""Measured and predicted memory of jobs: simulated ranks, one rank alone on fake tensors, passes added up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import ArgumentError
from autopar.runtime.job import Job
from autopar.schedules import Action, Costs, generate, lower, simulate_timeline
from autopar.schedules.actions import parse_action
from autopar.schedules.offloads import ALL, Away, offload_activations
from autopar.simulate.alike import after, enough, keys, stand_ins
from autopar.simulate.alone import run_alone
from autopar.simulate.likeness import likeness
from autopar.simulate.measure import RankMemory, fake_memory, measure, measured_memory, on_shapes
from autopar.simulate.predict import Known, predicted_memory, waiting_bytes
from autopar.storages import Phase
from tests.fast_cluster import FAST
from tests.models import MLP, Case, make, mlp, prepared
from tests.pinned import compile_pinned
from tests.ranks.branching_models import readers


def compiled(
    name: str, mesh: dict[str, int], rows: int = 8, **options: Any
) -> tuple[autopar.ParallelModel, dict[str, torch.Tensor]]:
    case = make(name, rows, torch.float32)
    given: dict[str, Any] = {"sample": case.batch, "loss": case.loss, "mesh": mesh, "cluster": FAST, **options}
    job = compile_pinned(case.model, math.prod(mesh.values()), **given)
    return job, {item.path: value for item, value in zip(job.plan.inputs, _values(case.batch), strict=True)}


def _values(batch: Any) -> list[torch.Tensor]:
    return list(batch.values() if isinstance(batch, dict) else batch)


def test_one_rank_alone() -> None:
    """Its collectives end at once and leave what was there; the caller's torch.distributed is untouched."""

    def program() -> tuple[int, int, list[float]]:
        group = dist.new_group([1, 3])
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        dist.recv(x, src=0)
        return dist.get_rank(), dist.get_world_size(), x.tolist()

    assert run_alone(program, 3, 8) == (3, 8, [1.0, 1.0, 1.0])
    assert not dist.is_initialized()


def test_what_it_raises_comes_out() -> None:
    def program() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_alone(program, 0, 2)


def test_memory_of_an_mlp_by_hand() -> None:
    """One device, one microbatch: state is four copies; the kinds of the peak add up to it."""
    job, batch = compiled("mlp", {"dp": 1}, microbatches=1)
    (memory,) = measured_memory(job.job, batch)
    elements = sum(p.numel() for p in job.reference().parameters())
    begin, *_, step = memory.phases
    assert begin.label == "begin"
    assert begin.start["parameters"] == 4 * elements
    assert 8 * elements <= begin.start["optimizer"] < 8 * elements + 8 * 64  # and a counter per parameter
    assert begin.start.get("gradients", 0) == 0
    assert step.label == "STEP"
    assert step.start["gradients"] == 4 * elements
    assert step.end.get("gradients", 0) == 0
    assert sum(memory.peak.peak.values()) == memory.peak_bytes == max(phase.peak_bytes for phase in memory.phases)


def test_the_default_optimizer_works_in_no_memory_on_a_gpu() -> None:
    """One kernel updates all; on the CPU each parameter's update has temporaries."""
    job, batch = compiled("mlp", {"dp": 2}, microbatches=2)

    def added(device: str) -> int:
        (memory, *_) = predicted_memory(job.job, batch, device=device)
        step = next(phase for phase in memory.phases if phase.label.startswith("STEP"))
        return step.peak_bytes - sum(step.start.values())

    assert added("cuda") == 0
    assert added("cpu") > 0


def close(predicted: list[RankMemory], measured: list[RankMemory], tolerance: float) -> None:
    for rank, (found, expected) in enumerate(zip(predicted, measured, strict=True)):
        error = found.peak_bytes / expected.peak_bytes - 1
        assert abs(error) <= tolerance, f"rank {rank}: {100 * error:+.2f} %"


CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("gpt2", {"pp": 2}, {"microbatches": 8}),
    ("mlp", {"dp": 2}, {"microbatches": 4, "zero": 2}),
    ("gpt2", {"pp": 2}, {"microbatches": 8, "schedule": "dualpipe-v"}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), CASES, ids=str)
def test_predicted_as_simulated_ranks_measure(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    job, batch = compiled(name, mesh, **options)
    measured, predicted = measured_memory(job.job, batch), predicted_memory(job.job, batch)
    close(predicted, measured, 0.03)
    labels = [phase.label for phase in measured[0].phases]
    assert [phase.label for phase in predicted[0].phases] == labels == ["begin", *map(str, job.schedule.lists[0])]


class Chain(nn.Module):
    """Layers that are alike, between two that are not."""

    def __init__(self, layers: int, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def test_ranks_with_the_same_code_are_run_once() -> None:
    """Those in the middle; each keeps as many microbatches in flight as it really does."""
    batch = {"x": torch.randn(16, 8)}
    job = compile_pinned(Chain(12), 6, sample=batch, mesh={"pp": 6}, microbatches=8, cluster=FAST).job
    kinds = [tuple(likeness(job, rank).values()) for rank in range(6)]
    assert len(set(kinds)) < 6
    assert kinds[1] == kinds[2]
    assert kinds[0] != kinds[1] != kinds[5]
    predicted, alone = predicted_memory(job, batch), fake_memory(job, batch)
    assert [memory.peak_bytes for memory in predicted] == [memory.peak_bytes for memory in alone]
    assert predicted[1].peak_bytes > predicted[2].peak_bytes


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_what_is_composed_is_what_the_whole_list_takes(mesh: dict[str, int]) -> None:
    """Though what a pass takes depends on its neighbours there: weights gathered ahead."""
    batch = {"x": torch.randn(16, 8)}
    given: dict[str, Any] = {"sample": batch, "mesh": mesh, "microbatches": 8, "zero": 3, "cluster": FAST}
    composed_as_whole(compile_pinned(Chain(8), math.prod(mesh.values()), **given).job, batch)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2}, {"zero": 3, "schedule": "interleaved", "chunks": 4}),
        ({"pp": 2, "dp": 2}, {"zero": 2, "schedule": "zb-v"}),
        ({"pp": 2, "dp": 4}, {"zero": 3, "schedule": "interleaved", "chunks": 3, "precision": "bf16"}),
    ],
    ids=str,
)
def test_what_is_composed_where_stages_share_what_is_under_way(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """A backward waits for the messages of other stages; some of these send one in a backward."""
    batch = {"x": torch.randn(32, 8)}
    given: dict[str, Any] = {"sample": batch, "mesh": mesh, "microbatches": 8, "cluster": FAST, **options}
    composed_as_whole(compile_pinned(Chain(12, 64), math.prod(mesh.values()), **given).job, batch)


@pytest.mark.parametrize(
    "options",
    [{"schedule": "zb-1p", "zero": 2, "recompute": "full"}, {"schedule": "zb-h1", "zero": 3, "precision": "bf16"}],
    ids=str,
)
def test_what_is_composed_where_backwards_are_in_two_parts(options: dict[str, Any]) -> None:
    """Gradients of small weights, which the first leaves for the second; gathered weights that passes between renew."""
    given: dict[str, Any] = {"mesh": {"pp": 2, "dp": 4}, "microbatches": 12, "cluster": FAST, **options}
    batch = {"x": torch.randn(96, 8)}
    composed_as_whole(compile_pinned(Chain(10, 64), 8, sample=batch, **given).job, batch)


@pytest.mark.slow
def test_what_is_composed_where_ranks_have_several_stages() -> None:
    options = {"zero": 3, "schedule": "interleaved", "chunks": 2, "microbatches": 8}
    job, batch = compiled("llama_deep", {"pp": 2, "dp": 2}, rows=16, **options)
    composed_as_whole(job.job, batch)


def test_what_is_composed_where_activations_are_away() -> None:
    batch = {"x": torch.randn(8 * 300, 8)}
    away: dict[str, Any] = {"mesh": {"pp": 2}, "microbatches": 8, "offload": ("activations", "parameters")}
    composed_as_whole(compile_pinned(Chain(6), 2, sample=batch, **away).job, batch)


def test_microbatches_whose_activations_go_away_are_told_apart() -> None:
    kinds = {2: ("F", "OFFLOAD", "FETCH", "B"), 3: ("F", "B"), 4: ("F", "B")}
    found = keys([Action(kind, number, 0) for number, row in kinds.items() for kind in row], {0: 0}, 8)
    forwards = [found[Action("F", number, 0)] for number in kinds]
    assert forwards[0] != forwards[1] == forwards[2]


class Bent(nn.Module):
    """What a layer makes, it keeps for its own backward; the message to the next stage is the same memory."""

    def __init__(self, layers: int = 4, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, width), nn.Linear(width, 50, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("vocabulary", ["redistributed", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("share", [0, 3])
def test_what_is_composed_where_messages_are_what_stages_keep(vocabulary: str, share: int) -> None:
    """So they are there until both are over; where some of what is kept goes to the host, until then."""
    ids = torch.randint(50, (16 * 8, 64))
    given: dict[str, Any] = {"mesh": {"pp": 2}, "microbatches": 16, "offload": ("activations",), "recompute": "none"}
    sample = {"ids": ids, "labels": ids}
    job = compile_pinned(Bent(), 2, sample=sample, vocabulary=vocabulary, schedule="1f1b", cluster=FAST, **given)
    assert all(job.timeline.costs.offload_bytes[:1])
    away = offload_activations(job.timeline.schedule, Away({0: share, 1: share}, [0, 0]), job.timeline.costs)
    composed_as_whole(job.job.like(schedule=away), sample)


def test_a_split_embedding_keeps_none_of_what_it_gave() -> None:
    """Each rank's part is summed for the first stage; until its backward only where that begins is known."""
    options: dict[str, Any] = {"vocabulary": "vocab-2", "recompute": "none", "microbatches": 8}
    job, batch = compiled("gpt2", {"pp": 2}, rows=16, **options)
    whole = on_shapes(job.job, batch, job.job.mesh.rank(pp=1), measure)
    part = 4 * math.prod(job.job.programs[1].program.receives[0].shape)
    for phase in whole.phases:
        if phase.label.startswith("SUM_E"):
            assert sum(phase.start.values()) - sum(phase.end.values()) == part


def test_messages_wait_one_each_way() -> None:
    """In the middle of a pipeline; between stages of one rank there are none."""
    batch = {"x": torch.randn(16, 8)}
    given: dict[str, Any] = {"sample": batch, "microbatches": 8, "cluster": FAST}
    straight = compile_pinned(Chain(6), 3, mesh={"pp": 3}, **given).job
    message = 4 * (16 // 8) * 16
    assert [waiting_bytes(straight, rank) for rank in range(3)] == [message, 2 * message, message]
    alone = compile_pinned(Chain(6), 1, mesh={"pp": 1}, schedule="interleaved", chunks=3, **given).job
    assert waiting_bytes(alone, 0) == 0


def composed_as_whole(job: Job, batch: dict[str, torch.Tensor]) -> None:
    for index, found in enumerate(predicted_memory(job, batch)[:: job.mesh.world // job.mesh.pp]):
        whole = on_shapes(job, batch, job.mesh.rank(pp=index), measure)
        assert [summed(phase) for phase in found.phases] == [summed(phase) for phase in whole.phases]


def summed(phase: Phase) -> tuple[str, list[Counter[str]], tuple[int, int, int]]:
    """A message that is still there counts as what was kept, whichever pass sent it."""
    moments = [Counter(kinds) for kinds in (phase.start, phase.peak, phase.end)]
    for kinds in moments:
        kinds["gradients"] += kinds.pop("saved", 0)
    return phase.label, [+kinds for kinds in moments], phase.host_bytes


@pytest.mark.parametrize(
    ("case_of", "schedule"),
    [
        (readers, "gpipe"),
        (readers, "zb-v"),
        (lambda batch: Case(MLP(layers=8, width=64), mlp(batch).batch), "v-half"),
    ],
)
@pytest.mark.parametrize("share", [3, ALL])
def test_lists_say_what_goes_and_comes_back(case_of: Callable[[int], Case], schedule: str, share: int) -> None:
    """FREE gives back what a timeline takes it to, but for what is still being sent, and FETCH takes it again."""
    case = prepared(lambda: case_of(8 * 128))
    given: dict[str, Any] = {"sample": case.batch, "mesh": {"pp": 2}, "microbatches": 8, "cluster": FAST}
    job = compile_pinned(case.model, 2, schedule=schedule, offload=("activations",), recompute="none", **given)
    away = Away(dict.fromkeys(range(job.schedule.stages), share), [0, 0])
    timeline = simulate_timeline(offload_activations(job.schedule, away), job.timeline.costs)
    batch = {item.path: value for item, value in zip(job.plan.inputs, case.batch, strict=True)}
    seen: set[int] = set()
    for rank in measured_memory(job.job.like(schedule=timeline.schedule), batch):
        for phase in rank.phases:
            if phase.label.startswith(("FREE", "FETCH")):
                action = parse_action(phase.label)
                more = sum(phase.end.values()) - sum(phase.start.values())
                sent = 128 * 64 * 8 if action.kind == "FREE" and action.stage == 0 else 0  # what all read
                assert 0 <= more - timeline.costs.kept_bytes(action) <= sent, phase.label
                if action.kind == "FETCH":
                    assert phase.end["saved"] - phase.start["saved"] == more
                seen.add(action.stage)
    assert seen >= set(range(job.schedule.stages - 1))


def test_what_was_run_serves_other_jobs_as_far_as_they_are_alike() -> None:
    """The third has the code of the first; its optimizer's state is narrower."""
    batch = {"x": torch.randn(4, 8)}
    given: dict[str, Any] = {"sample": batch, "mesh": {"pp": 2}, "microbatches": 2, "cluster": FAST}
    chain, known = Chain(2), Known()
    options: list[dict[str, Any]] = [{"recompute": "none"}, {"recompute": "full"}, {"state_dtype": "bfloat16"}]
    jobs = [compile_pinned(chain, 2, **given, **more).job for more in options]
    found = [predicted_memory(job, batch, known) for job in jobs]
    assert found == [predicted_memory(job, batch) for job in jobs]
    assert found[0] != found[2]
    runs = len(known.ranks), len(known.phases), dict(known.own)
    assert found[1] == predicted_memory(jobs[1], batch, known)
    assert runs == (len(known.ranks), len(known.phases), known.own)


@pytest.mark.parametrize("room", [80, 1000])
def test_ranks_that_are_alike_tell_each_other_what_their_actions_take(room: int) -> None:
    """Of three that are, one has its first stage's activations on the host, one its second's; the third needs no run
    of its own. Where there is little room, they wait for copies early."""
    batch = {"x": torch.randn(8 * 3000, 8)}
    given: dict[str, Any] = {"schedule": "interleaved", "chunks": 2, "microbatches": 8, "cluster": FAST}
    job = compile_pinned(Chain(20), 5, sample=batch, mesh={"pp": 5}, offload=("activations",), **given).job
    plain = lower(generate("interleaved", 5, 8, chunks=2))
    costs = Costs.uniform(plain, forward_seconds=1.0, backward_seconds=2.0, activation_bytes=10)
    costs = replace(costs, offload_bytes=(10,) * 10)
    away = Away({**dict.fromkeys([1, 7, 3], ALL), 8: 5}, [room] * 5)
    job, known = job.like(schedule=offload_activations(plain, away, costs)), Known()
    found = predicted_memory(job, batch, known)
    assert len({tuple(likeness(job, rank).values()) for rank in (1, 2, 3)}) == 1
    for index in range(5):
        whole = on_shapes(job, batch, job.mesh.rank(pp=index), measure)
        assert [summed(phase) for phase in found[index].phases] == [summed(phase) for phase in whole.phases]
    assert found[1].host_peak_bytes != found[3].host_peak_bytes
    assert len(known.ranks) == 3


def test_stages_that_are_alike_tell_each_other_what_their_passes_take() -> None:
    """Of ranks that aren't: each kind of stage is run on one rank alone, but for two microbatches. What is done once a
    step, and the first microbatch, find what is under way for the stages before: copies of small weights."""
    with torch.device("meta"):
        model, batch = Chain(40, 1536), {"x": torch.empty(512, 8)}
    given: dict[str, Any] = {"schedule": "interleaved", "chunks": 3, "microbatches": 8, "zero": 1, "precision": "bf16"}
    job = compile_pinned(model, 256, sample=batch, mesh={"pp": 4, "dp": 64}, cluster=FAST, **given).job
    composed_as_whole(job, batch)
    kinds = [Counter(likeness(job, job.mesh.rank(pp=index)).values()) for index in range(4)]
    known = Known()
    predicted_memory(job, batch, known)
    assert len(known.ranks) == len(set(map(tuple, kinds))) > 2
    forwards = [key for key in known.phases if key.kind == "F" and key.microbatch == 2]
    assert len(forwards) == len({text for kind in kinds for text in kind}) < 12


def test_passes_of_stages_that_ran_two_microbatches_say_nothing_of_others() -> None:
    """Gradients become wider in the second one that is run, which may be the last one. Here all is forgotten, which
    only the first of the stages that are alike is asked for again."""
    batch = {"x": torch.randn(16, 8)}
    given: dict[str, Any] = {"schedule": "interleaved", "chunks": 4, "microbatches": 8, "precision": "bf16"}
    job = compile_pinned(Chain(14, 64), 2, sample=batch, mesh={"pp": 2}, cluster=FAST, **given).job
    known = Known()
    found = predicted_memory(job, batch, known)
    known.phases.clear()
    assert predicted_memory(job, batch, known) == found


@pytest.mark.parametrize("options", [{}, {"zero": 1, "mesh": {"pp": 2, "dp": 2}}, {"precision": "bf16"}], ids=str)
def test_what_is_composed_where_stages_have_weights_in_common(options: dict[str, Any]) -> None:
    """Stages with the same code, on one rank and on several."""
    plain = {"mesh": {"pp": 2}, "schedule": "interleaved", "chunks": 4, "microbatches": 8, "cluster": FAST}
    given: dict[str, Any] = {**plain, **options}
    model, batch = Chain(14, 64), {"x": torch.randn(32, 8)}
    for index in (4, 5, 8):
        model.layers[index] = model.layers[2]
    job = compile_pinned(model, math.prod(given["mesh"].values()), sample=batch, **given).job
    ties = [any(p.shared_stages for p in module.program.parameters) for module in job.programs]
    assert 1 < sum(ties) < len(ties)
    composed_as_whole(job, batch)


def test_passes_after_which_backwards_are_told_apart() -> None:
    """By name; stage 5 sends nothing, and one that was reduced in between has let go of sums that others follow."""
    texts = "B0@0 B0@3 B0@5 B1@3 REDUCE@3 B1@0 B2@0"
    found = after([parse_action(text) for text in texts.split()], {0: 10, 3: 13, 5: 15}, {0, 3})
    assert [found[parse_action(text)] for text in texts.split()] == [
        (),
        ((10, False),),
        ((10, False), (13, False)),
        ((10, False), (-1, False)),
        ((-1, False), (-1, False)),
        ((13, True), (13, True)),
        ((13, True), (-1, False)),
    ]


def test_stages_that_nobody_asks_about_run_two_microbatches() -> None:
    actions = [Action(kind, number, stage) for stage in (0, 4, 5) for kind in "FB" for number in range(6)]
    actions += [Action("GATHER", stage=stage) for stage in (0, 4, 5)]
    ran, told = enough(actions, [Action("F", 3, 5)])
    assert told == {4, 5}  # they hand over to each other
    assert {action.microbatch for action in ran if action.stage == 0} == {-1, 0, 5}
    assert {action.microbatch for action in ran if action.stage == 4} == {-1, 0, 1, 3, 5}


def test_fake_tensors_hold_what_real_ones_do() -> None:
    """To the byte, where no message waits for another rank."""
    job, batch = compiled("mlp", {"dp": 2}, microbatches=2, zero=1)
    measured, fake = measured_memory(job.job, batch), fake_memory(job.job, batch)
    for real, found in zip(measured, fake, strict=True):
        assert [(p.label, dict(p.peak)) for p in found.phases] == [(p.label, dict(p.peak)) for p in real.phases]


def test_masters_on_the_host() -> None:
    job, batch = compiled("mlp", {"dp": 1}, microbatches=2, offload=("optimizer",))
    plain, batch = compiled("mlp", {"dp": 1}, microbatches=2)
    (away,), (here,) = measured_memory(job.job, batch), measured_memory(plain.job, batch)
    elements = sum(p.numel() for p in plain.reference().parameters())
    assert here.host_peak_bytes == 0
    assert away.host_peak_bytes >= 12 * elements  # masters and two moments
    assert away.peak_bytes < here.peak_bytes


def stands_for(count: int) -> list[int]:
    actions = [Action("F", microbatch, 0) for microbatch in range(count)]
    found = keys(actions, {0: 0}, count)
    return [stand_ins(found)[found[action]].microbatch for action in actions]


def test_which_microbatch_stands_for_which() -> None:
    assert stands_for(8) == [0, 1, 2, 2, 2, 2, 2, 7]
    assert stands_for(3) == [0, 1, 2]
    assert stands_for(1) == [0]


def test_a_pass_that_only_later_microbatches_have_has_a_stand_in() -> None:
    """DualPipeV splits the backward of the first and last microbatches of a stage, and no others."""
    actions = generate("dualpipe-v", 4, 16).lists[0]
    found = keys(actions, {0: 0, 7: 1}, 16)
    assert list(found) == list(actions)
    whole = [action for action in actions if action.kind == "B" and action.stage == 7]
    assert min(action.microbatch for action in whole) > 2
    assert {stand_ins(found)[found[action]] for action in whole if action.microbatch < 15} == {whole[0]}


def test_report_of_a_job() -> None:
    job, _ = compiled("mlp", {"dp": 2}, microbatches=2)
    report = job.memory(measure="fake")
    assert report.errors == [0.0, 0.0]
    assert report.budget_bytes == FAST.device.memory_bytes
    with pytest.raises(ArgumentError, match="needs a batch"):
        job.memory(measure="simulate")
    with pytest.raises(ArgumentError, match="this rank runs on cpu"):
        compiled("mlp", {"dp": 1})[0].memory(make("mlp", 8, torch.float32).batch, measure="device")
    with pytest.raises(ArgumentError, match="may be one of simulate, fake, device"):
        job.memory(measure="guess")


def test_a_rank_whose_stages_are_known_is_asked_for_passes_of_the_vocabulary() -> None:
    """They are no stage's, and what they take is said of each rank."""
    job, batch = compiled("gpt2", {"pp": 2}, microbatches=8, vocabulary="vocab-1")
    known = Known()
    found = predicted_memory(job.job, batch, known)
    known.ranks.clear()
    known.own.clear()
    assert predicted_memory(job.job, batch, known) == found
