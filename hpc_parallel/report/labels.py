"""Labels that distinguish runs: they show what differs between the runs, and not what is the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Any

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import KINDS
from hpc_parallel.failure.summary import SPEEDLESS
from hpc_parallel.layout.axes import AXES
from hpc_parallel.problems import printable, spell
from hpc_parallel.record.recorded import RecordedRun
from hpc_parallel.record.values import flatten

# Keys that may differ between runs of one command although the runs compute the same.
RUN_KEYS = ("name", "run_dir", "resume", "dry_run", "launcher", "sweep", "nodes", "gpus_per_node", "jobs")
_ABSENT = object()
PROGRAM = tuple(f"script.{kind}" for kind in KINDS)
CLASS = "._target_"
STRATEGY = ("name", "execution", *AXES)
ROOM = 48  # characters of a label in a legend
MOST_OPTIONS = 3  # in the title of a kind of work


@dataclass(frozen=True)
class Label:
    """`pipeline 2 x 1`, and the options in which the run differs from most runs of its strategy.

    The layout and the run id follow if nothing else distinguishes two runs.
    """

    parts: Sequence[str]
    options: Sequence[str] = ()  # the options in `parts`
    run_id: str = ""

    def __str__(self) -> str:
        return ", ".join(self.parts) + f" ({self.run_id})" * bool(self.run_id)

    @property
    def words(self) -> Sequence[str]:
        """The parts of the label and the run id. A legend keeps only those that differ."""
        return (*self.parts, *([f"({self.run_id})"] if self.run_id else ()))


def labels_of(runs: Sequence[RecordedRun], layouts: Sequence[str]) -> list[Label]:
    """The label of each run. layouts: texts that are appended to equal labels, before the run id.

    If no value of an option is common to most runs of a strategy, each of these runs shows its value.
    """
    labels = []
    for run, options in zip(runs, _differences(runs), strict=True):
        shape = f"{run.nodes or '?'} x {run.gpus_per_node or '?'}"
        name = printable(f"{run.strategy or run.run_id} {shape}")
        labels.append(Label((name, *options), options))
    for index in _equal(labels, layouts):
        label = labels[index]
        labels[index] = Label((*label.parts, layouts[index]), label.options)
    ids = [printable(run.run_id) for run in runs]
    for index in _equal(labels, ids):
        labels[index] = Label(labels[index].parts, labels[index].options, ids[index])
    return labels


def _equal(labels: Sequence[Label], suffixes: Sequence[str]) -> list[int]:
    """Indices of labels that several runs have, if their suffixes would distinguish them."""
    by_label: dict[str, set[str]] = defaultdict(set)
    for label, suffix in zip(labels, suffixes, strict=True):
        by_label[str(label)].add(suffix)
    return [index for index, label in enumerate(labels) if len(by_label[str(label)]) > 1]


def _differences(runs: Sequence[RecordedRun]) -> list[Sequence[str]]:
    """The options in which each run differs from most runs of its strategy and of the section's class."""
    run_options = [_options_of(run) for run in runs]
    places: dict[str | None, set[tuple[str | None, str]]] = defaultdict(set)  # by strategy: (class, key)
    strategies = [run.strategy for run in runs]
    for strategy, options in zip(strategies, run_options, strict=True):
        places[strategy] |= {(_class_of(key, options), key) for key in options}
    for strategy, options in zip(strategies, run_options, strict=True):
        for of_class, key in places[strategy]:
            if key not in options and _class_of(key, options) == of_class:
                options[key] = defaults().get(key, _ABSENT)  # only other runs have it
    counts: dict[tuple[str | None, ...], Counter[str]] = defaultdict(Counter)
    for strategy, options in zip(strategies, run_options, strict=True):
        for key, value in options.items():
            counts[strategy, _class_of(key, options), key][spell(value)] += 1
    usual = {
        place: value
        for place, counter in counts.items()
        for value, count in counter.most_common(1)
        if 2 * count > counter.total()
    }
    return _spelled([
        {
            key: value
            for key, value in options.items()
            if value is not _ABSENT
            and usual.get((strategy, _class_of(key, options), key)) != spell(value)
        }
        for strategy, options in zip(strategies, run_options, strict=True)
    ])  # fmt: skip


