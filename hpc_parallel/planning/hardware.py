"""What a plan knows of the hardware: the files of `conf/hardware/`, as typed values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import yaml

from hpc_parallel.config.places import find_folder
from hpc_parallel.problems import ConfigError, Problem, nearest, raise_if_any

EXTENDS = "extends"  # the key that names another file; a file takes missing values from it
CALIBRATION = "calibration"  # a file does not take this key from another file
RING_FACTORS = "ring_factors"
# A legal value of each table.
TABLES = {"peak_flops": "{bfloat16: 1.0e+14}", RING_FACTORS: "{reduce_scatter: 2.0}"}
MEASURED_BY, FITTED_BY = "task=calibrate", "plan --calibrate"  # how our `calibration` values begin
NOT_CALIBRATED = "not calibrated: shares of peaks and launch times are those of a similar device"
CPU = "cpu"
DEVICE_KINDS = ("cuda", CPU)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Device:
    """One device.

    kind: one of DEVICE_KINDS, as `device=` of a run. peak_flops: dense, by precision. multiprocessors: how
    many work on tiles of a product. power_w: the power of its board; None if not known.
    """

    name: str
    kind: str
    peak_flops: dict[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    multiprocessors: int
    power_w: float | None

    @property
    def is_cpu(self) -> bool:
        return self.kind == CPU


@dataclass(frozen=True)
class Products:
    """The rate of matrix products as a share of the peak.

    peak_share: the share that an endless product reaches. tile_intensity: a tile of m x n reaches I / (I +
    tile_intensity) of this share, with I = m n / (m + n). depth: a product that sums over K reaches K / (K +
    depth) of this share.
    """

    peak_share: float
    tile_intensity: float
    depth: float


@dataclass(frozen=True)
class MemoryTraffic:
    """The coefficients of work that the device's memory limits.

    share: the reached share of the data sheet's bandwidth. kernel_s: the least time of a kernel. elementwise:
    a factor of the bytes that norms, activations and sums move. attention: a factor of the bytes that the
    softmax moves. loss_bytes: the bytes moved for each logit, forward and backward. optimizer_bytes: the
    bytes moved to update one weight. compiled: the share of the bytes of elementwise work and the loss that
    compiled code still moves. flash_share: the share of all scores that fused attention computes, because the
    causal mask hides the others. flash_bytes: the traffic that takes as long as the exponential of one score.
    If compiled, flash_share or flash_bytes is None, it was not measured, and a plan uses 1, 1 or 0.
    """

    share: float
    kernel_s: float
    elementwise: float
    attention: float
    loss_bytes: float
    optimizer_bytes: float
    compiled: float | None = None
    flash_share: float | None = None
    flash_bytes: float | None = None

    def of_compiled(self) -> MemoryTraffic:
        """The traffic of compiled blocks and a compiled loss; unchanged if `compiled` was not measured."""
        if self.compiled is None:
            return self
        moved = {name: self.compiled * getattr(self, name) for name in ("elementwise", "loss_bytes")}
        return replace(self, **moved)


@dataclass(frozen=True)
class Host:
    """Seconds that the process needs to launch the work. The device computes at the same time.

    forward_s, backward_s: for a block; the backward pass includes the second forward pass. collective_s: for
    a collective. unfused_s: for a block, in addition, if the softmax is not one kernel. microbatch_s: for
    embedding and head. action_s: for an action of a pipeline. step_s: for the update. sharpness: the exponent
    p of (device^p + host^p)^(1/p), the time of launches and computation that overlap.
    """

    forward_s: float
    backward_s: float
    collective_s: float
    unfused_s: float
    microbatch_s: float
    action_s: float
    step_s: float
    sharpness: float


@dataclass(frozen=True)
class Link:
    """latency_s: the latency of one step of a ring.

    bytes_per_s: the bus bandwidth as nccl-tests defines it.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Node:
    """Links inside a node. collective: a ring over its devices. send: one device to another."""

    devices: int
    collective: Link
    send: Link


@dataclass(frozen=True)
class Network:
    """Links between nodes.

    latency_s: the latency for each doubling of the nodes. bytes_per_s: the rate of all adapters of a node, in
    one direction. share: the share of this rate that collectives reach. spread: the relative standard
    deviation of the nodes' speeds; the slowest of N is expected spread * sqrt(2 ln N) behind the mean.
    """

    latency_s: float
    bytes_per_s: float
    share: float
    spread: float


