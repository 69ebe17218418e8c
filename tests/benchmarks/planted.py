"""Which faults of the product the gate finds; each is planted alone in a copy of this tree.

    python tests/benchmarks/planted.py [--only NAME] [--count N --seed SEED] [--limit SECONDS] [--marks MARKS]

For each fault, pytest runs with `-x` the files that found it when it was listed (`seen_by`), and then the
tests that it can reach by imports, the nearest first (tests/affected.py), for `--limit` seconds. A failure
counts only if the same test passes without the fault. The marks are those of `make test` without `slurm`,
whose tests need a cluster: "not found" means not found by the tests that the line counts.

A fault is an exact text that is once in hpc_parallel/, in whatever file. If the text is gone, write the fault
anew for the new text: a list that shrinks would measure less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARKS = "not full and not chaos_slow and not timing and not slurm"
LIMIT_S = 300


@dataclass(frozen=True)
class Fault:
    """before, after: the text that the fault replaces. harm: what a user gets. seen_by: below tests/."""

    name: str
    before: str
    after: str
    harm: str
    seen_by: Sequence[str]

    def path_in(self, tree: Path) -> Path:
        """The file with the text. Raises SystemExit unless the text is once in the product."""
        texts = {path: path.read_text().count(self.before) for path in tree.glob("hpc_parallel/**/*.py")}
        if sum(texts.values()) != 1:
            raise SystemExit(f"{self.name}: {sum(texts.values())} places, not 1, have {self.before!r}")
        return next(path for path, count in texts.items() if count)


FAULTS = [
    Fault(
        "summed-mean", "(flat, op=dist.ReduceOp.AVG", "(flat, op=dist.ReduceOp.SUM",
        "schedules that split the backward pass learn from gradients that are too large by the replicas",
        ["distributed/test_expert.py"],
    ),
    Fault(
        "swapped-axes", ".reshape(tuple(used.values()))",
        ".reshape(tuple(used.values())[::-1]).permute(*reversed(range(len(used))))",
        "the innermost axis crosses nodes, and the ranks read samples of other replicas",
        ["distributed/test_groups.py"],
    ),
    Fault(
        "sample-order", "offset = step * self.global_batch_size + before",
        "offset = step * self.global_batch_size + before + 1",
        "every layout trains on the same wrong samples: one too far", ["unit/test_sampler.py"],
    ),
    Fault(
        "experts-undivided", "return gradients[0] / ctx.divisor, None", "return gradients[0], None",
        "experts learn from a sum over devices, all else from a mean", ["distributed/test_expert.py"],
    ),
    Fault(
        "torn-checkpoint", "and is_real_folder(entry) and _is_marked(Path(entry.path))",
        "and is_real_folder(entry)",
        "a checkpoint that was never completed counts", ["unit/test_checkpoint_index.py"],
    ),
    Fault(
        "unquoted-log", """f'{shlex.quote(str(run.folder.slurm))}/"{JOB}"{log_suffix}'""",
        """f'{run.folder.slurm}/"{JOB}"{log_suffix}'""",
        "a run folder with a space or `$(...)` breaks the job, or executes", ["unit/test_batch_script.py"],
    ),
    Fault(
        "unknown-completed", """return State(BROKEN_OFF, "its job ended without a summary", ended=True)""",
        "return State(word, ended=True)",
        "`status` calls a run completed that wrote no summary", ["unit/test_slurm_answers.py"],
    ),
    Fault(
        "dropout-seed", "torch.tensor(tensor_seed(seed, name) >> 1,",
        "torch.tensor(tensor_seed(seed + part.tensor[0], name) >> 1,",
        "ranks of the tensor axis drop different elements of equal tensors", ["distributed/test_dropout.py"],
    ),
    Fault(
        "ring-block", "return (every, early) if source < rank", "return (every, every) if source < rank",
        "a late device's queries see keys of their own future", ["distributed/test_context.py"],
    ),
    Fault(
        "local-terms", "if self.axis is not None:\n            count =", "if False:\n            count =",
        "with ignored targets, a rank divides by its own terms only", ["distributed/test_ignored_targets.py"],
    ),
    Fault(
        "tied-once", "original_gradient.add_(copy_gradient)", "pass",
        "in a v-shaped pipeline, a tied weight loses the head's gradient", ["distributed/test_schedules.py"],
    ),
    Fault(
        "steps-forgotten", "self._begin(batches.next(step - 1))",
        "self._begin(batches.next(step - observers.progress.first_step))",
        "a run that restarts reads the first samples again", ["distributed/test_checkpoints.py"],
    ),
    Fault(
        "combine-weights", "by_token * gates.to(outputs.dtype).unsqueeze(-1)", "by_token",
        "experts count equally, on one device too, and the router learns nothing",
        ["distributed/test_expert.py"],
    ),
    Fault(
        "sent-bytes", "size = hidden_bytes / share.tensor if", "size = hidden_bytes if",
        "the planner counts messages between stages too often with sequence parallelism",
        ["unit/test_plan_time.py"],
    ),
    Fault(
        "mean-of-ranks", "usual_s = median_low(time.own_s for time in peers)",
        "usual_s = sum(time.own_s for time in peers) / len(peers)",
        "a slow rank raises what is usual, and hides itself", ["unit/test_slow_ranks.py"],
    ),
    Fault(
        "last-to-blame", "return min(failed_by_itself or", "return max(failed_by_itself or",
        "the last rank that failed is blamed, not the first", ["unit/test_failure.py"],
    ),
    Fault(
        "unescaped-page", "autoescape=True,\n", "autoescape=False,\n",
        "a name of a run acts as HTML in its report", ["report/test_verdict.py"],
    ),
    Fault(
        "deep-json", "_limit_json(text)\n", "pass\n",
        "a file of another user exhausts the stack of a command", ["security/test_damaged_folders.py"],
    ),
    Fault(
        "cut-off-by-one", "[range(start, end) for start, end in pairwise((0, *options.cuts",
        "[range(start + (start > 0), end + (end < count)) for start, end in pairwise((0, *options.cuts",
        "stages begin one block after `strategy.cuts`", ["unit/test_pipeline_cuts.py"],
    ),
    Fault(
        "requeue-refused", "if counts[end.how] > limits.", "if counts[end.how] >= limits.",
        "a run stops one requeue before `launcher.max_requeues`", ["unit/test_restart.py"],
    ),
    Fault(
        "validated-twice", "(self.indices(step) < count)", "(self.indices(step) <= count)",
        "the first sample that fills the last batch counts in the validation loss",
        ["distributed/test_validation.py"],
    ),
    Fault(
        "norm-of-copies", "(group_norms)).square() / count)", "(group_norms)).square())",
        "weights that several ranks hold count several times when gradients are clipped",
        ["distributed/test_parity.py"],
    ),
    Fault(
        "halo-gradient", "total[..., *region] += piece", "total[..., *region] = piece",
        "the border of a tile loses its neighbours' gradients", ["distributed/test_tile.py"],
    ),
    Fault(
        "server-mean", "total /= len(self._workers) + self._server_trains", "total /= len(self._workers)",
        "a server that trains divides by one rank too few", ["distributed/test_parity.py"],
    ),
]  # fmt: skip


def copy_tree(target: Path) -> None:
    """Copy the files of this working tree and commit them, so that `--affected HEAD` sees the fault alone."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    for name in filter(os.path.lexists, map(ROOT.joinpath, os.fsdecode(listed).split("\0")[:-1])):
        copied = target / name.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, copied, follow_symlinks=False)
    git = ["git", "-c", "user.name=planted", "-c", "user.email=planted@localhost"]
    for words in (["init", "-q"], ["add", "--all"], ["commit", "-q", "-m", "the tree without a fault"]):
        subprocess.run([*git, *words], cwd=target, check=True)


