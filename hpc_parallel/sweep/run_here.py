"""A sweep on this machine: run after run, or several at once, in one display."""

from __future__ import annotations

import time
from collections import deque

from hpc_parallel.launch.local_launcher import PERIOD_S, Agent, counting_signals
from hpc_parallel.record import owner
from hpc_parallel.sweep.earlier import to_go_on
from hpc_parallel.sweep.plan import PlannedRun, SweepPlan
from hpc_parallel.sweep.view import SweepView
from hpc_parallel.sweep.write import each_of, take_back


def run_all(plan: SweepPlan) -> int:
    """Run what is written; returns 0 if all completed, else 1. One failure does not stop the others.

    The first Ctrl-C (or SIGTERM) ends what runs in order and starts nothing more, the second kills at once;
    then KeyboardInterrupt is raised. A run that is cancelled before its turn is passed over.
    """
    each_of(lambda planned: owner.queue(planned.run.folder), plan.runs)
    most = plan.settings.parallelism or 1
    waiting = deque(plan.runs)
    going: dict[PlannedRun, Agent] = {}
    completed = True
    with counting_signals() as asked, SweepView(len(plan.runs)) as view:
        heeded = 0
        try:
            while going or (waiting and not asked):
                while waiting and len(going) < most and not asked:
                    planned = waiting.popleft()
                    if not owner.take_turn(planned.run.folder):
                        view.pass_over(planned)
                        completed = False
                        continue
                    view.start(planned)
                    going[planned] = Agent(planned.run.folder, variables=planned.run.variables)
                if len(asked) > heeded:
                    heeded = len(asked)
                    view.say("stopping; Ctrl-C again kills at once")
                    for agent in going.values():
                        agent.stop(asked)
                for planned in [each for each, agent in going.items() if agent.has_ended()]:
                    going.pop(planned).end(cancelled=bool(asked))
                    completed = view.end(planned) and completed
                for planned in going:
                    view.poll(planned)
                time.sleep(PERIOD_S)
        finally:
            for agent in going.values():
                agent.end(cancelled=True)
        view.say(f"{view.last_word()}" + f", {len(waiting)} not started" * bool(waiting))
        view.say(f"sweep folder  {plan.folder}")
        if waiting or not completed:
            view.say(f"to go on      {to_go_on(plan.folder)}")
    if asked:
        take_back(planned.run for planned in waiting)
        raise KeyboardInterrupt
    return 0 if completed else 1
