"""Simulated ranks: any torch.distributed program for the CPU, all ranks in this process (DESIGN 7)."""

from autopar.simulate.run import RankTraffic, Simulation, run

__all__ = ["RankTraffic", "Simulation", "run"]
