"""A fit that a test puts together from a plan and a runner, without planning."""

from outsize.model.fitting.fitted import Fitted
from outsize.model.fitting.plan_in_use import PlanInUse
from outsize.model.fitting.run.resident import reopen_resident


def hold(plan, choice, runner, replan=None, rows=0, watched=0):
    """`watched`: steps after which it looks for a faster plan, 0 for never."""

    def reopen(choice, old):
        return reopen_resident(old.work, choice, old, rows)

    fitted = Fitted(PlanInUse(replan, reopen, plan, choice, runner), rows)
    fitted._faster.watched = watched
    return fitted
