"""The text itself, to be read and reviewed."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from tests.codegen.programs import emit_alone, folded
from tests.models import gpt2, llama


def without_lines(text: str) -> str:
    """The text without line numbers of torch and transformers, which differ between their versions."""
    return re.sub(r"(\w+\.py):\d+", r"\1", text)


def test_llama(golden: Callable[[str, str], None]) -> None:
    golden("codegen/llama.py.txt", without_lines(emit_alone(folded(llama(4)))[0].text))


def test_gpt2_in_two_stages(golden: Callable[[str, str], None]) -> None:
    torch.manual_seed(0)
    first, last = emit_alone(folded(gpt2(4, dropout=0.1)), 2)
    golden("codegen/gpt2_stage_0_of_2.py.txt", without_lines(first.text))
    golden("codegen/gpt2_stage_1_of_2.py.txt", without_lines(last.text))
