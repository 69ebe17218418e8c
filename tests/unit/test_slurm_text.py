"""Slurm's short forms, also those that someone wrote to fill the memory."""

from __future__ import annotations

import pytest

from hpc_parallel.slurm.short_forms import (
    MOST,
    expand_hosts,
    expand_numbers,
    expand_tasks,
    gpu_count,
    minutes_of,
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-4,7]", ["n1", "n2", "n3", "n4", "n7"]),
        ("gpu-[008-010]-ib,login", ["gpu-008-ib", "gpu-009-ib", "gpu-010-ib", "login"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("a,b[3],c", ["a", "b3", "c"]),
        ("n[99-101]", ["n99", "n100", "n101"]),
        ("", []),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == tuple(hosts)


def test_tasks_per_node() -> None:
    assert expand_tasks("2(x2),1") == (2, 2, 1)
    assert expand_tasks("4") == (4,)


def test_ranges_with_steps_and_zeros() -> None:
    assert expand_numbers("2,08-10,0-4:2") == ["2", "08", "09", "10", "0", "2", "4"]


@pytest.mark.parametrize(
    "text",
    [
        "0-99999999999",
        f"0-{MOST}",
        "1-9," * 200_000 + "1",
        "9" * 5000,
        "0-3:0",
        "",
        "-",
        "1-",
        "x",
        "1,,2",
        "²",
    ],
)
def test_no_list_or_too_long_a_list_of_numbers(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|items|zero"):
        expand_numbers(text)


@pytest.mark.parametrize(
    "text", ["n[0-9999999]", "r" + "[1-1000000]" * 9, "n[0-600000],m[0-600000]", "n" * 9999 + "[0-9]", "n[]"]
)
def test_no_list_or_too_long_a_list_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|items|longer"):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["1(x99999999999)", "2(x", "", "1;2"])
def test_no_list_or_too_long_a_list_of_tasks(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|items"):
        expand_tasks(text)


@pytest.mark.parametrize(
    ("gres", "gpu_type", "count"),
    [
        ("gpu:a100:4(S:0-1),gpu:1g.10gb:2", None, 6), ("gpu:a100:4(S:0,1),gpu:h100:2", "h100", 2),
        ("gpu:8", None, 8), ("gpu:a100=4", "a100", 4), ("gpu:8", "a100", 0), ("(null)", None, 0),
        ("shard:gpu:4,mps:100", None, 0),
    ],
)  # fmt: skip
def test_gpus_in_generic_resources(gres: str, gpu_type: str | None, count: int) -> None:
    assert gpu_count(gres, gpu_type=gpu_type) == count


@pytest.mark.parametrize("text", ["UNLIMITED", "infinite", "", "Partition_Limit", "1:2:3:4"])
def test_a_word_is_no_time(text: str) -> None:
    assert minutes_of(text) is None