@dataclass(frozen=True)
class Storage:
    """The storage of run folders and data, as `task=calibrate` measures it; None: not measured.

    write_bytes_per_s: the rate at which one rank writes to disk while all ranks write. together_bytes_per_s:
    the rate of all ranks together. read_bytes_per_s: the rate at which one rank reads, in pieces of the size
    of a sample, while all ranks read. copy_bytes_per_s: the rate from a GPU to pinned memory of its host.
    """

    write_bytes_per_s: float | None = None
    together_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Hardware:
    """A device, its node and the network.

    ring_factors: the bytes on the bus of a collective, as a multiple of the bytes that a ring sends; 1 for a
    collective without an entry. shared_cores: the number of cores that all devices of all nodes share, as
    processes of one machine do; None if each device has its own. calibration: the measurement of this machine
    that the coefficients come from; None without one.
    """

    device: Device
    node: Node
    network: Network
    products: Products
    traffic: MemoryTraffic
    host: Host
    storage: Storage = field(default_factory=Storage)
    ring_factors: dict[str, float] = field(default_factory=dict)
    shared_cores: int | None = None
    calibration: str | None = None


def hardware_names(folders: Sequence[Path]) -> list[str]:
    return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})


def named_hardware(name: str | None, *, user_folder: Path | None, needed_by: str = "a plan") -> Hardware:
    """The hardware of a file in `hardware/` of the user's folder or, if not there, of `conf`.

    Raises ConfigError.
    """
    folders = [folder / "hardware" for folder in (user_folder, find_folder("conf")) if folder is not None]
    if name is None:
        choices = ", ".join(hardware_names(folders))
        raise ConfigError([f"hardware=NAME is missing: {needed_by} needs it. Choose one of {choices}."])
    return read_hardware(name, folders=folders)


def read_hardware(name: str, *, folders: Sequence[Path]) -> Hardware:
    """The hardware of a file `NAME.yaml` in the first of the folders that has it.

    Raises ConfigError with all missing and wrong values.
    """
    problems: list[Problem | str] = []
    hardware = _typed(Hardware, _values(name, folders), f"{name}.yaml", problems)
    raise_if_any(problems)
    return hardware


def coefficient(hardware: Hardware, name: str) -> float:
    """The value of a dotted name, such as `network.share`."""
    value: Any = hardware
    for part in name.split("."):
        value = getattr(value, part)
    return float(value)


def with_coefficients(hardware: Hardware, values: Mapping[str, float]) -> Hardware:
    """`hardware` with other values of dotted names."""
    for name, value in values.items():
        hardware = _with(hardware, name.split("."), value)
    return hardware


def _with(owner: Any, path: Sequence[str], value: float) -> Any:
    inner = _with(getattr(owner, path[0]), path[1:], value) if len(path) > 1 else value
    return replace(owner, **{path[0]: inner})


def hardware_text(hardware: Hardware, *, head: Sequence[str], sources: Mapping[str, str]) -> str:
    """The text of a file of `conf/hardware/`. sources: comments by the dotted name of a value or a table."""
    lines = [*(f"# {line}" for line in head)]
    for key, value in asdict(hardware).items():
        if value is not None and value != {}:
            lines += _yaml_lines(key, value, sources=sources)
    return "\n".join([*lines, ""])


def _yaml_lines(name: str, value: Any, *, sources: Mapping[str, str]) -> Iterator[str]:
    indent, key = "  " * name.count("."), name.rpartition(".")[2]
    comment = f" # {sources[name]}" if name in sources else ""
    if isinstance(value, dict):
        yield f"{indent}{key}:{comment}"
        for inner, content in value.items():
            yield from _yaml_lines(f"{name}.{inner}", content, sources=sources)
    else:
        text = json.dumps(value) if value is None or isinstance(value, str) else _number_text(value)
        yield f"{indent}{key}: {text}{comment}"


def _number_text(value: float) -> str:
    """YAML 1.1 reads 1e-05 as a string, so a number needs a decimal point."""
    if isinstance(value, int):
        return str(value)
    mantissa, _, exponent = f"{value:.6g}".partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}e{exponent}" if exponent else mantissa


