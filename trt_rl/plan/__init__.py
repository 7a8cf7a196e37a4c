"""What can be known of a recipe before a process starts, without a GPU or torch.

`checks` refuses what cannot run; `seating`, `counts`, `memory` and `projection` say what a run takes; `report` joins them.
"""

from trt_rl.plan.checks import check, cluster_violations, recipe_violations, violations
from trt_rl.plan.report import Plan, make_plan
from trt_rl.plan.seating import Seating

__all__ = ["Plan", "Seating", "check", "cluster_violations", "make_plan", "recipe_violations", "violations"]
