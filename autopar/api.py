"""The composition root: a model becomes a plan, programs, simulated ranks or this rank of a real job."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from autopar import recipe, simulate
from autopar.audit import Audit, audit
from autopar.batch import Structure, flatten
from autopar.capture import Loss
from autopar.cluster import Cluster, Device
from autopar.documents import check_documents, check_positions
from autopar.errors import ArgumentError, PlanError
from autopar.graph import Model
from autopar.mesh import Mesh, check_count, check_ranks
from autopar.options import Given, Options, Precision
from autopar.passes.mixed_precision import LOWER
from autopar.plan import Plan
from autopar.planner.build import Built, Request, build, cut_head
from autopar.planner.wanted import Wanted
from autopar.preparation import Captured, Prepared, prepare, settled
from autopar.programs import Emitted, Programs, Training
from autopar.report import MemoryReport, memory_report
from autopar.report.search_progress import Progress
from autopar.runtime import Input, batches
from autopar.runtime.executor import Executor
from autopar.runtime.job import (
    Job,
    RankResult,
    connect,
    join_world,
    run_rank,
    start,
    text_of_rank_zero,
)
from autopar.runtime.loads import Load, read_load
from autopar.runtime.modules import dtype_of
from autopar.runtime.optimizers import GivenOptimizer, SchedulerMaker, adamw, maker
from autopar.runtime.weights import RecipeSource, Source, StateSource
from autopar.schedules import Schedule
from autopar.search import Pins, choose
from autopar.search.watching import tell
from autopar.simulate.predict import Known, predictor, waiting_bytes
from autopar.storages import BUFFERS, KINDS
from autopar.verification import Verification, verify_job
from autopar.write import write_directory


@dataclass(frozen=True)
class SimulationResult:
    """What simulated ranks computed, gathered under the model's own names.

    ``losses`` per step; ``gradients`` of the last step, before clipping; ``parameters`` after it; ``peak_bytes`` per
    rank, empty if not tracked; ``sent_bytes`` per rank and mesh axis. ``expert_load`` per step: by layer, the slots of
    each expert, of the whole batch. ``buffers`` that steps change: selection biases of routers, running averages.
    """

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    peak_bytes: list[int]
    sent_bytes: list[dict[str, int]]
    expert_load: list[Load] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def capture(
    model: nn.Module,
    *,
    sample: Any,
    loss: Loss | None = None,
    batch_dim: int = 0,
    seq_dim: int = 1,
    precision: Precision = "model",
) -> Captured:
    """Trace ``model`` once, to plan it many times: :func:`compile` and :func:`plan` take what is returned as ``model``.

    The arguments are those of :func:`compile`; they and the model's code are fixed here, its weights are not. Raises
    CaptureError, BatchError; ArgumentError under a ``torch.autocast`` of another precision.
    """
    _check_kinds(model, loss=loss)
    Options.of(precision=precision)
    for device in ("cuda", "cpu"):
        _under_autocast(precision, device, fixed=True)
    captured = Captured(model, sample, loss, (batch_dim, seq_dim), precision)
    _ = captured.flat  # what can't be traced is refused here
    return captured


def plan(model: nn.Module | Captured, gpus: int, *, sample: Any = None, **options: Any) -> Plan:
    """The plan alone; the same arguments as :func:`compile`."""
    return compile(model, gpus, sample=sample, **options).plan


def load(path: str | Path) -> Plan:
    """Read a plan file, or that of a written job's directory.

    Raises PlanError where it can't be read, is cut short, changed by hand or of another version; ArgumentError where
    ``path`` is none.
    """
    return Plan.load(path)


def compile(
    model: nn.Module | Captured,
    gpus: int,
    *,
    sample: Any = None,
    loss: Loss | None = None,
    optimizer: GivenOptimizer = adamw,
    scheduler: SchedulerMaker | None = None,
    mesh: Mapping[str, int] | None = None,
    microbatches: int | None = None,
    microbatch: int | None = None,
    cluster: str | Path | Cluster | None = None,
    plan: Plan | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    vocabulary: str | None = None,
    clip_norm: float | None = None,
    batch_dim: int | None = None,
    seq_dim: int | None = None,
    expert_load: str | Path | Mapping[str, Sequence[float]] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    fronts: bool = False,
    effort: float = 1.0,
    **options: Unpack[Given],
) -> ParallelModel:
    """Compile ``model`` for ``gpus`` ranks; the model is never modified.

    What isn't given of ``mesh``, ``microbatch(es)``, ``schedule``, ``chunks``, ``vocabulary`` and of the options
    ``zero``, ``zero_ranks``, ``offload`` and ``head_chunks`` is searched for: the shortest step that fits.

    ``sample`` is what the one-device model is called with (a tensor, tuple or mapping; the global batch). The loss is
    the model's own (a scalar, ``.loss``, ``["loss"]`` or the first output) or ``loss(output, batch)``. ``optimizer`` is
    a torch optimizer over the model's parameters, or a function that makes one from
    :class:`autopar.runtime.optimizers.Parameters`, or several of those; ``scheduler`` makes a learning rate scheduler
    of it. ``mesh`` pins degrees, some (``{"tp": 8}``) or all (that multiply to ``gpus``); ``cp`` splits sequences,
    ``ep`` is over how many of these ranks experts are split. ``microbatches`` per step, or ``microbatch`` rows in each
    on a rank. ``schedule``: a name of :data:`autopar.schedules.SCHEDULES`; ``chunks``: stages per pipeline rank;
    ``vocabulary``: where embedding and head are computed (:data:`autopar.planner.modes.MODES`). ``plan`` takes the
    decisions of an earlier plan. ``clip_norm`` clips the norm of all gradients. ``dp`` and microbatches split
    ``batch_dim`` of batch tensors (0), ``cp`` their ``seq_dim`` (1). ``expert_load`` is what experts had to do
    (:attr:`SimulationResult.expert_load`, or a file): hot ones are stored apart. ``options``: fields of
    :class:`autopar.Options`. A captured model (:func:`capture`) has its own sample, loss, dims and precision.
    ``progress`` is told of the search, of ``effort`` times the usual work at most; ``fronts`` searches with less memory
    and on other numbers of GPUs, too (:attr:`Plan.search`). Under ``torchrun``, rank 0 plans. Raises BudgetError with
    what would fit where nothing does; CaptureError, BatchError, ShardingError, StageError, PlanError, ArgumentError.
    """
    _check_kinds(model, plan, clip_norm, seed, loss=loss, scheduler=scheduler, progress=progress)
    sizes, target, degrees = _mesh(mesh, plan, gpus), _cluster(cluster, plan), {} if mesh is None else mesh
    chosen = _precise(_options(options, plan), model, target.device.kind, fixed=bool(plan) or "precision" in options)
    captured = _captured(model, sample, loss, (batch_dim, seq_dim), chosen.precision)
    prepared = captured.on(target.device.kind)
    pins = Pins(gpus, degrees, microbatches, microbatch, schedule, chunks, vocabulary, chosen, frozenset(options))
    _ = captured.flat  # so that the collector leaves the trace alone, too
    with settled():
        _check_plan(prepared[sizes is not None and sizes.cp > 1], pins, plan)
        given = (_source(captured, seed), maker(optimizer, captured.model), scheduler, clip_norm, seed)
        measured, watch = partial(_measured, given, Known()), progress and partial(tell, progress)
        search = partial(choose, measured=measured, watch=watch, fronts=fronts, effort=effort)
        return _compiled(captured, given, _built(prepared, pins, target, plan, read_load(expert_load or {}), search))


def _captured(
    model: nn.Module | Captured, sample: Any, loss: Loss | None, dims: tuple[int | None, int | None], precision: str
) -> Captured:
    """``model`` with what it is called with, traced when first asked for. Raises ArgumentError."""
    rows, positions = dims
    if not isinstance(model, Captured):
        dims = 0 if rows is None else rows, 1 if positions is None else positions
        return Captured(model, sample, loss, dims, precision)
    own = {"sample": sample, "loss": loss, "batch_dim": rows, "seq_dim": positions}
    if given := [name for name, value in own.items() if value is not None]:
        raise ArgumentError(f"{' and '.join(given)}: the model was captured with its own; leave out, or capture again")
    return model


def _compiled(captured: Captured, given: Training, built: Built) -> ParallelModel:
    """Without the captured graph, which a job that trains has no use for."""
    emitted = Emitted.of(built, given)
    digest = built.plan.digest
    return ParallelModel(
        model=captured.model,
        built=built,
        programs=emitted.programs.of_plan(digest),
        structure=captured.structure,
        job=emitted.job.of_plan(digest),
        loss=captured.loss,
        dims=captured.dims,
        constants=captured.constants,
    )


class ParallelModel:
    """A compiled model: its plan and programs, ready to be written, simulated, verified or trained."""

    def __init__(
        self,
        *,
        model: nn.Module,
        built: Built,
        programs: Programs,
        structure: Structure,
        job: Job,
        loss: Loss | None,
        dims: tuple[int, int],
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        self._model = model
        self._built = built
        self._programs = programs
        self._structure = structure
        self._job = job
        self._loss = loss
        self._dims = dims
        self._constants = constants
        self._rank: Executor | None = None

    @property
    def plan(self) -> Plan:
        return self._built.plan

    @property
    def timeline(self) -> Any:
        """The predicted step, to draw (:func:`autopar.schedules.render`)."""
        return self._built.pipeline.timeline

    @property
    def schedule(self) -> Schedule:
        """What each pipeline rank does, in order."""
        return self._built.pipeline.schedule

    def source(self, rank: int) -> str:
        """The emitted modules that ``rank`` runs: one per stage it holds, and its rows of split vocabulary layers."""
        texts = [self._programs.stages[stage].text for stage in self._job.stages(rank)]
        if self._programs.vocabulary is not None:
            texts.append(self._programs.vocabulary.text)
        return "\n\n".join(texts)

    def write(self, directory: str | Path) -> Path:
        """Write plan, programs, action lists, weights and how to launch them; all or nothing. Returns the path.

        Raises ArgumentError where ``directory`` holds something else than a job, or can't be written.
        """
        if not isinstance(directory, str | Path):
            raise ArgumentError(f"{directory!r} is no path; name a directory to write the job to")
        return write_directory(Path(directory), self.plan, self._job)

    def modules(self, rank: int) -> list[nn.Module]:
        """The emitted modules of ``rank`` with that rank's weights (their collectives need the rank's process)."""
        return self._job.modules(rank)

    def step(self, batch: Any, *, accumulate: bool = False) -> torch.Tensor:
        """One optimizer step of this rank under ``torchrun``; the global batch in, the global loss out.

        ``accumulate``: only add to the gradients; the next step without updates by the sum. Raises BatchError.
        """
        return self.running.step(self._tensors(batch), accumulate=accumulate)

    @property
    def expert_load(self) -> Load:
        """By layer, the slots that each expert got of the last step's whole batch, equal on all ranks."""
        return self.running.expert_load

    @property
    def running(self) -> Executor:
        """This rank of the real job, started at first use; all ranks must start theirs."""
        if self._rank is None:
            self._rank = start(self._job, connect(self._job))
        return self._rank

    def simulate(
        self, batch: Any, steps: int = 1, *, device: str = "cpu", track_memory: bool = True
    ) -> SimulationResult:
        """Train ``steps`` steps on ``batch`` on simulated ranks in this process, from the model's weights.

        ``device="cuda"``: all ranks share this process' GPU, and compute with its kernels; their peak memory is not
        tracked. Nor is it without ``track_memory``, which on small tensors takes longer than computing with them.
        Raises ArgumentError, BatchError.
        """
        _check_run(steps, device)
        tensors = self._tensors(batch)
        job = self._job

        def rank_program(rank: int) -> RankResult:
            return run_rank(job, rank, tensors, steps, device)

        tracked = track_memory and device == "cpu"
        result = simulate.run(rank_program, self.plan.mesh.world, track_memory=tracked)
        gradients, parameters = job.gather(result.results)
        return SimulationResult(
            losses=result.results[0].losses,
            gradients=gradients,
            parameters=parameters,
            peak_bytes=list(result.peak_bytes),
            sent_bytes=list(result.sent_bytes),
            expert_load=result.results[0].loads,
            buffers={name: buffer for rank in result.results for name, buffer in rank.buffers.items()},
        )

    def memory(self, batch: Any = None, *, measure: str = "") -> MemoryReport:
        """What each rank holds over a step, by kind: predicted, and measured as ``measure`` says.

        ``"simulate"`` trains on simulated ranks (with ``batch``), ``"fake"`` runs a rank of each kind on fake tensors,
        at any size, ``"device"`` trains this rank under ``torchrun`` on its GPU. Raises ArgumentError, BatchError.
        """
        tensors = self._tensors(batch) if batch is not None else _shapes(self.plan)
        running = self.running if measure == "device" else None
        return memory_report(self._job, tensors, budget_of(self.plan), measure, running, device_of(self.plan).kind)

    def audit(self) -> Audit:
        """What the programs cost by an evaluator of its own, beside the plan's figures (:mod:`autopar.audit`)."""
        return audit(self)

    def verify(self, batch: Any, steps: int = 3, *, device: str = "cpu") -> Verification:
        """Train the unmodified model on one device and the compiled one on simulated ranks, and compare.

        ``device="cuda"``: both on this process' GPU. What differs is traced to an op on the CPU alone. Raises
        ArgumentError, BatchError.
        """
        _check_run(steps, device)
        return verify_job(self, batch, steps, device)

    def reference(self) -> nn.Module:
        """A copy of the model with the weights that the ranks start from."""
        source = self._job.source
        if isinstance(source, RecipeSource):
            return recipe.replica(self._model, recipe.initialize(self._model, source.recipes, source.seed))
        return recipe.copied(self._model)

    def whole_graph(self, batch: Any) -> Model:
        """The captured graph of one device, before any axis was solved, cut into the calls of the ranks' graph."""
        kind, precision = device_of(self.plan).kind, self.plan.options.precision
        split = self.plan.mesh.cp > 1
        model = prepare(self._model, batch, self._loss, self._dims, kind, precision, split)[0]
        return cut_head(model, self.plan.mesh, self.plan.vocabulary, self.plan.options)

    @property
    def lowered(self) -> Model:
        """The graph that one rank runs, from which the programs were emitted."""
        return self._built.model

    @property
    def programs(self) -> Programs:
        return self._programs

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """Tensors that the model makes at trace time and that are no parameters or buffers of it."""
        return self._constants

    @property
    def job(self) -> Job:
        return self._job

    @property
    def structure(self) -> Structure:
        return self._structure

    @property
    def loss(self) -> Loss | None:
        return self._loss

    def _tensors(self, batch: Any) -> dict[str, torch.Tensor]:
        """The batch's tensors by path. Raises BatchError where they are not what the plan was made for."""
        tensors = flatten(batch)[0]
        items = self.plan.inputs
        batches.check(tensors, [Input(i.name, i.path, tuple(i.shape), i.dtype, i.batch_dim) for i in items])
        check_documents(tensors)
        if self._built.model.packs:
            check_positions(tensors)
        return tensors


