"""A vocabulary split over the pipeline: its text, and that its methods, composed by hand, are the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.codegen import emit_vocabulary
from autopar.errors import PlanError, StageError
from autopar.mesh import Mesh
from autopar.runtime.load import load_program, load_vocabulary
from tests import models, vocabulary_models
from tests.codegen.programs import assert_equal, cut, expected, folded
from tests.codegen.test_golden import without_lines
from tests.codegen.vocabulary_ranks import emitted, run
from tests.models import Case, Float64

CUBE = Mesh(pp=2, dp=2, tp=2)


# --- the same loss and gradients --------------------------------------------------------------------


@pytest.mark.parametrize("name", vocabulary_models.MODELS)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pp=2, tp=2)], ids=str)
def test_the_methods_are_the_model(name: str, mesh: Mesh) -> None:
    case = vocabulary_models.case(name, batch=4)
    assert_equal(run(case, emitted(case, mesh)), expected(case), 1e-12)


@pytest.mark.parametrize(("name", "seed"), [("soft_capped", 0), ("masked", 1), ("smoothed", 2), ("summed", 3)])
def test_random_placements(name: str, seed: int) -> None:
    case = vocabulary_models.case(name, batch=8)
    assert_equal(run(case, emitted(case, CUBE, microbatches=2, seed=seed)), expected(case), 1e-12)


WHOLE: dict[str, Callable[[], Case]] = {
    "llama_tied": lambda: models.llama(4, layers=2, tied=True),
    "llama": lambda: models.llama(4, layers=2),
    "gpt2": lambda: models.gpt2(4, layers=2),
}


@pytest.mark.parametrize(("name", "seed"), [("gpt2", 2), ("llama_tied", 4), ("llama", 3)])
def test_whole_models(name: str, seed: int) -> None:
    with Float64():
        case = WHOLE[name]()
        case.model.double().train()
        assert_equal(run(case, emitted(case, Mesh(pp=2, tp=2), seed=seed)), expected(case), 1e-11)


@pytest.mark.slow
def test_a_whole_model_on_all_axes() -> None:
    case = models.make("nano_gpt", 4)
    assert_equal(run(case, emitted(case, CUBE, microbatches=2, seed=1)), expected(case), 1e-11)


# --- text and interface -----------------------------------------------------------------------------


def test_a_text(golden: Callable[[str, str], None]) -> None:
    job = emitted(vocabulary_models.case("soft_capped", 4), Mesh(pp=2, tp=2))
    golden("codegen/vocabulary_soft_capped.py.txt", without_lines(job.vocabulary.text))
    golden("codegen/vocabulary_soft_capped_stage_1_of_2.py.txt", without_lines(job.stages[1].text))


def test_a_text_with_a_loss_per_token(golden: Callable[[str, str], None]) -> None:
    job = emitted(vocabulary_models.case("masked", 8), CUBE, microbatches=2)
    golden("codegen/vocabulary_masked.py.txt", without_lines(job.vocabulary.text))


def test_the_interface() -> None:
    job = emitted(vocabulary_models.case("smoothed", 4), Mesh(pp=2, tp=2))
    program = job.vocabulary.program
    assert (program.weight, program.bias, program.weight_dim) == ("head", None, 1)
    assert (program.classes, program.rows, program.label_smoothing) == (50, 14, 0.2)
    table, head = program.parameters
    assert (table.shape, table.full_shape, table.padding) == ((14, 8), (50, 8), (0, 6))
    assert (head.shape, head.full_shape, head.padding) == ((8, 14), (8, 50), (1, 6))
    assert (table.types, head.types) == ({"pp": "S(0)", "tp": "S(0)"}, {"pp": "S(1)", "tp": "S(1)"})
    first, last = (stage.program for stage in job.stages)
    assert first.receives == (program.embedding,)
    assert last.sends == (program.hidden,)
    assert (first.returns_loss, last.returns_loss) == (True, False)
    split = {p.name for p in program.parameters}
    assert not any(p.name in split or p.shared_stages for p in (*first.parameters, *last.parameters))


def test_a_gradient_of_a_table_is_summed_over_dp_alone() -> None:
    job = emitted(vocabulary_models.case("masked", 8), CUBE)
    (table,) = job.vocabulary.program.parameters
    assert table.reduce == ("dp",)


def test_a_model_whose_vocabulary_is_whole_has_no_such_text() -> None:
    model = folded(vocabulary_models.case("summed", 4))
    assert emit_vocabulary(model, cut(model, 1), Mesh(), microbatches=1, digest="") is None


def test_texts_are_not_mistaken_for_one_another() -> None:
    job = emitted(vocabulary_models.case("summed", 4), Mesh())
    with pytest.raises(PlanError, match=r"stage_0\.py defines no Vocabulary and PROGRAM"):
        load_vocabulary(job.stages[0].text, filename="stage_0.py")
    with pytest.raises(PlanError, match=r"vocabulary\.py defines no Stage and PROGRAM"):
        load_program(job.vocabulary.text, filename="vocabulary.py")


class Misnamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.product = nn.Linear(4, 8, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.product(torch.tanh(self.embedding(ids))), ids)


def test_a_module_with_the_name_of_a_method_is_refused() -> None:
    with pytest.raises(StageError, match=r"parameter 'product\.weight' begins with the name of a method"):
        emitted(Case(Misnamed(), {"ids": torch.arange(4)}), Mesh())