def _class_of(key: str, options: Mapping[str, Any]) -> str | None:
    """The class that the section of `key` has: only objects of one class are compared by their keys."""
    of_section = key.partition(".")[0] + CLASS
    return None if key == of_section else spell(options.get(of_section))


def _spelled(run_options: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """`microbatches=8`, `model=ConvNet`; the whole key if another one has the same last part."""
    keys = {key for options in run_options for key in options}
    names = {key: key.removesuffix(".name").removesuffix(CLASS).rpartition(".")[2] for key in keys}
    uses = Counter(names.values())

    def spelled(key: str, value: Any) -> str:
        name = names[key] if uses[names[key]] == 1 else key
        return f"{name}={str(value).rpartition('.')[2] if key.endswith(CLASS) else spell(value)}"

    return [tuple(printable(spelled(*option)) for option in options.items()) for options in run_options]


def _options_of(run: RecordedRun) -> dict[str, Any]:
    """The options in which runs may differ, besides strategy and devices."""
    config = {key: value for key, value in (run.config or {}).items() if key not in RUN_KEYS}
    speedless = [key for key in SPEEDLESS if key != "steps" or run.task not in (None, "train")]
    excluded = {f"strategy.{key}" for key in STRATEGY} | {f"training.{key}" for key in speedless}
    excluded |= {"training.global_batch_size"} if run.task == "script" else set()  # it follows the devices
    return {key: value for key, value in flatten(config).items() if key not in excluded}


@cache
def defaults() -> dict[str, Any]:
    """The values of the keys that have one in every run; a run that is older than a key lacks it."""
    return flatten(asdict(RunConfig()))


def titles_of_work(runs: Sequence[RecordedRun], *, with_batch: bool = True) -> list[str]:
    """What differs between runs of different work: `task=infer`, `layers=12, width=768`.

    with_batch: whether a different global batch is different work.
    """
    works = [
        {
            key: value
            for key, value in flatten(run.config or {}).items()
            if key.partition(".")[0] in ("task", "model", "data")
            or key in PROGRAM
            or (with_batch and key == "training.global_batch_size")
        }
        for run in runs
    ]
    used = dict.fromkeys(key for work in works for key in work)
    keys = sorted(used, key=lambda key: not key.endswith(CLASS))
    values: dict[tuple[str | None, str], set[str]] = defaultdict(set)
    for work, key in product(works, keys):
        values[_class_of(key, work), key].add(spell(work.get(key)))
    titles = _spelled([
        {key: work[key] for key in keys if key in work and len(values[_class_of(key, work), key]) > 1}
        for work in works
    ])  # fmt: skip
    more = (f" and {len(texts) - MOST_OPTIONS} more" * (len(texts) > MOST_OPTIONS) for texts in titles)
    return [", ".join(texts[:MOST_OPTIONS]) + end for texts, end in zip(titles, more, strict=True)]


def legend(labels: Iterable[Sequence[str]]) -> list[str]:
    """The texts of a legend: the parts of each label that are not common to all labels.

    The texts are cut to ROOM characters, but stay different.
    """
    parts = [tuple(label) for label in labels]
    common = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    distinct = [[word for word in label if word not in common] for label in parts]
    texts = [", ".join(label) for label in (distinct if all(distinct) else parts)]
    for cut in (short, _cut_start):
        short_texts = [cut(text, ROOM) for text in texts]
        if len(set(short_texts)) == len(set(texts)):
            return short_texts
    return [f"{short(text, ROOM - 5)} ({number})" for number, text in enumerate(texts, start=1)]


def short(text: str, room: int = ROOM) -> str:
    """The text, cut at its end to `room` characters."""
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _cut_start(text: str, room: int) -> str:
    return text if len(text) <= room else f"…{text[1 - room :]}"
