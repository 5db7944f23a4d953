"""Which pipeline rank holds which stage."""

from __future__ import annotations


def looped(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stage s on rank s modulo ``ranks``, ``chunks`` on each (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    return tuple(range(ranks)) * chunks


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Down the ranks and back up, so that rank 0 has the first and the last stage (Qi et al., arXiv 2401.10241)."""
    return (*range(ranks), *reversed(range(ranks)))
