"""Options: strict values, errors that name the argument, and the keyword arguments of compile."""

from __future__ import annotations

import json

import pytest

from autopar import Options
from autopar.errors import ArgumentError
from autopar.options import OFFLOADABLE, Given, masters_on_host


def test_the_keyword_arguments_are_the_fields():
    assert set(Given.__annotations__) == set(Options.model_fields)


def test_text_names_what_differs_from_the_defaults_or_from_others():
    assert str(Options()) == ""
    options = Options(
        zero=3, budget_bytes=3 * 2**30, offload=("optimizer", "activations"), placements={"*.w": {"tp": "I"}}
    )
    assert str(options) == "zero 3, within 3 GiB, offload optimizer+activations, placements *.w=tp:I"
    assert Options(zero=3, float8=True).beside(options) == "float8, the device's memory, no offload, no placements"
    assert options.beside(options) == ""


def test_zero_is_searched_where_it_isnt_said():
    assert Options.of(zero_ranks=2).zero_ranks == 2


def test_masters_lie_where_the_optimizer_does():
    away = [item for item in OFFLOADABLE if masters_on_host((item,))]
    assert away == ["optimizer", "parameters"]
    assert masters_on_host(("activations", "optimizer"))
    assert not masters_on_host(())


def test_json_both_ways():
    options = Options.of(zero=2, offload=["parameters"], budget_bytes=2**30)
    assert Options.of(**json.loads(json.dumps(options.model_dump()))) == options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zero": 4}, "zero=4: .*less than or equal to 3"),
        ({"zero": "3"}, "zero='3'.*integer"),
        ({"zer": 1}, r"there is no option 'zer' \(did you mean 'zero'\?\); options are precision, float8, "),
        ({"offload": "optimizer"}, r"offload='optimizer': give a tuple of names, such as \('optimizer',\)"),
        ({"gpu_count": 1}, "there is no option 'gpu_count'; options are precision"),
        ({"precision": "bfloat16"}, "precision='bfloat16': .*'model', 'bf16' or 'fp16'"),
        ({"reduce_dtype": "int8"}, "reduce_dtype='int8'; it may be one of bfloat16"),
        ({"offload": ("gradients",)}, r"offload names \['gradients'\]; it may name optimizer, parameters, activations"),
        ({"zero": 0, "zero_ranks": 2}, "zero_ranks=2 without ZeRO; say zero=1, 2 or 3"),
        ({"powersgd": 4, "zero": 3}, "powersgd=4 sums whole gradients.*use zero=0 or 1"),
        ({"statistics": "step"}, "statistics='step': .*'batch' or 'microbatch'"),
        ({"head_chunks": 0}, "head_chunks=0: .*greater than or equal to 1"),
        ({"budget_bytes": -1}, "budget_bytes=-1: .*greater than 0"),
    ],
)
def test_what_is_no_option_is_refused_by_name(given, message):
    with pytest.raises(ArgumentError, match=message):
        Options.of(**given)
