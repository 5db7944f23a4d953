"""Packed documents: what is refused, and that attention sees them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.capture import capture
from autopar.documents import check_documents, check_positions, gives_positions
from autopar.errors import BatchError
from autopar.graph import op_name
from tests.context_models import packed, positions

ROW = [0, 1, 2, 0, 1, 0]


def given(row: list[int]) -> Tensor:
    return torch.tensor([row, list(range(len(row)))])


def mask_of(rows: Tensor) -> Tensor:
    """Causal, and within documents."""
    document = (rows == 0).cumsum(1)
    tokens = rows.shape[1]
    same = document[:, :, None] == document[:, None, :]
    return (same & torch.ones(tokens, tokens, dtype=torch.bool).tril())[:, None]


def test_documents_are_found() -> None:
    assert check_documents({"position_ids": given(ROW)})
    assert not check_documents({"position_ids": given([0, 1, 2, 3, 4, 5])})
    assert not check_documents({"ids": given(ROW)})
    assert gives_positions({"batch.position_ids": given(ROW)})
    assert not gives_positions({"position_ids": given(ROW), "attention_mask": torch.ones(2, 6)})


def test_masks_that_agree() -> None:
    rows = given(ROW)
    mask = mask_of(rows)
    assert check_documents({"position_ids": rows, "attention_mask": mask})
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert check_documents({"position_ids": rows, "attention_mask": added})
    assert check_documents({"position_ids": rows[:1], "attention_mask": mask[:1].expand(4, -1, -1, -1)})
    assert check_documents({"position_ids": rows[:1].expand(4, -1), "attention_mask": mask[:1]})


def test_padding_begins_no_document() -> None:
    """To the left, as transformers' generation pads: its positions are 1, and it sees nothing."""
    rows = given([1, 1, 0, 1, 2, 3])
    mask = torch.ones(6, 6, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask[0, 0, :2] = mask[0, 0, :, :2] = False
    check_documents({"position_ids": rows, "attention_mask": mask})


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            [0, 1, 2, 3, 4, 0],
            "row 0 do not agree at token 3: by its position it continues one, but by the mask it does not see",
        ),
        (
            [0, 1, 0, 0, 1, 0],
            "row 0 do not agree at token 2: by its position it begins a document, but by the mask it sees",
        ),
    ],
)
def test_masks_that_do_not_agree(row: list[int], text: str) -> None:
    with pytest.raises(BatchError, match=text):
        check_documents({"position_ids": given(row), "attention_mask": mask_of(given(ROW))})


def test_lengths() -> None:
    rows = given(ROW)
    check_documents({"position_ids": rows, "cu_seq_lens_q": torch.tensor([0, 3, 5, 6, 12])})
    with pytest.raises(BatchError, match=r"documents begin at tokens \[0, 3, 5, 6\], by the lengths at \[0, 4, 5, 6\]"):
        check_documents({"position_ids": rows, "cu_seq_lens_q": torch.tensor([0, 4, 5, 6, 12])})
    with pytest.raises(BatchError, match="but no 'position_ids'"):
        check_documents({"cu_seq_lens_q": torch.tensor([0, 4, 12])})


def test_positions_that_jump() -> None:
    check_positions({"position_ids": given(ROW)})
    with pytest.raises(BatchError, match="of row 0 go from 2 to 7 at token 3: within a document they count by one"):
        check_positions({"position_ids": given([0, 1, 2, 7, 8, 9])})


def test_capture_keeps_documents_apart() -> None:
    """With positions, attention has a mask; without, is_causal will do."""
    case = packed(4)

    def masks(batch: dict[str, Tensor]) -> tuple[bool, list[int]]:
        flat = capture(case.model, batch)
        nodes = [n for n in flat.nodes if op_name(n) == "aten.scaled_dot_product_attention.default"]
        return flat.packs, [len(n.all_input_nodes) for n in nodes]

    assert masks(case.batch) == (True, [4, 4])
    assert masks({k: v for k, v in case.batch.items() if k != "position_ids"}) == (False, [3, 3])


def test_documents_that_the_model_would_ignore() -> None:
    case = packed(4)
    case.model.config.use_cache = True
    with pytest.raises(BatchError, match=r"set model.config.use_cache = False"):
        capture(case.model, case.batch)
    assert capture(case.model, {**case.batch, "use_cache": False}).packs
    jumping = positions(4)
    jumping[1, 9:] += 3
    with pytest.raises(BatchError, match="of row 1 go from"):
        capture(case.model, {**case.batch, "position_ids": jumping, "use_cache": False})