@contextlib.contextmanager
def planted(fault: Fault, tree: Path) -> Iterator[None]:
    path = fault.path_in(tree)
    text = path.read_text()
    path.write_text(text.replace(fault.before, fault.after))
    try:
        yield
    finally:
        path.write_text(text)


def run_tests(tree: Path, *words: str, marks: str, limit_s: float = LIMIT_S) -> tuple[str | None, int]:
    """The first test that fails, or None; and the number of tests that ran."""
    command = [sys.executable, "-m", "pytest", "-x", "--cache-clear", "-m", marks, *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    subprocess.run(
        [*command, f"--session-timeout={limit_s:.0f}"], cwd=tree, stdout=subprocess.DEVNULL,
        env=environment | {"PYTHONPATH": str(tree)},
    )  # fmt: skip
    cache = tree / ".pytest_cache" / "v"
    failed = cache / "cache" / "lastfailed"
    tests = list(json.loads(failed.read_text())) if failed.exists() else []
    (session,) = json.loads((cache / "outcomes" / "sessions").read_text())
    return next(iter(tests), None), sum(session["counts"].values())


def find(fault: Fault, tree: Path, *words: str, marks: str, limit_s: float) -> tuple[str | None, int]:
    """As `run_tests`, for a test that also fails alone with the fault, and passes alone without it."""
    deadline, ran, others = time.monotonic() + limit_s, 0, list[str]()
    while (left_s := deadline - time.monotonic()) > 0:
        with planted(fault, tree):
            test, count = run_tests(tree, *words, *others, marks=marks, limit_s=left_s)
            again = test and run_tests(tree, test, marks=marks)[0]
        ran += count
        if test is None or (again and run_tests(tree, test, marks=marks)[0] is None):
            return test, ran
        others.append(f"--deselect={test}")
    return None, ran


def search(fault: Fault, tree: Path, *, marks: str, limit_s: float) -> tuple[str | None, int]:
    """As `find`, in the listed files and then in all that the fault can reach."""
    listed = [f"tests/{file}" for file in fault.seen_by if (tree / "tests" / file).exists()]
    test, ran = find(fault, tree, *listed, marks=marks, limit_s=limit_s) if listed else (None, 0)
    if test is None:
        test, more = find(fault, tree, "--affected=HEAD", marks=marks, limit_s=limit_s)
        ran += more
    return test, ran


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="only this fault; may be repeated")
    parser.add_argument("--count", type=int, default=len(FAULTS), help="so many faults, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the faults")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for each of the two searches")
    parser.add_argument("--marks", default=MARKS, help="the marks of the tests that run")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    drawn = random.Random(options.seed).sample(chosen, min(options.count, len(chosen)))
    missed = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        places = {fault.name: fault.path_in(tree).relative_to(tree) for fault in drawn}
        for fault in drawn:
            began = time.monotonic()
            test, ran = search(fault, tree, marks=options.marks, limit_s=options.limit)
            missed += [fault.name] if test is None else []
            print(
                f"{fault.name:18} {places[fault.name]}: {fault.harm}\n{'':18} {test or 'NOT FOUND'} "
                f"({ran} tests ran, {time.monotonic() - began:.0f} s)", flush=True,
            )  # fmt: skip
    print(
        f"{len(drawn) - len(missed)} of {len(drawn)} faults found; seed {options.seed}, -m {options.marks!r}"
    )
    if missed:
        sys.exit("not found: " + ", ".join(missed))


if __name__ == "__main__":
    main()