def budget_of(plan: Plan) -> int:
    """The bytes that a rank may use."""
    return plan.options.budget_bytes or device_of(plan).memory_bytes


def device_of(plan: Plan) -> Device:
    """What the plan was made for."""
    return Cluster.parse(plan.cluster_toml, origin="the plan").device


def _shapes(plan: Plan) -> dict[str, torch.Tensor]:
    """A batch without values."""
    return {i.path: torch.empty(i.shape, dtype=dtype_of(i.dtype), device="meta") for i in plan.inputs}


def _check_gpus(gpus: int) -> None:
    check_ranks("gpus=", gpus)
    launched = os.environ.get("WORLD_SIZE")
    if _launched() and int(launched or 1) != gpus:
        raise ArgumentError(f"gpus={gpus}, but torchrun started {launched} processes; make them equal")


def _check_kinds(model: Any, plan: Any = None, clip_norm: Any = None, seed: Any = 0, **functions: Any) -> None:
    """Raises ArgumentError for a model, a plan, a norm, a seed or functions that are something else."""
    check_count("seed=", seed, least=0)
    if not isinstance(model, nn.Module | Captured):
        raise ArgumentError(f"model={model!r}; give a torch.nn.Module, or what autopar.capture returned")
    if plan is not None and not isinstance(plan, Plan):
        raise ArgumentError(f"plan={plan!r}; give a Plan, such as autopar.load('plan.json') reads")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ArgumentError(f"{name}={function!r}; give a function, or leave it out")
    is_number = isinstance(clip_norm, int | float) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (is_number and clip_norm > 0):
        raise ArgumentError(f"clip_norm={clip_norm!r}; it must be more than 0, or None for gradients as they are")


