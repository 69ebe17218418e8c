"""A real Slurm on this machine, for tests and for trying things by hand.

    python tests/slurm/cluster.py install [--accounting]
    python tests/slurm/cluster.py up [--hosts 4] [--rate 1gbit] [--accounting] | status | down

Every host is a network namespace with an address on the cluster's bridge, a host name, a hosts
file and a slurmd. slurmctld runs in one more namespace, `login`. Jobs run as root and see this
machine's files, as on a site whose home folders are shared.

No daemon runs outside these namespaces, and nothing is written outside one temporary folder. To
remove a cluster, kill the processes in its namespaces and delete its folder. A file in RUNTIME
names both, so that its watcher or the next start can find the cluster of a crashed owner.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from string import Template

from machine import SYSTEM, ClusterError, Process, empty, pids, run, succeeds, wait

RUNTIME = Path("/run/hpc_parallel_slurm")
HERE = Path(__file__).resolve().parent
LOGIN = "login"
MAX_HOSTS = 250
GPUS_PER_HOST = 4

# Where Slurm's plugin for `srun --mpi=pmix` opens libpmix.so, which only Debian's libpmix-dev has.
PMIX = next(Path("/usr/lib").glob("*/pmix2/lib"), None)

PACKAGE_OF = {"slurmctld": "slurm-wlm", "munged": "munge", "ip": "iproute2"}
TOOL_PACKAGE_OF = {"shellcheck": "shellcheck", "mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich"}
ACCOUNTING_PACKAGE_OF = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}


class Cluster:
    """A cluster on this machine. Use it in a `with` statement to stop it at the end of the block."""

    def __init__(self, number: int, folder: Path, host_count: int, owner: Process | None) -> None:
        self.number = number
        self.folder = folder
        self.owner = owner  # None: started by hand, runs until `down`
        self.hosts = {f"n{index}": self._address(index) for index in range(1, host_count + 1)}
        self.environment = {"SLURM_CONF": str(folder / "etc/slurm.conf")}
        self._namespaces = {host: folder / "net" / host for host in (LOGIN, *self.hosts)}
        self._record = RUNTIME / f"{number}.json"
        self.bridge = f"hpc{number}"
        self._watcher: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, *, hosts: int = 4, accounting: bool = False, owned: bool = True) -> Cluster:
        """Start a cluster and return once all its hosts are idle.

        An owned cluster ends when the calling process ends, in any way.
        Raises ClusterError if a cluster can't run here or does not start.
        """
        if reason := unavailable_reason(accounting=accounting):
            raise ClusterError(reason)
        if not 1 <= hosts <= MAX_HOSTS:
            raise ClusterError(f"hosts = {hosts} is not between 1 and {MAX_HOSTS}.")
        reap()
        cluster = cls._reserve(hosts, Process.current() if owned else None)
        try:
            if owned:
                cluster._watch()
            cluster._build(accounting=accounting)
        except BaseException as error:
            logs = cluster._last_lines()
            cluster.stop()
            if isinstance(error, ClusterError):
                raise ClusterError(f"{error}\n{logs}") from None
            raise
        return cluster

    def stop(self) -> None:
        """Remove all processes, mounts, links, files and the record; the cluster may be half built."""
        with _lock():
            if self.recorded():
                for host, namespace in self._namespaces.items():
                    if namespace.exists():
                        empty(namespace)
                        succeeds("umount", str(namespace))
                    succeeds("ip", "link", "delete", self._cable(host))
                succeeds("ip", "link", "delete", self.bridge)
                if self.folder.exists():
                    shutil.rmtree(self.folder)
                self._record.unlink()
        if self._watcher:
            self._watcher.terminate()
            self._watcher.wait()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def recorded(self) -> bool:
        """Whether this cluster still exists, and not a later one with the same number."""
        with suppress(FileNotFoundError):
            return Cluster._read(self._record).folder == self.folder
        return False

    def run(self, *command: str, host: str | None = None) -> str:
        """Run a command with this cluster's environment, here or on a host's network; returns its output."""
        return run(*self.on(host, *command), environment=self.environment)

    def job(self, job_id: str) -> dict[str, str]:
        """Slurm's own words on a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def on(self, host: str | None, *command: str) -> list[str]:
        """The command that runs `command` on a host's network, or here if there is no host."""
        return ["nsenter", f"--net={self._namespaces[host]}", *command] if host else list(command)

    def pids(self, host: str) -> list[int]:
        """The processes on a host: slurmd, and the steps and tasks of its jobs."""
        return pids(self._namespaces[host])

    def kill(self, host: str) -> None:
        """Kill all processes of a host, like a power failure; `boot` starts it again."""
        empty(self._namespaces[host])

    def boot(self, host: str) -> None:
        """Start a host's slurmd; a lost host becomes usable again."""
        self._daemon(host, "slurmd", "-N", host)

    def cut(self, host: str) -> None:
        """Disconnect a host's network without notice to either side; `mend` connects it again."""
        self.run("ip", "link", "set", "fabric0", "down", host=host)

    def mend(self, host: str) -> None:
        self.run("ip", "link", "set", "fabric0", "up", host=host)

    def shape(self, rate: str, *hosts: str, burst: str = "1m") -> None:
        """Limit the links of these hosts (none: of all) to this rate (`1gbit`) in both directions.

        burst: the bytes that pass faster than the rate after a pause. `unshape` removes the limits of all
        hosts, which must all have one.
        """
        for host in hosts or self.hosts:
            self._queue(host, "replace", "tbf", "rate", rate, "burst", burst, "latency", "50ms")

    def unshape(self) -> None:
        for host in self.hosts:
            self._queue(host, "delete")

    def _queue(self, host: str, verb: str, *discipline: str) -> None:
        """Change the queueing discipline at both ends of a host's link; each end limits what it sends."""
        self.run("tc", "qdisc", verb, "dev", "fabric0", "root", *discipline, host=host)
        self.run("tc", "qdisc", verb, "dev", self._cable(host), "root", *discipline)

    def restart_controller(self) -> None:
        """Restart slurmctld; returns when it answers."""
        pid = int((self.folder / "slurmctld.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        wait(lambda: not Path(f"/proc/{pid}").exists(), what="slurmctld has ended")
        self._daemon(LOGIN, "slurmctld")
        wait(lambda: succeeds("scontrol", "ping", environment=self.environment), what="slurmctld answers")

    def set_patience(self, seconds: int) -> None:
        """Set how long a host may not respond before Slurm marks it down (SlurmdTimeout)."""
        path = self.folder / "etc/slurm.conf"
        path.write_text(re.sub(r"(?m)^SlurmdTimeout=.*$", f"SlurmdTimeout={seconds}", path.read_text()))
        self.run("scontrol", "reconfigure")

    def usage(self) -> str:
        hosts = " ".join(f"{host}={address}" for host, address in self.hosts.items())
        exports = [f"export {name}={value}" for name, value in self.environment.items()]
        train = "python -m hpc_parallel.run strategy=data nodes=2 gpus_per_node=2"
        return "\n".join([f"# {hosts}; partitions main and urgent", *exports, "sinfo", train])

    @classmethod
    def _reserve(cls, hosts: int, owner: Process | None) -> Cluster:
        with _lock():
            for number in range(256):
                in_use = (RUNTIME / f"{number}.json").exists()
                if not in_use and not run("ip", "route", "show", "root", f"10.77.{number}.0/24"):
                    folder = Path(tempfile.mkdtemp(prefix="hpc_parallel_slurm_"))
                    cluster = cls(number, folder, hosts, owner)
                    cluster._write()
                    return cluster
        raise ClusterError("Every network from 10.77.0.0/24 to 10.77.255.0/24 is in use here.")

    def _write(self) -> None:
        owner = asdict(self.owner) if self.owner else None
        value = {"folder": str(self.folder), "hosts": list(self.hosts), "owner": owner}
        draft = self._record.with_suffix(".draft")
        draft.write_text(json.dumps(value))
        draft.rename(self._record)

    @classmethod
    def _read(cls, record: Path) -> Cluster:
        value = json.loads(record.read_text())
        owner = Process(**value["owner"]) if value["owner"] else None
        return cls(int(record.stem), Path(value["folder"]), len(value["hosts"]), owner)

    def _watch(self) -> None:
        null = subprocess.DEVNULL
        command = [sys.executable, str(HERE / "cluster.py"), "watch", str(self._record)]
        # In a new session, a signal that kills the owner's process group does not reach the watcher.
        self._watcher = subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, cwd="/", start_new_session=True
        )

    def _build(self, *, accounting: bool) -> None:
        self._write_files(accounting=accounting)
        self._lay_cables()
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        paths = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        # --force: munged refuses folders below a world-writable one, such as /tmp.
        self._daemon(LOGIN, "munged", "--force", f"--log-file={self.folder}/logs/munged.log", *paths)
        if accounting:
            self._start_accounting()
        self._daemon(LOGIN, "slurmctld")
        for host in self.hosts:
            self.boot(host)
        idle = {f"{host} idle" for host in self.hosts}
        listing = ("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T")
        wait(lambda: set(self.run(*listing).splitlines()) == idle, what="all hosts are idle")

    def _write_files(self, *, accounting: bool) -> None:
        folder = self.folder
        for name in ("etc", "net", "dev", "state", "logs", *(f"spool/{host}" for host in self.hosts)):
            (folder / name).mkdir(parents=True)
        for gpu in range(GPUS_PER_HOST):  # any character device works: Slurm only checks that it exists
            os.mknod(folder / f"dev/gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        _write_private(folder / "munge.key", os.urandom(128))
        if PMIX is not None:
            shutil.copytree(PMIX, folder / "pmix", symlinks=True)
            if not (folder / "pmix/libpmix.so").exists():
                (folder / "pmix/libpmix.so").symlink_to("libpmix.so.2")

        nodes = "\n".join(f"NodeName={host} NodeAddr={address}" for host, address in self.hosts.items())
        values = {"number": self.number, "folder": folder, "controller": self._address(254)}

        def filled(name: str) -> str:
            template = Template((HERE / f"{name}.template").read_text())
            return template.substitute(values, nodes=nodes, gpus=GPUS_PER_HOST)

        settings = filled("slurm.conf") + (filled("accounting.conf") if accounting else "")
        (folder / "etc/slurm.conf").write_text(settings)
        (folder / "etc/gres.conf").write_text(f"Name=gpu File={folder}/dev/gpu[0-{GPUS_PER_HOST - 1}]\n")
        _write_private(folder / "etc/slurmdbd.conf", filled("slurmdbd.conf").encode())

        submit_host = {os.uname().nodename: self._address(253)}  # jobs may look up the submitting host
        names = submit_host | self.hosts | {LOGIN: self._address(254), "localhost": "127.0.0.1"}
        lines = [f"{address} {name}\n" for name, address in names.items()]
        (folder / "hosts").write_text("".join(lines))

    def _lay_cables(self) -> None:
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "address", "add", f"{self._address(253)}/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for host, address in {**self.hosts, LOGIN: self._address(254)}.items():
            namespace, cable = self._namespaces[host], self._cable(host)
            namespace.touch()
            run("unshare", f"--net={namespace}", "true")
            far_end = ("peer", "name", "fabric0", "netns", str(namespace))
            run("ip", "link", "add", cable, "type", "veth", *far_end)
            run("ip", "link", "set", cable, "master", self.bridge, "up")
            self.run("ip", "address", "add", f"{address}/24", "dev", "fabric0", host=host)
            self.run("ip", "link", "set", "fabric0", "up", host=host)
            self.run("ip", "link", "set", "lo", "up", host=host)

    def _start_accounting(self) -> None:
        options = ("--no-defaults", "--user=root", f"--datadir={self.folder}/mariadb")
        # Inside the namespace, so that it ends with the cluster.
        self.run("mariadb-install-db", *options, "--auth-root-authentication-method=normal", host=LOGIN)
        socket = f"--socket={self.folder}/mariadb.socket"
        log = f"--log-error={self.folder}/logs/mariadb.log"
        # Each namespace has its own 127.0.0.1, so any number of databases can use one port.
        server = ("mariadbd", *options, socket, log, "--bind-address=127.0.0.1")
        self._daemon(LOGIN, "setsid", "--fork", *server)
        ping = ("mariadb-admin", "--no-defaults", socket, "ping")
        wait(lambda: succeeds(*ping), what="MariaDB answers")
        self._daemon(LOGIN, "slurmdbd")
        # slurmctld does not retry if the database does not answer at its first start.
        query = ("nsenter", f"--net={self._namespaces[LOGIN]}", "sacctmgr", "list", "cluster")
        wait(lambda: succeeds(*query, environment=self.environment), what="slurmdbd answers")

    def _daemon(self, host: str, *command: str) -> None:
        """Start a daemon on a host, with the host's name, its hosts file, and libpmix.so if there is one."""
        mounts = [str(self.folder / "hosts"), "/etc/hosts"]
        if PMIX is not None:
            mounts += [str(self.folder / "pmix"), str(PMIX)]
        # `ip netns exec` would remount /sys, and slurmd then finds no cgroup file system.
        mounting = 'until [ "$1" = -- ]; do mount --bind "$1" "$2"; shift 2; done'
        script = f'hostname "$1"; shift; {mounting}; shift; exec "$@"'
        names = ("unshare", "--uts", "--mount", "sh", "-ec", script, "sh", host, *mounts, "--")
        self.run(*names, *command, host=host)

    def _address(self, index: int) -> str:
        return f"10.77.{self.number}.{index}"

    def _cable(self, host: str) -> str:
        """This machine's end of the host's link; Linux allows 15 characters."""
        return f"{self.bridge}-{host}"

    def _last_lines(self) -> str:
        logs = sorted((self.folder / "logs").glob("*"))
        tails = [(log.name, log.read_text(errors="replace").splitlines()[-5:]) for log in logs]
        return "\n".join(f"{name}: {line}" for name, lines in tails for line in lines)


def unavailable_reason(*, accounting: bool = False) -> str | None:
    """Why a cluster can't run here, in one line, or None."""
    if sys.platform != "linux":
        return "A Slurm cluster needs Linux: its hosts are network namespaces."
    if os.geteuid() != 0:
        return "A Slurm cluster needs root, to make network namespaces."
    if missing := _missing_packages(accounting):
        option = " --accounting" if accounting else ""
        return f"A Slurm cluster needs {', '.join(missing)}. Try: python {__file__} install{option}"
    links = "ip link add bridge0 type bridge && ip link add fabric0 type veth peer name fabric1"
    if not succeeds("unshare", "--net", "--uts", "--mount", "sh", "-c", links):
        return "A Slurm cluster needs permission to make namespaces and links (a privileged container)."
    return None


def install(*, accounting: bool) -> None:
    """Install what is missing, and the tools of some tests, as root on Debian or Ubuntu."""
    missing = [*_missing_packages(accounting), *_without_program(TOOL_PACKAGE_OF)]
    if missing and (os.geteuid() != 0 or not shutil.which("apt-get")):
        raise ClusterError(f"Only root on Debian or Ubuntu can install {', '.join(missing)} this way.")
    if missing:
        # RUNLEVEL=1: the packages must not start their system-wide daemons.
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        run("apt-get", "-qq", "update", environment=environment)
        options = ("-qq", "--no-install-recommends", "install")
        run("apt-get", *options, *missing, environment=environment)


def clusters() -> list[Cluster]:
    """Every cluster on this machine."""
    with _lock():
        return [Cluster._read(record) for record in sorted(RUNTIME.glob("*.json"))]


def started_by_hand() -> list[Cluster]:
    return [cluster for cluster in clusters() if not cluster.owner]


def reap() -> None:
    """Stop the clusters whose owner is gone."""
    for cluster in clusters():
        if cluster.owner and not cluster.owner.alive():
            cluster.stop()


def watch(cluster: Cluster) -> None:
    """Wait until the cluster's owner has ended, then stop the cluster."""
    while cluster.owner and cluster.owner.alive():
        time.sleep(0.2)
    cluster.stop()


@contextmanager
def _lock() -> Iterator[None]:
    """A lock between processes, so that no number is used twice and no cluster is stopped twice."""
    RUNTIME.mkdir(mode=0o700, exist_ok=True)
    handle = os.open(RUNTIME, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _missing_packages(accounting: bool) -> list[str]:
    return _without_program(PACKAGE_OF | (ACCOUNTING_PACKAGE_OF if accounting else {}))


def _without_program(package_of: Mapping[str, str]) -> list[str]:
    return [
        package for program, package in package_of.items() if not shutil.which(program, path=SYSTEM["PATH"])
    ]


def _write_private(file: Path, content: bytes) -> None:
    """Write a file that munge and slurmdbd refuse if other users can read it."""
    file.touch(mode=0o600)
    file.write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, purpose in (("install", "install the Debian packages"), ("up", "start a cluster")):
        command = verbs.add_parser(verb, help=purpose)
        command.add_argument("--accounting", action="store_true", help="with slurmdbd, for sacct")
        if verb == "up":
            command.add_argument("--hosts", type=int, default=4)
            command.add_argument("--rate", help="of the hosts' links: 1gbit (default: as fast as they go)")
    verbs.add_parser("down", help="stop what `up` started")
    verbs.add_parser("status", help="show the clusters on this machine")
    verbs.add_parser("watch").add_argument("record", type=Path)
    chosen = parser.parse_args()
    match chosen.verb:
        case "install":
            install(accounting=chosen.accounting)
        case "up":
            reap()
            running = started_by_hand()
            if not running:
                running = [Cluster.start(hosts=chosen.hosts, accounting=chosen.accounting, owned=False)]
            if chosen.rate:
                running[0].shape(chosen.rate)
            print(running[0].usage())
        case "down":
            reap()
            for cluster in started_by_hand():
                cluster.stop()
        case "status":
            for cluster in clusters():
                holder = f"owned by process {cluster.owner.pid}" if cluster.owner else "started by hand"
                print(f"# {holder}, {cluster.folder}\n{cluster.run('sinfo')}")
        case "watch":
            watch(Cluster._read(chosen.record))


if __name__ == "__main__":
    try:
        main()
    except ClusterError as problem:
        sys.exit(str(problem))