def _values(name: str, folders: Sequence[Path], *, by: tuple[str, ...] = ()) -> dict[str, Any]:
    names = hardware_names(folders)
    if name not in names or name in by:
        rule = "extends itself" if name in by else f"is none of {', '.join(names)}"
        near = [choice for choice in names if name.lower() in choice] or nearest(name, names)
        raise ConfigError([Problem("hardware", name, rule, tuple(near))])
    file = next(folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file())
    try:
        values = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ConfigError([f"{file} is not YAML: {' '.join(str(error).split())}."]) from error
    if not isinstance(values, dict):
        raise ConfigError([f"{file} has no table of values."])
    base = values.pop(EXTENDS, None)
    if not base:
        return values
    inherited = _values(str(base), folders, by=(*by, name))
    inherited.pop(CALIBRATION, None)  # it belongs to the other machine
    return _merged(inherited, values)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(base[key], value)
        if isinstance(value, dict) and isinstance(base.get(key), dict)
        else value
        for key, value in over.items()
    }
    return {**base, **both}


def _typed(kind: type[_T], values: Any, place: str, problems: list[Problem | str]) -> _T:
    """Values as a dataclass. Appends what is wrong with the values to `problems`."""
    table = values if isinstance(values, dict) else {}
    hints = get_type_hints(kind)
    made: dict[str, Any] = {}
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    problems += [f"{place}: there is no key {key}." for key in table if key not in names]
    for name in names:
        hint: Any = hints[name]
        value: Any = table.get(name)
        if is_dataclass(hint):
            made[name] = _typed(hint, value, f"{place}: {name}", problems)  # type: ignore[arg-type]
        elif rule := _broken_rule(name, hint, value):
            problems.append(f"{place}: {name} = {value!r} {rule}.")
        elif name in TABLES:
            made[name] = {str(key): float(number) for key, number in (value or {}).items()}
        else:
            number = int if hint is int else float
            made[name] = number(value) if _positive(value) else value
    return kind(**made) if not problems else object.__new__(kind)


def _broken_rule(name: str, hint: Any, value: Any) -> str | None:
    """The rule that the value of a field breaks, with a legal value if there is a near one; None if legal."""
    if value is None and (name == RING_FACTORS or NoneType in get_args(hint)):
        return None
    if name == "kind":
        return None if value in DEVICE_KINDS else f"is none of {', '.join(DEVICE_KINDS)}. Try kind: cuda"
    if name in ("name", CALIBRATION):
        return None if isinstance(value, str) else "is not a text"
    if name in TABLES:
        right = isinstance(value, dict) and value and all(map(_positive, value.values()))
        return None if right else f"is not a table of positive numbers by name. Try {TABLES[name]}"
    if not _positive(value):
        return "is not a positive number"
    if (hint is int or name == "shared_cores") and value != int(value):
        return f"is not a whole number. Try {name}: {math.ceil(value)}"
    return None


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


@dataclass(frozen=True)
class Loads:
    """The hardware as a device sees it: alone, while its pipeline stage computes, while all compute."""

    alone: Hardware
    stage: Hardware
    all: Hardware


def contended(hardware: Hardware, *, devices: float) -> Hardware:
    """The hardware as each of `devices` sees it while all of them compute.

    Cores are shared fairly and without loss: of n processes that compute at the same time on c cores, each
    gets min(1, c / n) of a core. Bytes on a wire need no core, but the copies to and from it do.
    """
    if hardware.shared_cores is None or devices <= hardware.shared_cores:
        return hardware
    turns = devices / hardware.shared_cores
    device, node, network = hardware.device, hardware.node, hardware.network
    peaks = {precision: rate / turns for precision, rate in device.peak_flops.items()}
    rate = device.memory_bytes_per_s / turns
    host = {name: seconds * turns for name, seconds in vars(hardware.host).items() if name.endswith("_s")}
    return replace(
        hardware,
        device=replace(device, peak_flops=peaks, memory_bytes_per_s=rate),
        traffic=replace(hardware.traffic, kernel_s=hardware.traffic.kernel_s * turns),
        host=replace(hardware.host, **host),
        node=replace(node, collective=_slower(node.collective, turns), send=_slower(node.send, turns)),
        network=replace(network, latency_s=network.latency_s * turns),
    )


def pipelines_at_once(hardware: Hardware, *, devices: float) -> float | None:
    """How many ranks of a pipeline compute at full speed at the same time; None if all do.

    devices: the number of devices of each rank. With more devices than cores the result is one, and
    `contended` has made the devices slower.
    """
    return None if hardware.shared_cores is None else max(1.0, hardware.shared_cores / devices)


def _slower(link: Link, turns: float) -> Link:
    return Link(link.latency_s * turns, link.bytes_per_s / turns)
