"""A real SLURM on one host: slurmctld, four slurmd, and on request MariaDB and slurmdbd; no
systemd.

Each node is in a network and UTS namespace of its own, which only root can make, so torchrun
crosses a network and a node can be killed. Where cgroup v1 is mounted for writing, processes are
tracked and memory is enforced with it, as production clusters do: signals then reach the task
process alone.

    python -m tests.cluster.rig start [--accounting]     prints what to export
    python -m tests.cluster.rig stop

One cluster at a time: two test runs exclude each other, but one that was started by hand is
replaced.
"""

from __future__ import annotations

import argparse
import fcntl
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

TEMPLATES = Path(__file__).parent / "config"
PATHS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "srun")
PACKAGES = "slurm-wlm slurmctld slurmd slurm-client munge iproute2"
ACCOUNTING_PACKAGES = "slurmdbd slurm-wlm-mysql-plugin mariadb-server"
NODES = 4
CPUS = 8
MEMORY_MB = 8000
GPUS = 2
START_S = 300  # a quiet machine needs a few
BRIDGE = "br-cellmill"
NETWORK = "10.251.0"
MARK = "# cellmill test cluster"
CONTROLLER = f"{NETWORK}.1"


class RigError(Exception):
    """The rig did not start; the message has the log."""


def missing(accounting: bool = False) -> str | None:
    """Reason why no rig can be started here, with the packages to install; None if it can."""
    for command in COMMANDS + (("slurmdbd", "mariadbd") if accounting else ()):
        if shutil.which(command, path=PATHS) is None:
            packages = f"{PACKAGES} {ACCOUNTING_PACKAGES}" if accounting else PACKAGES
            return (
                f"{command} is not installed (apt-get install --no-install-recommends {packages})"
            )
    bridge = "ip link add cm-try type bridge && ip link add cm-a type veth peer name cm-b"
    script = f"{bridge} && ip link set cm-a master cm-try && mount -t tmpfs x /mnt"
    words = ["unshare", "--net", "--uts", "--mount", "sh", "-c", script]
    if (
        os.getuid() != 0
        or subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL).returncode
    ):
        return "it needs root, and the right to make network namespaces and to mount file systems"
    return None


