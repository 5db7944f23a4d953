"""The loss of connectionist temporal classification, as operations whose shapes don't depend on values.

Torch's own makes tensors as long as the longest target is. Here all are as long as targets may be; what lies behind a
target's end counts nowhere. (Graves et al., "Connectionist Temporal Classification", ICML 2006, section 4.1, in
logarithms.) For n sequences of T log-probabilities of c classes, and targets of up to s classes, labels are the target
with a blank before, between and behind: l = 2s + 1 of them. With ``a[t, i]`` the logarithm of the probability of all
ways to have said the first i labels by time t,

    a[t, i] = log(exp a[t-1, i] + exp a[t-1, i-1] + exp a[t-1, i-2]) + y[t, label i]

the last term only where label i is not that two before (as blanks are). Ways that don't exist have a number that is far
below all others, so that no difference is undefined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from autopar.errors import CaptureError
from autopar.source_lines import calling_line

_NEVER = 1e30
"""Below minus this are logarithms of what has no probability; float32 has it."""


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """:func:`torch.nn.functional.ctc_loss` of ``log_probs [T, n, c]`` and ``targets [n, s]``, with the gradient that
    torch's has: as if logarithms were of probabilities that add up to 1, whether they do or not. Where there is too
    little time for a target, torch's gradient is no number; this one is.

    Raises CaptureError for targets that are one after another in one dim, or of a single sequence.
    """
    if log_probs.dim() != 3 or targets.dim() != 2:
        raise CaptureError(
            f"ctc_loss at {calling_line()}: log-probabilities of shape {tuple(log_probs.shape)} and targets of shape "
            f"{tuple(targets.shape)}; give them as [time, batch, classes] and [batch, longest target]"
        )
    given, written = (_lengths(each, log_probs) for each in (input_lengths, target_lengths))
    labels = functional.pad(targets.long().unsqueeze(2), (1, 0), value=blank).flatten(1)
    labels = functional.pad(labels, (0, 1), value=blank)
    score = _score(log_probs, labels, given, blank)
    said = score.gather(1, torch.stack([2 * written, (2 * written - 1).clamp(min=0)], 1))
    second = said[:, 1].masked_fill(written == 0, -_NEVER)
    loss = -torch.logaddexp(said[:, 0], second)
    possible = loss < _NEVER / 2
    running = torch.arange(log_probs.shape[0], device=log_probs.device)[:, None] < given
    sums = log_probs.exp() * running.unsqueeze(2)
    loss = loss + (sums - sums.detach()).sum((0, 2))
    loss = loss.masked_fill(~possible, 0.0 if zero_infinity else float("inf"))
    if reduction == "mean":
        return (loss / written.clamp(min=1)).mean()
    return loss.sum() if reduction == "sum" else loss


def _score(log_probs: Tensor, labels: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """``[n, l]``: of the first labels, when a sequence is over."""
    steps = log_probs.shape[0]
    said = log_probs.gather(2, labels.unsqueeze(0).expand(steps, -1, -1))
    before = functional.pad(labels[:, :-2], (2, 0), value=blank)
    skips = labels != before
    begins = torch.arange(labels.shape[1], device=labels.device) < 2
    score = said[0].masked_fill(~begins, -_NEVER)
    for step in range(1, steps):
        one = functional.pad(score[:, :-1], (1, 0), value=-_NEVER)
        two = functional.pad(score[:, :-2], (2, 0), value=-_NEVER).masked_fill(~skips, -_NEVER)
        ways = torch.stack([score, one, two]).logsumexp(0) + said[step]
        score = torch.where((step < lengths)[:, None], ways.clamp(min=-_NEVER), score)
    return score


def _lengths(given: Tensor | Sequence[int], like: Tensor) -> Tensor:
    if isinstance(given, Tensor):
        return given.to(device=like.device, dtype=torch.long)
    return torch.tensor(list(given), dtype=torch.long, device=like.device)
