"""Tab completion offers overrides that the command accepts: groups, keys, and values that are choices."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_parallel.config.override_words import override_words


@pytest.mark.parametrize(
    ("prefix", "offered"),
    [
        ("strategy=pi", ["strategy=pipeline"]),
        ("+jobs=strong", ["+jobs=strong_scaling"]),
        ("training.pre", ["training.precision="]),
        ("strateg", ["strategy.", "strategy="]),
        ("strategy.schedule=looped", ["strategy.schedule=looped_bfs"]),
        ("strategy=data,f", ["strategy=data,fsdp"]),
        ("dry_run=", ["dry_run=true", "dry_run=false"]),
        ("model.experts_", ["model.experts_per_token="]),
        ("task.prompt_l", ["task.prompt_length="]),
        ("optimizer.lr", []),
        ("nodes=", []),
        ("nowhere=t", []),
    ],
)
def test_words(prefix: str, offered: list[str]) -> None:
    assert override_words(prefix) == offered


def test_the_folder_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mysite.yaml").write_text("")
    assert override_words("cluster=my", extra_dir=str(tmp_path)) == ["cluster=mysite"]
    assert override_words("cluster=g", extra_dir=str(tmp_path)) == ["cluster=generic", "cluster=gres"]