class Rig:
    """One cluster at a time: node1 and node2 with gpu-a100, node3 and node4 with gpu-h100, all of
    them in cpu.

    `small` is a file system of 2 MB that every node sees.
    """

    def __init__(
        self,
        folder: Path = Path("/var/tmp/cellmill-test-cluster"),
        accounting: bool = False,
        users: tuple[str, ...] = (),
    ) -> None:
        """`users` may submit jobs, as root may."""
        self.folder = folder
        self.accounting = accounting
        self._users = users
        self._lock: TextIO | None = None
        self.cgroups = all(
            os.access(f"/sys/fs/cgroup/{name}/tasks", os.W_OK) for name in ("freezer", "memory")
        )
        self.small = folder / "small"
        self.config = folder / "etc" / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self.config)}

    def start(self) -> Rig:
        """Start everything and wait until all nodes are idle. Raises RigError, also if another test
        run has a rig.
        """
        self._own()
        self._clear()
        for name in ("etc", "state", "spool", "log", "dev", "small"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        call("mount", "-t", "tmpfs", "-o", "size=2m,mode=777", "tmpfs", str(self.small))
        self._write_config()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {
            "socket": "munge.socket",
            "key-file": key.name,
            "pid-file": "munged.pid",
            "seed-file": "munge.seed",
        }
        options = [
            f"--{name}={self.folder}/{file}"
            for name, file in (files | {"log-file": "log/munged.log"}).items()
        ]
        call("munged", "--force", *options, "--num-threads=2")
        self._network()
        if self.accounting:
            self._database()
        self.start_controller()
        for number in range(1, NODES + 1):
            self.start_node(f"node{number}", wait=False)
        self._until(lambda: self._idle() == NODES, "nodes are not idle", "slurmctld")
        return self

    def stop(self) -> None:
        """End everything that `start` started, also of a rig left behind, and remove every trace of
        it.
        """
        self._clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _clear(self) -> None:
        if (self.folder / "munged.pid").exists() and self.config.exists():
            # all jobs: root may
            subprocess.run(
                ["scancel", "--state=PENDING"], env=self._env(), capture_output=True, timeout=20
            )
            subprocess.run(
                ["scancel", "--state=RUNNING"], env=self._env(), capture_output=True, timeout=20
            )
            wait(lambda: not self.squeue(), 5)
        for pattern in (
            "slurmd-*.pid",
            "slurmctld.pid",
            "slurmdbd.pid",
            "mysql/mariadbd.pid",
            "munged.pid",
        ):
            end(self.folder.glob(pattern))
        for number in range(1, NODES + 1):
            for pid in self._pids_in(f"node{number}"):
                os.kill(pid, signal.SIGKILL)
            if Path(f"/run/netns/{namespace(f'node{number}')}").exists():
                call("ip", "netns", "del", namespace(f"node{number}"))
        if Path(f"/sys/class/net/{BRIDGE}").exists():
            call("ip", "link", "del", BRIDGE)
        if self.cgroups:
            for path in sorted(Path("/sys/fs/cgroup").glob("*/slurm*/**/"), reverse=True):
                if path.is_dir():
                    subprocess.run(["rmdir", str(path)], capture_output=True)
        for name in ("slurm.conf", "gres.conf", "cgroup.conf"):
            link = Path("/etc/slurm") / name
            if link.is_symlink() and str(self.folder) in os.readlink(link):
                link.unlink()
        hosts = Path("/etc/hosts")
        if MARK in hosts.read_text():
            hosts.write_text(
                "".join(line for line in hosts.read_text().splitlines(True) if MARK not in line)
            )
        if os.path.ismount(self.small):
            call("umount", "-l", str(self.small))
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, *command: str, check: bool = True) -> str:
        """Output of a SLURM command."""
        done = subprocess.run(command, env=self._env(), capture_output=True, text=True, timeout=300)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def squeue(self) -> list[str]:
        """A line for each job in the queue: id, state, name."""
        return self.call("squeue", "-h", "-o", "%i %T %j", check=False).splitlines()

    def node_state(self, node: str) -> str:
        """State of a node by sinfo."""
        return self.call("sinfo", "-h", "-n", node, "-p", "cpu", "-o", "%T").strip()

    def kill_node(self, node: str) -> None:
        """Kill every process on a node, slurmd included, and tell the controller, which would take
        half a minute to notice.
        """
        for pid in self._pids_in(node):
            os.kill(pid, signal.SIGKILL)
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def start_node(self, node: str, wait: bool = True) -> None:
        """Start a node's slurmd, and wait until it answers."""
        slurmd = f"exec slurmd -N {node} -f {self.config}"
        # not `ip netns exec`: that mounts /sys anew, and slurmd needs /sys/fs/cgroup
        script = f"mount --bind '{self.folder}/etc/hosts' /etc/hosts && hostname {node} && {slurmd}"
        call(*inside(node), "unshare", "--uts", "--mount", "bash", "-c", script, env=self._env())
        if wait:
            self._until(
                lambda: self.node_state(node) in ("idle", "mixed", "allocated"),
                f"{node} is not up",
                "slurmctld",
            )

    def stop_slurmd(self, node: str) -> None:
        """Suspend a node's slurmd: the controller loses the node, whose jobs run on."""
        os.kill(self._slurmd(node), signal.SIGSTOP)

    def continue_slurmd(self, node: str) -> None:
        os.kill(self._slurmd(node), signal.SIGCONT)

    def hide_folder(self, node: str, folder: Path) -> None:
        """Show jobs of a node an empty folder, as where a file system is not mounted."""
        call(*self._in_mounts(node), "mount", "-t", "tmpfs", "tmpfs", str(folder))

    def show_folder(self, node: str, folder: Path) -> None:
        call(*self._in_mounts(node), "umount", str(folder))

    def _slurmd(self, node: str) -> int:
        return int((self.folder / f"slurmd-{node}.pid").read_text())

    def _in_mounts(self, node: str) -> list[str]:
        return ["nsenter", f"--target={self._slurmd(node)}", "--mount"]

    def start_controller(self) -> None:
        call("slurmctld", "-f", str(self.config), env=self._env())

    def stop_controller(self) -> None:
        end([self.folder / "slurmctld.pid"])

    def _own(self) -> None:
        """Lock out other test runs, which would end this one's cluster; the lock is released with
        the process.
        """
        if self._lock is None:
            self._lock = open(f"{self.folder}.lock", "w")  # noqa: SIM115
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RigError(
                    f"another test run uses the cluster in {self.folder}; one at a time"
                ) from None

    def _idle(self) -> int:
        return (
            self.call("sinfo", "-h", "-N", "-p", "cpu", "-o", "%T", check=False)
            .split()
            .count("idle")
        )

    def _env(self) -> dict[str, str]:
        return os.environ | self.environment | {"PATH": PATHS}

    def _until(self, condition: Callable[[], bool], what: str, log: str) -> None:
        if not wait(condition, START_S):
            text = (self.folder / "log" / f"{log}.log").read_text(errors="replace")[-2000:]
            raise RigError(f"{what} after {START_S} s; the end of {log}.log:\n{text}")

    def _address(self, number: int) -> str:
        return f"{NETWORK}.{10 + number}"

    def _write_config(self) -> None:
        host = socket.gethostname()
        nodes = []
        for number in range(1, NODES + 1):
            kind = "a100" if number < 3 else "h100"
            nodes.append(
                f"NodeName=node{number} NodeHostname=node{number} NodeAddr={self._address(number)} CPUs={CPUS} "
                f"RealMemory={MEMORY_MB} Gres=gpu:{kind}:{GPUS} Feature={kind} State=UNKNOWN"
            )
        for number in range(GPUS):
            file = self.folder / "dev" / f"nvidia{number}"
            # a device must be a character device where a container lets us make one
            if subprocess.run(
                ["mknod", str(file), "c", "195", str(number)], capture_output=True
            ).returncode:
                file.touch()
        values = {
            "FOLDER": str(self.folder),
            "USER": getpass.getuser(),
            "HOST": host,
            "ADDRESS": CONTROLLER,
            "NODES": "\n".join(nodes),
            "TRACK": "cgroup" if self.cgroups else "linuxproc",
            "TASK": "cgroup" if self.cgroups else "none",
            "ACCOUNTING": self._accounting_lines(),
        }
        names = [
            "slurm.conf",
            "gres.conf",
            "cgroup.conf",
            *(["slurmdbd.conf"] if self.accounting else []),
        ]
        for name in names:
            text = (TEMPLATES / name).read_text()
            text = re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], text)
            (self.folder / "etc" / name).write_text(text)
            (self.folder / "etc" / name).chmod(0o600 if name == "slurmdbd.conf" else 0o644)
        # the executor plugin's jobs forget SLURM_CONF, and find the cluster at the usual place
        Path("/etc/slurm").mkdir(exist_ok=True)
        for name in ("slurm.conf", "gres.conf", "cgroup.conf"):
            link = Path("/etc/slurm") / name
            if link.exists() and not link.is_symlink():
                raise RigError(f"{link} is there already: a real cluster's?")
            link.unlink(missing_ok=True)
            link.symlink_to(self.folder / "etc" / name)
        lines = [
            f"{CONTROLLER} {host}",
            *(f"{self._address(n)} node{n}" for n in range(1, NODES + 1)),
        ]
        (self.folder / "etc" / "hosts").write_text(
            "\n".join(["127.0.0.1 localhost", *lines]) + "\n"
        )
        with open("/etc/hosts", "a") as hosts:
            hosts.writelines(f"{line} {MARK}\n" for line in lines)

    def _accounting_lines(self) -> str:
        if not self.accounting:
            return "AccountingStorageType=accounting_storage/none"
        return (
            f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost={CONTROLLER}\n"
            f"AccountingStoragePort=16829\nAccountingStoragePass={self.folder}/munge.socket\n"
            "AccountingStorageTRES=gres/gpu"
        )

    def _network(self) -> None:
        call("ip", "link", "add", BRIDGE, "type", "bridge")
        call("ip", "addr", "add", f"{CONTROLLER}/24", "dev", BRIDGE)
        call("ip", "link", "set", BRIDGE, "up")
        for number in range(1, NODES + 1):
            space = namespace(f"node{number}")
            outside = f"vcm{number}"
            call("ip", "netns", "add", space)
            call(
                "ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space
            )
            call("ip", "link", "set", outside, "master", BRIDGE, "up")
            call("ip", "-n", space, "addr", "add", f"{self._address(number)}/24", "dev", "eth0")
            call("ip", "-n", space, "link", "set", "eth0", "up")
            call("ip", "-n", space, "link", "set", "lo", "up")

    def _database(self) -> None:
        data = self.folder / "mysql"
        data.mkdir()
        shutil.chown(data, "mysql")
        connect = ["mariadb", "-S", f"{data}/s.sock"]
        call(
            *(
                "mariadb-install-db",
                "--user=mysql",
                f"--datadir={data}",
                "--auth-root-authentication-method=socket",
            ),
            *("--skip-test-db",),
        )
        with open(self.folder / "log" / "mariadbd.log", "w") as log:
            subprocess.Popen(
                [
                    *(
                        "mariadbd",
                        "--no-defaults",
                        "--user=mysql",
                        f"--datadir={data}",
                        f"--socket={data}/s.sock",
                    ),
                    *(
                        f"--pid-file={data}/mariadbd.pid",
                        "--port=13316",
                        f"--bind-address={CONTROLLER}",
                    ),
                    *("--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M"),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self._env(),
            )
        up = ["mariadb-admin", "-S", f"{data}/s.sock", "ping"]
        self._until(
            lambda: subprocess.run(up, capture_output=True).returncode == 0,
            "no database",
            "mariadbd",
        )
        call(
            *connect,
            "-e",
            "create user slurm@'%' identified by 'slurm'; grant all on slurm_acct.* to slurm@'%';",
        )
        call("slurmdbd", env=self._env())
        listed = ["sacctmgr", "-n", "list", "cluster"]
        self._until(
            lambda: subprocess.run(listed, env=self._env(), capture_output=True).returncode == 0,
            "slurmdbd does not answer",
            "slurmdbd",
        )
        for words in (
            ["add", "cluster", "cellmill"],
            ["add", "account", "lab", "Description=lab", "Organization=lab"],
            *(["add", "user", user, "Account=lab"] for user in (getpass.getuser(), *self._users)),
        ):
            subprocess.run(
                ["sacctmgr", "-i", *words], env=self._env(), capture_output=True, timeout=300
            )

    def _pids_in(self, node: str) -> list[int]:
        if not Path(f"/run/netns/{namespace(node)}").exists():
            return []
        listed = subprocess.run(
            ["ip", "netns", "pids", namespace(node)], capture_output=True, text=True
        )
        return [int(pid) for pid in listed.stdout.split()]


def inside(node: str) -> list[str]:
    """Start of a command that runs in the network of a node."""
    return ["nsenter", f"--net=/run/netns/{namespace(node)}"]


def namespace(node: str) -> str:
    return f"cm-{node}"


def call(*command: str, env: dict[str, str] | None = None) -> None:
    """Run a command. Raises RigError with its output."""
    env = env or os.environ | {"PATH": PATHS}
    done = subprocess.run(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RigError(f"{' '.join(command)}: {done.stdout.strip()}")


def wait(condition: Callable[[], bool], within_s: float) -> bool:
    """Wait for `condition`; return False if it did not hold in time."""
    give_up = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.1)
    return True


def end(pid_files: object) -> None:
    """TERM, then after 30 s KILL, for the processes of these pid files."""
    pids = []
    for file in pid_files:  # type: ignore[attr-defined]
        if file.exists() and file.read_text().strip().isdigit():
            pids.append(int(file.read_text()))
    for number, within_s in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 30.0)):
        for pid in filter(living, pids):
            os.kill(pid, number)
        if wait(lambda: not any(map(living, pids)), within_s):
            return


def living(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.rig", description=__doc__)
    parser.add_argument("what", choices=["start", "stop"])
    parser.add_argument("--accounting", action="store_true")
    arguments = parser.parse_args()
    rig = Rig(accounting=arguments.accounting)
    if arguments.what == "stop":
        rig.stop()
        return
    why = missing(arguments.accounting)
    if why is not None:
        sys.exit(why)
    rig.start()
    print("".join(f"export {name}={value}\n" for name, value in rig.environment.items()), end="")


if __name__ == "__main__":
    main()
