"""Plans of a step with a parameter server, and with experts on several devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.config.resolve import resolve
from hpc_parallel.layout.model_weights import weights_of
from hpc_parallel.planning.hardware import Hardware, read_hardware
from hpc_parallel.planning.operations import MatrixProduct
from hpc_parallel.planning.step_time import StepTerms, StepTime
from hpc_parallel.planning.work import work_of_run
from tests.benchmarks.calibrate_plan import FOLDERS
from tests.composed import composed
from tests.unit.test_plan_traced import figures

CPU = read_hardware("cpu", folders=FOLDERS)
GPU = read_hardware("a100_80gb_node8_800gbit", folders=FOLDERS)
MIXTURE = ("model=moe_tiny", "data.sequence_length=64", "training.global_batch_size=32")
SERVED = ("strategy=parameter_server", "model=20m", "training.global_batch_size=48")


def step_of(*words: str, hardware: Hardware = CPU) -> StepTerms:
    config, *_ = resolve(composed(*words, f"device={hardware.device.kind}"))
    node = replace(hardware.node, devices=config.gpus_per_node)
    return StepTerms(work_of_run(config), replace(hardware, node=node))


def simulated_s(step: StepTerms, hardware: Hardware, *, server_trains: bool) -> float:
    """The messages of parameter_server.py, one after the other, with the copies and sums of their numbers."""
    ranks, per_node = step.work.devices, step.hardware.node.devices
    moved_per_s = hardware.device.memory_bytes_per_s * hardware.traffic.share
    gradients = 4.0 * step.work.rank_weights([0])
    bucket = 25 * 2**20 if step.work.bucket_bytes is None else step.work.bucket_bytes
    count = -(-gradients // bucket)
    total_s = 0.0
    for _ in range(int(count)):
        size = gradients / count
        total_s += 2 * 2 * size / moved_per_s + 2 * size / moved_per_s  # joined on both sides, divided
        total_s += 2 * size / moved_per_s  # a worker's weights into their places
        for worker in range(1, ranks):
            link = min(hardware.node.send.bytes_per_s, hardware.network.bytes_per_s * hardware.network.share)
            rate = hardware.node.send.bytes_per_s if worker < per_node else link
            total_s += 2 * (hardware.node.send.latency_s + size / rate)
            if worker > 1 or server_trains:
                total_s += 3 * size / moved_per_s  # added to the sum
    return total_s


@pytest.mark.parametrize("layout", ["nodes=3", "gpus_per_node=4", "nodes=2 gpus_per_node=2"])
@pytest.mark.parametrize("dedicated", [True, False])
def test_the_link_of_a_server_carries_the_messages_of_all_workers(layout: str, dedicated: bool) -> None:
    step = step_of(*SERVED, *layout.split(), f"strategy.dedicated_server={dedicated}")
    planned = step.result()
    assert step.work.devices == {"nodes=3": 3}.get(layout, 4)
    assert planned.gradients_s == pytest.approx(simulated_s(step, CPU, server_trains=not dedicated))
    assert planned.exposed_s == pytest.approx(planned.gradients_s)
    names = {term.name for term in planned.terms}
    assert {"gradients to the server", "weights from the server"} <= names


def test_only_the_server_works_while_workers_wait() -> None:
    """On shared cores the exchange and the update are as fast as on a core of their own."""
    shared = replace(CPU, shared_cores=1)
    alone, together = (step_of(*SERVED, "nodes=4", hardware=one).result() for one in (CPU, shared))
    assert together.gradients_s == alone.gradients_s
    assert together.update_s == alone.update_s
    assert together.timeline.total_s > 2.5 * alone.timeline.total_s  # three workers compute


def planned(*words: str, hardware: Hardware = GPU) -> StepTime:
    return step_of(*MIXTURE, *words, hardware=hardware).result()


@pytest.mark.parametrize(("used", "words"), [(2, ()), (1, ("model.experts=1", "model.experts_per_token=1"))])
def test_a_mixture_computes_what_its_model_counts(used: int, words: tuple[str, ...]) -> None:
    """A single expert has a router too."""
    step = step_of(*MIXTURE, *words, "strategy=single")
    decoder = step.work.decoder
    config, *_ = resolve(composed(*MIXTURE, *words))
    weights = weights_of(config.model, sample_shape=(64,))
    assert decoder.block_flops == weights.flops.blocks[0]
    products = [one for one in step.share.block() if isinstance(one, MatrixProduct)]
    linear = sum(one.flops for one in products if one.name not in ("scores", "weighted values"))
    assert linear == 2 * step.share.tokens * decoder.weights_with(used)
    matrices = sum(one.numel for one in weights.weights if one.part == "0" and len(one.shape) > 1)
    assert decoder.weights_with(decoder.experts) == matrices


def test_experts_on_several_devices_compute_the_tokens_of_all() -> None:
    """As many products as on one device, of fewer and longer groups."""
    whole, split = (
        step_of(*MIXTURE, "training.microbatch_size=4", *words).share
        for words in (("strategy=data", "nodes=4"), ("strategy=expert", "nodes=4"))
    )
    for one, other in zip(whole.block(), split.block(), strict=True):
        if (
            isinstance(one, MatrixProduct)
            and isinstance(other, MatrixProduct)
            and one.name.startswith("feed-forward")
        ):
            assert other.flops == pytest.approx(one.flops)
            assert (other.batch, other.rows) == (one.batch / 4, one.rows * 4)


def test_tokens_are_sent_twice_each_way_and_nothing_hides_them() -> None:
    words = (
        "strategy=expert",
        "gpus_per_node=4",
        "training.microbatch_size=4",
        "training.precision=bfloat16",
    )
    step = planned(*words)
    by_name = {term.name: term.seconds for term in step.terms}
    size = 4 * 64 * 2 * 128 * 2  # tokens, experts of each, width, bytes
    link = GPU.node.collective
    for name in ("tokens to experts", "outputs of experts"):
        assert by_name[name] == pytest.approx(3 * link.latency_s + 3 / 4 * size / link.bytes_per_s)
    blocks, microbatches = 4, 2
    sent = 2 * (by_name["tokens to experts"] + by_name["outputs of experts"]) + by_name["numbers of tokens"]
    assert step.exposed_s >= blocks * microbatches * sent
    collective = replace(link, bytes_per_s=link.bytes_per_s / 2)
    slower = planned(*words, hardware=replace(GPU, node=replace(GPU.node, collective=collective)))
    added = 3 / 4 * (4 * size + 8 * 8) / link.bytes_per_s  # and numbers of 8 bytes for each of 8 experts
    longer_s = slower.timeline.total_s - step.timeline.total_s
    assert longer_s == pytest.approx(blocks * microbatches * added)
    again = planned(*words, "training.activation_checkpointing=full")
    once_more = by_name["tokens to experts"] + by_name["outputs of experts"] + by_name["numbers of tokens"]
    assert again.exposed_s - step.exposed_s == pytest.approx(blocks * microbatches * once_more)


@pytest.mark.processes
def test_a_mixture_sends_what_a_traced_rank_sends() -> None:
    """Traced tokens all go to the other rank, planned ones to both alike."""
    words = ("strategy=expert", "strategy.expert=2", "strategy.replicate=2", "nodes=2", "gpus_per_node=2")
    shares = {label: planned / traced for label, traced, planned in figures("model=moe_tiny", *words)}
    assert shares["sent over replicate x expert"] == pytest.approx(1, abs=0.01)  # of what is not an expert
    assert shares["sent over replicate"] == pytest.approx(1, abs=0.01)  # the mean of the experts
    assert shares["sent over expert"] == pytest.approx(0.5, abs=0.005)


def test_layouts_of_a_mixture_are_not_searched(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--best", *MIXTURE, "nodes=2", "hardware=a100_80gb_node8_800gbit"]
    assert command(words) == 2
    assert "the layouts of a mixture of experts are not searched" in capsys.readouterr().err