def _check_run(steps: Any, device: Any) -> None:
    """Raises ArgumentError where simulated ranks can't run so many steps, or on this device."""
    check_count("steps=", steps)
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"device={device!r}; simulated ranks run on 'cpu' or 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device='cuda', but torch finds no GPU here; use device='cpu'")


def _check_pins(pins: Pins, plan: Plan) -> None:
    """Raises PlanError for a pin that isn't what ``plan`` decided."""
    rows = plan.batch_size // plan.microbatches // plan.mesh.replicas
    decided = {"microbatches": plan.microbatches, "microbatch": rows, "schedule": plan.schedule}
    decided |= {"chunks": plan.chunks, "vocabulary": plan.vocabulary}
    for name, value in decided.items():
        if (pinned := getattr(pins, name)) not in (None, value):
            raise PlanError(f"{name}={pinned!r}, but the plan has {name}={value!r}; leave one of the two out")


def _launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def _mesh(mesh: Mapping[str, int] | None, plan: Plan | None, gpus: int) -> Mesh | None:
    """That of ``plan``; None where there is none."""
    _check_gpus(gpus)
    if plan is None:
        return None
    if mesh is not None and replace(Mesh.of(mesh, gpus), paired=plan.mesh.paired) != plan.mesh:
        raise PlanError(f"mesh={dict(mesh)} and the plan's mesh {plan.mesh} differ; leave one out")
    if plan.mesh.world != gpus:
        raise PlanError(f"the plan is for {plan.mesh.world} ranks ({plan.mesh}), but gpus={gpus}")
    return plan.mesh


