"""Documents packed in the rows of a batch: where they begin, and whether what a batch says of them agrees.

``position_ids`` that start over within a row say that another document begins there (transformers' convention, whose
models then let no token see another document). A mask ``[rows, heads, tokens, tokens]`` or cumulated lengths may say it
too. The tensors are known by the names that these arguments have.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.errors import BatchError

_POSITIONS, _MASK = "position_ids", "attention_mask"
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
_HIDDEN = -1e4  # what a mask adds to a score that is not to be seen lies below


def gives_positions(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a batch says which positions its tokens have, and no mask says what they see."""
    return _named(tensors, _POSITIONS) is not None and _named(tensors, _MASK) is None


def check_documents(tensors: Mapping[str, Tensor]) -> bool:
    """Whether rows of the batch pack several documents (False where tensors have no values).

    Raises BatchError where a mask or lengths say of another place that a document begins there.
    """
    found = _named(tensors, _POSITIONS)
    lengths = [(name, tensor) for name in _LENGTHS if (tensor := _named(tensors, name)) is not None]
    if found is None:
        if lengths:
            raise BatchError(
                f"the batch has {lengths[0][0]!r}, which says where documents begin, but no {_POSITIONS!r}: give "
                "positions that start over at 0 with each document"
            )
        return False
    begins = _begins(found)
    mask = _named(tensors, _MASK)
    if mask is not None and mask.dim() == 4:
        _check_mask(begins, mask)
    for name, tensor in lengths:
        _check_lengths(begins, name, tensor)
    return bool(begins[:, 1:].any())


def check_positions(tensors: Mapping[str, Tensor]) -> None:
    """Raise BatchError where positions neither count on nor start over at 0."""
    found = _named(tensors, _POSITIONS)
    if found is None:
        return
    for row, token in (_begins(found)[:, 1:] & (found[:, 1:] != 0)).nonzero().tolist():
        before, after = int(found[row, token]), int(found[row, token + 1])
        raise BatchError(
            f"{_POSITIONS!r} of row {row} go from {before} to {after} at token {token + 1}: within a document "
            f"they count by one ({before + 1}), and the next document's start at 0"
        )


def _named(tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The argument of that name, if it has values and, of positions, a row for each row of the batch."""
    found = next((tensor for path, tensor in tensors.items() if path.split(".")[-1] == name), None)
    if found is None or found.device.type == "meta" or (name == _POSITIONS and found.dim() != 2):
        return None
    return found


def _begins(positions: Tensor) -> Tensor:
    """Which tokens do not continue the one before; the first of a row doesn't count as one."""
    begins = torch.zeros_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=1) != 1
    return begins


def _check_mask(begins: Tensor, mask: Tensor) -> None:
    """A token that begins a document doesn't see the one before it, any other does; padding, which sees itself not
    even, is left out.
    """
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > _HIDDEN
    rows, tokens = max(len(seen), len(begins)), begins.shape[1]
    if seen.shape[-2:] != (tokens, tokens):
        return
    seen, begins = seen.expand(rows, -1, -1), begins.expand(rows, -1)
    itself = seen.diagonal(dim1=1, dim2=2)
    before = seen.diagonal(-1, dim1=1, dim2=2)
    wrong = (before == begins[:, 1:]) & itself[:, 1:] & itself[:, :-1]
    for row, token in wrong.nonzero().tolist():
        starts = bool(begins[row, token + 1])
        raise BatchError(
            f"{_POSITIONS!r} and {_MASK!r} of row {row} do not agree at token {token + 1}: by its position it "
            f"{'begins a document' if starts else 'continues one'}, but by the mask it "
            f"{'sees' if starts else 'does not see'} the token before; let positions start over at 0 exactly where the "
            "mask separates documents"
        )


def _check_lengths(begins: Tensor, name: str, lengths: Tensor) -> None:
    """Cumulated lengths are of all rows in a line."""
    flat = begins.clone()
    flat[:, 0] = True
    said = sorted({*flat.flatten().nonzero().flatten().tolist(), flat.numel()})
    if lengths.flatten().tolist() != said:
        raise BatchError(
            f"{_POSITIONS!r} and {name!r} do not agree: by the positions, documents begin at tokens {said[:-1]}, by "
            f"the lengths at {lengths.flatten().tolist()[:-1]}; let positions start over at 0 with each document"
        )
