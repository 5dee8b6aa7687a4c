"""The planner: what a profile's machine has to hold, move and compute for a request, from dimensions alone.

From outside: `make_plan`, its `Workload`, `Plan` and `PlanError`, and `released_outline`.
"""

from engines.plan.plan import Plan, PlanError, Workload
from engines.plan.planner import make_plan, released_outline

__all__ = ["Plan", "PlanError", "Workload", "make_plan", "released_outline"]