def _options(given: Given, plan: Plan | None) -> Options:
    """Those of ``plan`` where there is one; what is given beside it must be the same."""
    options = Options.of(**given)
    if plan is None:
        return options
    if different := [name for name in given if getattr(options, name) != getattr(plan.options, name)]:
        asked, planned = (
            ", ".join(f"{name}={getattr(each, name)!r}" for name in different) for each in (options, plan.options)
        )
        raise PlanError(f"{asked}, but the plan has {planned}; leave one of the two out")
    return plan.options


def _precise(options: Options, model: nn.Module | Captured, device: str, *, fixed: bool) -> Options:
    """Options with the precision that the model was captured in, or that of a ``torch.autocast`` around the call.

    Raises ArgumentError where a ``fixed`` precision is another, or autocast's is none that options can name; and where
    the model has parameters that loss scaling can't train.
    """
    precision: str = options.precision
    if isinstance(model, Captured):
        if fixed and precision != model.precision:
            raise ArgumentError(
                f"precision={precision!r}, but the model was captured in {model.precision!r}; capture it again with "
                f"autopar.capture(..., precision={precision!r})"
            )
        precision, fixed, model = model.precision, True, model.model
    precision = _under_autocast(precision, device, fixed=fixed)
    for name, parameter in model.named_parameters():
        if precision == "fp16" and parameter.requires_grad and parameter.dtype == torch.float16:
            raise ArgumentError(
                f"precision='fp16' computes in float16 and trains float32 masters, but parameter {name!r} is float16; "
                "give the model in float32 (model.float())"
            )
    return options if precision == options.precision else options.model_copy(update={"precision": precision})


