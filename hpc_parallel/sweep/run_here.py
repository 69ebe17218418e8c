"""Run a sweep on this machine: one run after another, or several at once, in one display."""

from __future__ import annotations

import signal
import time
from collections import deque

from hpc_parallel.launch.local_launcher import PERIOD_S, Agent, counting_signals
from hpc_parallel.record import owner
from hpc_parallel.sweep.sweep_plan import PlannedRun, SweepPlan
from hpc_parallel.sweep.sweep_table import after_the_end
from hpc_parallel.sweep.view import SweepView
from hpc_parallel.sweep.write import for_each, take_back


def run_all(plan: SweepPlan) -> int:
    """Run all planned runs, whose folders exist. A failed run does not stop the others.

    After the first Ctrl-C or SIGTERM, active runs save and end, and no other run starts. The second signal
    kills them at once. Then KeyboardInterrupt is raised. A run that is cancelled before its turn is skipped.

    Returns 0 if all runs completed, else 1.
    """
    for_each(lambda planned: owner.queue(planned.run.folder), plan.runs)
    with counting_signals() as signals, SweepView(len(plan.runs)) as view:
        runner = _Runner(plan, view=view, signals=signals)
        runner.run()
        waiting = runner.waiting
        view.say(f"{view.counts()}" + f", {len(waiting)} not started" * bool(waiting))
        for line in after_the_end(plan.folder, completed=runner.completed and not waiting):
            view.say(line)
    if signals:
        take_back(planned.run for planned in waiting)
        raise KeyboardInterrupt
    return 0 if runner.completed else 1


class _Runner:
    def __init__(self, plan: SweepPlan, *, view: SweepView, signals: list[int]) -> None:
        self.waiting = deque(plan.runs)
        self.active: dict[PlannedRun, Agent] = {}
        self.completed = True  # all runs so far
        self._limit = plan.settings.parallelism or 1
        self._view = view
        self._signals = signals  # received so far

    def run(self) -> None:
        handled = 0
        try:
            while self.active or (self.waiting and not self._signals):
                self._start_waiting()
                if len(self._signals) > handled:
                    handled = len(self._signals)
                    self._view.say("stopping; Ctrl-C again kills at once")
                    for agent in self.active.values():
                        agent.stop(self._signals)
                self._end_finished()
                for planned in self.active:
                    self._view.poll(planned)
                time.sleep(PERIOD_S)
        finally:
            for agent in self.active.values():
                agent.end(signals=self._signals or [signal.SIGTERM])

    def _start_waiting(self) -> None:
        while self.waiting and len(self.active) < self._limit and not self._signals:
            planned = self.waiting.popleft()
            if owner.take_turn(planned.run.folder):
                self._view.start(planned)
                self.active[planned] = Agent(planned.run.folder, variables=planned.run.variables)
            else:
                self._view.skip(planned)
                self.completed = False

    def _end_finished(self) -> None:
        for planned in [planned for planned, agent in self.active.items() if agent.has_ended()]:
            self.active.pop(planned).end(signals=self._signals)
            self.completed = self._view.end(planned) and self.completed
