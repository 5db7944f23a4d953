"""autopar: compile an unmodified PyTorch model into a parallel training program."""

from autopar.api import ParallelModel, SimulationResult, capture, compile, load, plan
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.options import Options
from autopar.plan import Plan
from autopar.preparation import Captured
from autopar.verification import Verification

__all__ = [
    "AutoparError",
    "Captured",
    "Cluster",
    "Options",
    "ParallelModel",
    "Plan",
    "SimulationResult",
    "Verification",
    "capture",
    "compile",
    "load",
    "plan",
]