def _under_autocast(precision: str, device: str, *, fixed: bool) -> str:
    """``precision``, or that of a ``torch.autocast`` around the call. Raises ArgumentError where they contradict."""
    if not torch.is_autocast_enabled(device):
        return precision
    dtype = torch.get_autocast_dtype(device)
    name = next((name for name, lower in LOWER.items() if lower == dtype), "")
    if name != precision and (fixed or not name):
        raise ArgumentError(
            f"precision={precision!r}, but an autocast to {dtype} is around the call; call it outside of the autocast, "
            "and say the precision with precision="
        )
    return name


def _cluster(cluster: str | Path | Cluster | None, plan: Plan | None) -> Cluster:
    """What the job is for; under torchrun what rank 0 says of it, whose files the others may not see."""
    if plan is not None:
        planned = Cluster.parse(plan.cluster_toml, origin="the plan")
        if cluster is not None and not _launched() and str(found := _loaded(cluster)) != str(planned):
            raise PlanError(
                f"cluster {found.name!r} isn't, or isn't any more, the one that the plan is for ({planned.name!r}); "
                "leave one of the two out"
            )
        return planned
    if _launched() and join_world()[0] != 0:
        return Cluster.parse(text_of_rank_zero(""), origin="the cluster of rank 0")
    if cluster is None:
        cluster = "h100" if torch.cuda.is_available() else "cpu"
    found = _loaded(cluster)
    if _launched():
        text_of_rank_zero(str(found))
    return found


