"""autopar: compile an unmodified PyTorch model into a parallel training program."""

from autopar.api import ParallelModel, SimulationResult, compile, load, plan
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.options import Options
from autopar.plan import Plan
from autopar.verification import Verification

__all__ = [
    "AutoparError",
    "Cluster",
    "Options",
    "ParallelModel",
    "Plan",
    "SimulationResult",
    "Verification",
    "compile",
    "load",
    "plan",
]
