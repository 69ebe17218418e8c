"""The table of faults: what harms a run and when, and how each of its starts must end.

A row is drawn for one of the runs of WHO by the seed. Hosts are n1, with the batch script and rank 0 of the
first start, and n2; then come the spares, if the row asks for any.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
from chaos import DATA, SLOW

from hpc_parallel.failure.failure import HANG, KILLED, NODE_LOST
from hpc_parallel.failure.restart import (
    CANCELLED,
    END,
    FEWER,
    IN_PLACE,
    PREEMPTED,
    REQUEUE,
    SPARE,
    TIME_LIMIT,
)

# Moments. END_OF_START: the harm before has not ended it yet. QUEUE: the job waits for hosts.
STEPS, SAVE, END_OF_START, RESTART, QUEUE = "steps", "save", "end", "restart", "queue"
# Harms, and what undoes them.
KILL, STOP, CUT, POWER_OFF, SCANCEL, TAKE_HOSTS, GIVE_HOSTS, LIMIT, BOOT = (
    "kill", "stop", "cut", "power off", "scancel", "take hosts", "give hosts back", "time limit", "boot",
)  # fmt: skip


@dataclass(frozen=True)
class Who:
    """A run to harm; an own script has no model."""

    name: str
    words: tuple[str, ...]
    model: tuple[str, ...] = ()
    ranks_per_node: int = 1


ONE_SAMPLE = "training.microbatch_size=1"
OWN = Who("own script", ("nodes=2",))
TRAININGS = (
    Who("data", DATA, SLOW),
    Who("pipeline", ("strategy=pipeline", "nodes=2"), (*SLOW, "model.pause_s=0.02")),
    Who("hybrid", ("strategy=hybrid", "nodes=2", "gpus_per_node=2"), (*SLOW, "model.pause_s=0.02"), 2),
)
WAITING = Who("data with standby", (*DATA, "launcher.standby=true"), SLOW)
WHO = (*TRAININGS, WAITING, OWN)
# On any number of nodes the microbatches of all replicas have one size: the model could have BatchNorm.
SHRINKING = tuple(
    replace(who, words=(*who.words, "launcher.min_nodes=1", *(() if who.words == DATA else (ONE_SAMPLE,))))
    for who in TRAININGS
)


@dataclass(frozen=True)
class Harm:
    """What comes to these hosts; for KILL and STOP to the first rank of a node of the start, `on`."""

    what: str
    on: int = 0
    when: str = STEPS
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class End:
    """How a start ends, the host that is named, and what follows."""

    how: str
    host: str | None
    then: str


@dataclass(frozen=True)
class Fault:
    name: str
    harms: tuple[Harm, ...]
    ends: tuple[End, ...]
    words: tuple[str, ...] = ()
    who: tuple[Who, ...] = WHO
    in_gate: bool = False

    @property
    def is_cancelled(self) -> bool:
        return any(harm.what == SCANCEL for harm in self.harms)


KILL_N2, KILL_N1_AGAIN = Harm(KILL, 1), Harm(KILL, 0, RESTART)
N2_OFF, N1_OFF = Harm(POWER_OFF, hosts=("n2",)), Harm(POWER_OFF, hosts=("n1",))
TWO_OFF = Harm(POWER_OFF, hosts=("n2", "n3"))
SCANCEL_LATER = Harm(SCANCEL, when=RESTART)
N2_KILLED, N1_KILLED = End(KILLED, "n2", IN_PLACE), End(KILLED, "n1", IN_PLACE)
N2_TO_SPARE, N2_TO_FEWER = End(NODE_LOST, "n2", SPARE), End(NODE_LOST, "n2", FEWER)
ENDED_BY_USER, TAKEN = End(CANCELLED, None, END), End(PREEMPTED, None, REQUEUE)
ONE_SPARE = ("launcher.spares=1",)

FAULTS = (
    Fault("a rank is killed", (KILL_N2,), (N2_KILLED,), in_gate=True),
    Fault("a rank is stopped", (Harm(STOP, 1),), (End(HANG, "n2", IN_PLACE),), ("cluster.hang_timeout_s=8",)),
    Fault("a network is cut", (Harm(CUT, hosts=("n2",)),), (N2_TO_SPARE,), ONE_SPARE),
    Fault("a host is powered off", (N2_OFF,), (N2_TO_SPARE,), ONE_SPARE),
    Fault("the host of the batch script", (N1_OFF,), (End(NODE_LOST, "n1", REQUEUE),), ONE_SPARE),
    Fault(
        "the host of rank 0 without the batch script",
        (Harm(KILL, 0), Harm(KILL, 0), N2_OFF),
        (N1_KILLED, End(KILLED, "n1", SPARE), N2_TO_SPARE),
        ("launcher.spares=2",),
    ),
    Fault(
        "two hosts at once with one spare",
        (TWO_OFF, Harm(BOOT, hosts=("n2", "n3"), when=QUEUE)),
        (End(NODE_LOST, "n2", REQUEUE),),
        ONE_SPARE,
    ),
    Fault(
        "two hosts at once with the batch script",
        (Harm(POWER_OFF, hosts=("n1", "n2")), Harm(BOOT, hosts=("n1",), when=QUEUE)),
        (End(NODE_LOST, "n1", REQUEUE),),
        ONE_SPARE,
    ),
    Fault("a failure during a restart", (KILL_N2, KILL_N1_AGAIN), (N2_KILLED, N1_KILLED)),
    Fault(
        "a host is lost during a restart",
        (KILL_N2, Harm(POWER_OFF, hosts=("n2",), when=RESTART)),
        (N2_KILLED, N2_TO_SPARE),
        ONE_SPARE,
    ),
    Fault(
        "a host is lost while the ranks end",
        (Harm(KILL, 0), Harm(POWER_OFF, hosts=("n2",), when=END_OF_START)),
        (N2_TO_SPARE,),
        ONE_SPARE,
    ),
    Fault("a failure during a save", (Harm(KILL, 0, SAVE),), (N1_KILLED,)),
    Fault("a failure during a shrink", (N2_OFF, KILL_N1_AGAIN), (N2_TO_FEWER, N1_KILLED), who=SHRINKING),
    Fault("a host fails again", (KILL_N2, KILL_N2), (N2_KILLED, End(KILLED, "n2", SPARE)), ONE_SPARE),
    Fault(
        "the time limit during a restart",
        (KILL_N2, Harm(LIMIT, when=RESTART)),
        (N2_KILLED, End(TIME_LIMIT, None, REQUEUE)),
        ("launcher.grace_s=10",),
    ),
    Fault("a preemption", (Harm(TAKE_HOSTS), Harm(GIVE_HOSTS, when=QUEUE)), (TAKEN,), in_gate=True),
    Fault(
        "a preemption during a restart",
        (KILL_N2, Harm(TAKE_HOSTS, when=RESTART), Harm(GIVE_HOSTS, when=QUEUE)),
        (N2_KILLED, TAKEN),
    ),
    Fault("scancel", (Harm(SCANCEL),), (ENDED_BY_USER,)),
    Fault("scancel during a save", (Harm(SCANCEL, when=SAVE),), (ENDED_BY_USER,)),
    Fault("scancel during a restart", (KILL_N2, SCANCEL_LATER), (N2_KILLED, ENDED_BY_USER)),
    Fault(
        "scancel during a shrink", (N2_OFF, SCANCEL_LATER), (N2_TO_FEWER, ENDED_BY_USER), who=SHRINKING
    ),
    Fault(
        "scancel of a job that waits for hosts",
        (TWO_OFF, Harm(SCANCEL, when=QUEUE)),
        (End(NODE_LOST, "n2", REQUEUE),),
        ONE_SPARE,
    ),
    Fault(
        "scancel between a preemption and the next start",
        (Harm(TAKE_HOSTS), Harm(SCANCEL, when=QUEUE)),
        (TAKEN,),
    ),
)  # fmt: skip


def rows() -> list[object]:
    """Each fault once, for a run that its seed draws; with CHAOS_FULL=1, for every run that it has."""
    full = os.environ.get("CHAOS_FULL") == "1"
    return [
        pytest.param(
            fault, who,
            id=fault.name.replace(" ", "_") + (f"-{who.name.replace(' ', '_')}" if who else ""),
            marks=() if fault.in_gate else pytest.mark.chaos_slow,
        )
        for fault in FAULTS
        for who in (fault.who if full else (None,))
    ]  # fmt: skip


def drawn(fault: Fault, *, seed: int) -> Who:
    """Three seeds in a row draw three different ones."""
    return fault.who[(FAULTS.index(fault) + seed) % len(fault.who)]
