"""What an error says of where a rank was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from autopar import simulate
from autopar.errors import DeadlockError
from autopar.simulate.sites import caller, raised_at


@dataclass(frozen=True)
class Action:
    text: str

    def __str__(self) -> str:
        return self.text


def call() -> str:
    return str(caller())


def test_the_line_that_called() -> None:
    line = call.__code__.co_firstlineno + 1
    assert call() == f"{__file__}:{line} in call"


def test_the_action_of_an_executor_up_the_stack() -> None:
    def execute() -> list[str]:
        return [call() for action in (Action("F3@1"), Action("RECV_B0@2"))]

    def execute_in_a_loop() -> list[str]:
        found = []
        for action in (Action("F3@1"), Action("RECV_B0@2")):
            found.append(call())
            assert action
        return found

    assert [site.rpartition(", ")[2] for site in execute_in_a_loop()] == ["action F3@1", "action RECV_B0@2"]
    assert len(execute()) == 2


def test_the_innermost_action_counts() -> None:
    def inner() -> str:
        action = Action("inner")
        return call() if action else ""

    action = Action("outer")
    assert inner().endswith("action inner")
    assert call().endswith("action outer")
    assert action


def test_an_action_before_it_is_bound_and_a_tensor_of_that_name() -> None:
    def unbound() -> str:
        site = call()
        action = None
        return site if action is None else ""

    action = torch.ones(3)
    assert ", action" not in unbound()
    assert ", action" not in call()
    assert action.numel() == 3


def test_a_long_action_is_cut() -> None:
    action = Action("x" * 1000)
    assert len(call().rpartition(", action ")[2]) == 80
    assert action


def test_code_of_libraries_is_passed_over() -> None:
    @contextlib.contextmanager
    def block() -> Iterator[None]:
        yield
        dist.recv(torch.ones(1), 0)

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            dist.barrier()
            return grad

    def program(rank: int) -> None:
        if rank == 0:
            action = Action("B2@0")
            Wait.apply(torch.ones(1, requires_grad=True)).backward()
            assert action
        else:
            with block():
                pass

    with pytest.raises(DeadlockError) as caught:
        simulate.run(program, 2)
    first, second = str(caught.value).splitlines()[1:]
    assert first.endswith(f"{__file__}:{Wait.backward.__code__.co_firstlineno + 2} in backward, action B2@0")
    assert second.endswith(f"{__file__}:{block.__wrapped__.__code__.co_firstlineno + 3} in block")


def test_where_an_error_was_raised() -> None:
    def fail() -> None:
        torch.ones(2) @ torch.ones(3)

    try:
        contextlib.ExitStack().callback(fail).__call__()
    except RuntimeError as error:
        site = raised_at(error.__traceback__)
    assert str(site) == f"{__file__}:{fail.__code__.co_firstlineno + 1} in fail"
    assert raised_at(None) is None
