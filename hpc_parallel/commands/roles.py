"""What each rank of a recorded run holds and sends, and to which ranks, as text and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpc_parallel.commands import grid
from hpc_parallel.record.recorded import RecordedRun

if TYPE_CHECKING:
    from hpc_parallel.layout.exchanges import Exchange
    from hpc_parallel.layout.setup import Setup

MOST_ROWS = 12  # of the table of holdings
MOST_GROUPS = 4  # groups of ranks in one line
MOST_LISTED = 64  # groups of ranks in --json
COVERED = "train"  # the task whose exchanges are known


def setup_of(run: RecordedRun) -> tuple[Setup | None, str | None]:
    """The setup of a training run, or why its exchanges are not known; for other tasks, both are None."""
    if run.task != COVERED or grid.layout(run) is None or not grid.hosts(run):
        return None, None
    devices = (run.nodes or 0) * (run.gpus_per_node or 0)
    config = {**(run.config or {}), "strategy": run.head.get("strategy")}  # the strategy that `grid` checked
    setup = recorded_setup(config, devices=devices, device=_device(run))
    if setup is None:
        return None, "the configuration is damaged"
    return (None, setup.uncovered) if setup.uncovered else (setup, None)


def recorded_setup(config: Mapping[str, Any], *, devices: int, device: str | None = None) -> Setup | None:
    """The setup of a recorded configuration, whose values may be of any type; None without a strategy.

    device: the kind of device that the ranks recorded, if the run has started.

    `devices` must be the product that `Layout.resolve` accepts for this configuration.
    """
    from hpc_parallel.config.typed_config import strategy_of  # imports Hydra
    from hpc_parallel.layout.layout import layout_of
    from hpc_parallel.layout.setup import Setup, model_facts

    strategy = strategy_of(config.get("strategy"))
    if strategy is None:
        return None
    return Setup(
        strategy,
        layout_of(strategy, devices=devices),
        model=model_facts(config.get("model")),
        gpus={"cpu": False, "cuda": True}.get(device or str(config.get("device"))),
    )


def as_values(run: RecordedRun) -> dict[str, Any]:
    """`holdings` and `exchanges` for --json; null where they are not known. Long lists of groups are cut."""
    setup, _ = setup_of(run)
    if setup is None:
        return {"holdings": None, "exchanges": None}
    from hpc_parallel.layout.exchanges import exchanges
    from hpc_parallel.layout.holdings import holdings

    return {
        "holdings": [
            {
                "devices": row.devices, "role": row.role, "keeps": row.keeps, "model": row.model_text,
                "samples": row.samples_text,
            }
            for row in holdings(setup, most=MOST_ROWS)
        ],
        "exchanges": [
            {
                "phase": exchange.phase.value, "what": exchange.what, "how": exchange.how,
                "often": exchange.often.value, "over": exchange.over, "only_if": exchange.only_if,
                "groups": exchange.groups[:MOST_LISTED], "group_count": len(exchange.groups),
            }
            for exchange in exchanges(setup)
        ],
    }  # fmt: skip


def holding_rows(setup: Setup) -> list[tuple[str, ...]]:
    """Devices, what they hold, and their samples; at most MOST_ROWS."""
    from hpc_parallel.layout.holdings import holdings
    from hpc_parallel.layout.layout import DATAPARALLEL

    noun = "device" if setup.strategy.execution == DATAPARALLEL else "rank"
    rows: list[tuple[str, ...]] = []
    for row in holdings(setup, most=MOST_ROWS):
        first, last = row.devices
        name = f"{noun} {first}" if first == last else f"{noun}s {first}-{last}"
        rows.append((name, row.role, row.model_text, row.samples_text))
    return rows


def exchange_rows(setup: Setup) -> list[tuple[str, ...]]:
    """What is sent, how, how often and among whom. Exchanges that differ only in their phase share a row."""
    from hpc_parallel.layout.exchanges import exchanges

    rows: dict[tuple[str, ...], list[str]] = {}
    for exchange in exchanges(setup):
        what = exchange.what + (f" ({exchange.only_if})" if exchange.only_if else "")
        key = (what, exchange.how, exchange.often.value, groups_text(exchange))
        rows.setdefault(key, []).append(exchange.phase.value)
    return [(", ".join(phases), *key) for key, phases in rows.items()]


def groups_text(exchange: Exchange) -> str:
    """The ranks of each group, or each sender and its receiver: `ranks 0-3; 4-7`, `0 -> 1; 1 -> 2`."""
    from hpc_parallel.layout.exchanges import DIRECTED
    from hpc_parallel.layout.holdings import ranges

    groups: Sequence[Sequence[int]] = exchange.groups
    directed = exchange.how in DIRECTED
    texts = [" -> ".join(map(str, g)) if directed else ranges(g) for g in groups[:MOST_GROUPS]]
    more = len(groups) - MOST_GROUPS
    return "ranks " * (not directed) + "; ".join(texts) + (f"; and {more} more" if more > 0 else "")


def _device(run: RecordedRun) -> str | None:
    """The kind of device that the first rank recorded."""
    places = run.ran_on.places
    return places[0].device_kind if places else None
