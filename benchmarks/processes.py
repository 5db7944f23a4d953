"""Work in a process of its own: nothing that it changes is seen here."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")


def in_fresh_process(function: Callable[..., T], *arguments: object) -> T:
    """In a new interpreter; function, arguments and result are sent as pickles."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def in_fork(function: Callable[[], T]) -> T:
    """In a copy of this process, what is captured so far included; only the result is sent. Raises what it raises."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(function, there))
    child.start()
    there.close()
    try:
        done, result = here.recv()
    finally:
        child.join()
    if not done:
        raise result
    return result


def _answer(function: Callable[[], object], pipe: Connection) -> None:
    try:
        pipe.send((True, function()))
    except Exception as error:
        pipe.send((False, error))
