"""Messages between stages. That values arrive: test_executor.py."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from autopar.mesh import Mesh
from autopar.runtime import Axes, Axis, pipe
from autopar.runtime import Tensor as Spec
from autopar.runtime.pipe import Outbox, Pipe
from tests.runtime.ranks import on_ranks


class Sending:
    """A message under way, until ``done``."""

    def __init__(self, done: bool = False) -> None:
        self.done, self.waited = done, False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.waited = True


def test_what_is_sent_is_kept_until_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[Sending] = []

    def send(x: Tensor, axis: Axis, to: int) -> Sending:
        works.append(Sending())
        return works[-1]

    monkeypatch.setattr(pipe, "send", send)
    outbox = Outbox()
    sender = Pipe(Axes.build(Mesh(), 0, "cpu"), (0, 1), outbox)
    first = torch.ones(3)
    alive = weakref.ref(first)
    for tensor in (first, torch.zeros(1)):
        sender.send([tensor], "F", 1)
    del first, tensor
    gc.collect()
    assert alive() is not None
    works[0].done = True
    sender.send([torch.zeros(1)], "F", 1)
    assert alive() is None
    outbox.flush()
    assert [work.waited for work in works] == [True, True, True]


def test_what_has_arrived_at_once_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "send", lambda x, axis, to: Sending(done=True))
    message = torch.ones(3)
    alive, outbox = weakref.ref(message), Outbox()
    Pipe(Axes.build(Mesh(), 0, "cpu"), (0, 1), outbox).send([message], "F", 1)
    del message
    assert alive() is None


def test_the_directions_do_not_wait_for_each_other() -> None:
    """Both ranks first send, then receive, and each waits for its messages in the opposite order."""
    specs = [Spec("a", (2,), "float32"), Spec("b", (1, 3), "int64")]

    def program(axes: Axes) -> list[list[float]]:
        outbox = Outbox()
        ends = Pipe(axes, (0, 1, 1, 0), outbox)
        mine, peer = axes["pp"].index, 1 - axes["pp"].index
        for what in ("F", "B"):
            values = [torch.full((2,), mine + 0.5), torch.full((3, 1), mine + 10 * (what == "F")).T]
            ends.send(values, what, peer)
        found = {what: ends.receive(specs, what, peer).wait() for what in (("B", "F") if mine else ("F", "B"))}
        outbox.flush()
        return [x.flatten().tolist() for what in ("F", "B") for x in found[what]]

    results = on_ranks(Mesh(pp=2), program)
    assert results == [
        [[1.5, 1.5], [11, 11, 11], [1.5, 1.5], [1, 1, 1]],
        [[0.5, 0.5], [10, 10, 10], [0.5, 0.5], [0, 0, 0]],
    ]


def test_lanes_are_those_that_stages_use() -> None:
    assert pipe.lanes((0, 1, 2)) == (("F", True), ("B", False))
    assert pipe.lanes((0, 1, 2, 2, 1, 0)) == (("F", True), ("F", False), ("B", True), ("B", False))
    assert pipe.lanes((0, 0)) == ()
