"""Work in a process of its own: nothing that it changes is seen here."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")


class DiedError(Exception):
    """The process ended without a result: killed (for its memory, say), or by native code."""


def in_fresh_process(function: Callable[..., T], *arguments: object) -> T:
    """In a new interpreter; function, arguments and result are sent as pickles."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def in_fork(function: Callable[[], T], seconds: float | None = None) -> T:
    """In a copy of this process, what is captured so far included; only the result is sent. Raises what it raises,
    TimeoutError after so many ``seconds``, whatever the process is in by then, and DiedError where there is no result.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(function, there))
    child.start()
    there.close()
    try:
        if not here.poll(seconds):
            child.kill()
            raise TimeoutError(f"more than {seconds:g} s")
        done, result = here.recv()
    except EOFError:
        child.join()
        raise DiedError(f"the process died: {_end(child.exitcode)}") from None
    finally:
        child.join()
    if not done:
        raise result
    return result


def _end(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _answer(function: Callable[[], object], pipe: Connection) -> None:
    try:
        pipe.send((True, function()))
    except Exception as error:
        pipe.send((False, error))