def _loaded(cluster: str | Path | Cluster) -> Cluster:
    return cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)


def _check_plan(model: Model, pins: Pins, plan: Plan | None) -> None:
    if plan is None:
        return
    _check_pins(pins, plan)
    if plan.model_fingerprint != model.fingerprint:
        raise PlanError(
            f"the plan was made for {plan.model_name} ({plan.model_fingerprint}) and batch {plan.batch_size}, this is "
            f"{model.name} ({model.fingerprint}) and batch {model.batch_size}: plan again"
        )


def _measured(given: Training, known: Known, built: Built, enough: float) -> Emitted:
    """``built``, whose plan says what its ranks really hold while messages wait for their peers: the fullest first, as
    far as solvers know, until one holds more than ``enough`` bytes."""
    emitted = Emitted.of(built, given)
    job, ranks = emitted.job, list(built.plan.rank_plans)
    memory_of = predictor(job, _shapes(built.plan), known, device_of(built.plan).kind)
    for index in sorted(range(len(ranks)), key=lambda index: -ranks[index].peak_bytes):
        first = job.mesh.rank(pp=index)
        found, waiting = memory_of(first), waiting_bytes(job, first)
        kinds = Counter(found.peak.peak) + Counter({BUFFERS: waiting})
        update = {
            "kinds": {kind: kinds[kind] for kind in KINDS if kinds[kind]},
            "action": found.peak.label,
            "peak_bytes": found.peak_bytes + waiting,
            "host_bytes": found.host_peak_bytes,
        }
        ranks[index] = ranks[index].model_copy(update=update)
        if ranks[index].peak_bytes > enough:
            break
    return replace(emitted, plan=built.plan.model_copy(update={"rank_plans": ranks}).sealed())


def _built(
    prepared: Prepared,
    pins: Pins,
    cluster: Cluster,
    plan: Plan | None,
    expert_load: Mapping[str, Sequence[float]],
    search: Callable[[Prepared, Pins, Cluster, Mapping[str, Sequence[float]]], Built],
) -> Built:
    """Under torchrun rank 0 plans; the others wait for its plan and take its decisions: all run the same program."""
    if plan is not None:
        return _as_planned(prepared, plan, cluster, expert_load)
    if not _launched():
        return search(prepared, pins, cluster, expert_load)
    if join_world()[0] == 0:
        built = search(prepared, pins, cluster, expert_load)
        text_of_rank_zero(built.plan.to_json())
        return built
    return _as_planned(prepared, Plan.from_json(text_of_rank_zero("")), cluster, expert_load)


def _as_planned(prepared: Prepared, plan: Plan, cluster: Cluster, expert_load: Mapping[str, Sequence[float]]) -> Built:
    wanted = Wanted(plan.schedule, plan.vocabulary, plan.chunks)
    request = Request(plan.mesh, plan.microbatches, cluster, wanted, plan.options, dict(expert_load))
    return build(prepared[plan.mesh.cp > 1].copy(), request, plan)


def _source(captured: Captured, seed: int) -> Source:
    model = captured.model
    if any(p.device.type == "meta" for p in model.parameters()):
        return RecipeSource(recipe.record(model), seed)
    state: dict[str, torch.Tensor] = dict(captured.constants)
    state |= {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    state |= dict(model.named_buffers(remove_duplicate=False))
    return StateSource(state)
