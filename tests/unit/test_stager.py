"""The copy of a state on the host: what is pinned, and that a refusal costs speed only."""

from __future__ import annotations

import mmap

import pytest
import torch

from hpc_parallel.training.stager import PIN_FROM_BYTES, Pinning, Stager

WEIGHT = torch.arange(PIN_FROM_BYTES // 4, dtype=torch.float32).view(2, -1)  # just large enough


class Driver:
    """Registers memory as CUDA does: by pages, once."""

    def __init__(self, *, refuses: int = 0) -> None:
        """`refuses`: the error code of every registration, 0 for success."""
        self.refuses = refuses
        self.registered: dict[int, int] = {}
        self.calls = 0

    def register(self, address: int, size: int) -> int:
        self.calls += 1
        if self.refuses:
            return self.refuses
        assert address % mmap.PAGESIZE == 0
        assert not any(start < address + size and address < start + length
                       for start, length in self.registered.items())  # fmt: skip
        self.registered[address] = size
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    @property
    def pinning(self) -> Pinning:
        return Pinning(self.register, self.unregister)


def state(factor: float = 1.0) -> dict[str, torch.Tensor]:
    """New tensors each time, as the states of random generators are."""
    random = torch.arange(5056, dtype=torch.uint8)
    return {"weights/a": WEIGHT * factor, "weights/b": WEIGHT[:, :-1] + factor, "random/0-of-1/cpu": random}


def test_large_buffers_are_registered_once_and_given_back() -> None:
    driver = Driver()
    stager = Stager(pinning=driver.pinning)
    first = stager.stage(state())
    addresses = {name: copy.data_ptr() for name, copy in first.items()}
    second = stager.stage(state(3.0))
    assert {name: copy.data_ptr() for name, copy in second.items()} == addresses
    assert driver.registered == {addresses["weights/a"]: PIN_FROM_BYTES}  # b is 8 bytes too small
    assert driver.calls == 1
    for name, expected in state(3.0).items():
        assert torch.equal(second[name], expected), name
    stager.close()
    assert driver.registered == {}


def test_a_tensor_of_another_size_gets_another_buffer() -> None:
    driver = Driver()
    stager = Stager(pinning=driver.pinning)
    stager.stage({"weights/a": WEIGHT})
    grown = torch.cat([WEIGHT, WEIGHT])
    copy = stager.stage({"weights/a": grown})["weights/a"]
    assert torch.equal(copy, grown)
    assert driver.registered == {copy.data_ptr(): 2 * PIN_FROM_BYTES}


def test_a_refusal_is_told_once_and_the_copies_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver(refuses=712)
    stager = Stager(pinning=driver.pinning)
    for factor in (1.0, 2.0):
        copies = stager.stage({"weights/a": WEIGHT * factor, "weights/c": WEIGHT - factor})
        assert torch.equal(copies["weights/a"], WEIGHT * factor)
        assert torch.equal(copies["weights/c"], WEIGHT - factor)
    assert driver.calls == 1
    assert capsys.readouterr().err.count("1 MB for checkpoints can't be pinned (CUDA's error 712)") == 1
    stager.close()


def test_the_copy_does_not_follow_the_training() -> None:
    weight = torch.ones(3)
    copy = Stager().stage({"weights/a": weight})["weights/a"]
    weight.add_(1)
    assert copy.tolist() == [1, 1, 1]


def test_the_device_is_waited_for_after_all_copies() -> None:
    events: list[int] = []
    stager = Stager(wait=lambda: events.append(len(stager._buffers)))
    stager.stage(state())
    assert events == [3]
