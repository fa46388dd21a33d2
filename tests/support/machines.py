"""Machines of a test: namespaces of Linux, each with a name, an address and processes of its own.

They are joined by a bridge in one more, the head, where launchers run. What stands for `ssh` enters
a machine; as over ssh, nothing of the environment goes along. A machine is there as long as a
process that waits for its standard input, so that nothing is left of it when the test is killed.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.rank_jobs import MARK, ROOT, launcher

INTERFACE = "sok0"
_TOOLS = ("ip", "nsenter", "unshare")
_HEAD = ("--net", "--uts", "--mount")
_OWN = (*_HEAD, "--pid")

_SSH = """#!/bin/sh
# ssh [-o X] [-x] host [-o X] command...: runs it on that machine.
host=
while [ $# -gt 0 ]; do
  case "$1" in
    -o | -p | -i) shift 2 ;;
    -*) shift ;;
    *) [ -n "$host" ] && break; host=$1; shift ;;
  esac
done
case "$host" in
{cases}
  *) echo "no machine $host" >&2; exit 255 ;;
esac
exec nsenter --target "$process" {own} \\
  env -i PATH="$PATH" HOME="$HOME" TMPDIR="{folder}/$host" {mark}="${mark}" sh -c "$*"
"""


class Machine(NamedTuple):
    """One machine.

    Attributes:
      name: what `hostname` says there.
      address: of its interface.
      holder: the process with whose end it ends.
      process: the first one inside, as seen from outside.
    """

    name: str
    address: str
    holder: subprocess.Popen
    process: int

    def ip(self, *arguments: str) -> None:
        """Runs `ip` in the network of the machine."""
        _run("nsenter", "--target", str(self.process), "--net", "ip", *arguments)


@contextlib.contextmanager
def machines(number: int, folder: Path) -> Iterator[tuple[Machine, list[Machine]]]:
    """Gives the head and that many machines."""
    names = folder / "hosts"
    lines = [f"{_address(i)} {_name(i)}" for i in range(number + 1)]
    names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    with contextlib.ExitStack() as all_of_them:
        # Processes of the head are those of the test: what stands for ssh finds the others.
        head = all_of_them.enter_context(_machine(0, names, _HEAD))
        head.ip("link", "add", INTERFACE, "type", "bridge")
        head.ip("addr", "add", f"{head.address}/24", "dev", INTERFACE)
        head.ip("link", "set", INTERFACE, "up")
        found = []
        for i in range(1, number + 1):
            machine = all_of_them.enter_context(_machine(i, names, _OWN))
            cable = ("peer", "name", INTERFACE, "netns", str(machine.process))
            head.ip("link", "add", f"port{i}", "type", "veth", *cable)
            head.ip("link", "set", f"port{i}", "master", INTERFACE, "up")
            machine.ip("addr", "add", f"{machine.address}/24", "dev", INTERFACE)
            machine.ip("link", "set", INTERFACE, "up")
            found.append(machine)
        yield head, found


def unavailable() -> str | None:
    """Returns why there can be no machines here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "machines made of namespaces need Linux, and root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"machines made of namespaces need {', '.join(missing)} (iproute2, util-linux)"
    try:
        with _machine(1, Path("/etc/hosts"), _OWN) as trial:
            trial.ip("link", "add", "trial0", "type", "bridge")
            trial.ip("link", "add", "trial1", "type", "veth", "peer", "name", "trial2")
    except (subprocess.CalledProcessError, OSError) as error:
        return f"no namespaces here: {getattr(error, 'stderr', None) or error}"
    return None


def launch(
    tool: str, head: Machine, hosts: Sequence[Machine], ranks: int, folder: Path
) -> list[str]:
    """Returns the command that starts a program on `ranks` ranks of each machine.

    It needs what `environment_of` sets; `folder` must last as long as the job.
    """
    ssh = _write_ssh(hosts, folder)
    number = str(len(hosts) * ranks)
    slots = ",".join(f"{machine.name}:{ranks}" for machine in hosts)
    enter = ["nsenter", "--target", str(head.process), *_HEAD, f"--wd={ROOT}"]
    if tool == "horovod":
        return [
            *(*enter, "env", f"PATH={ssh.parent}:{os.environ['PATH']}"),
            *(launcher(tool), "-np", number, "-H", slots),
            *("--gloo", "--disable-cache", "--network-interfaces", INTERFACE),
        ]
    of_the_launcher = {"plm_ssh_agent": str(ssh), "prte_if_include": INTERFACE}
    of_ranks = {
        "pml": "ob1",
        "btl": "self,sm,tcp",
        "btl_tcp_if_include": INTERFACE,
        "mpi_yield_when_idle": "1",  # there are more ranks than cores
    }
    forwarded = ("PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL", "SOK_LITE_COMM_LOCAL", MARK)
    return [
        *(*enter, launcher(tool), "-np", number, "--host", slots, "--map-by", f"ppr:{ranks}:node"),
        *(word for name, value in of_the_launcher.items() for word in ("--prtemca", name, value)),
        *(word for name, value in of_ranks.items() for word in ("--mca", name, value)),
        *(word for name in forwarded for word in ("-x", name)),
    ]


def _write_ssh(hosts: Sequence[Machine], folder: Path) -> Path:
    """Writes what stands for `ssh`; returns its path, in a folder where there is nothing else."""
    for machine in hosts:
        # Open MPI names files by process, and processes of two machines may have one number.
        (folder / machine.name).mkdir()
    text = _SSH
    for name, value in {
        "cases": "\n".join(f"  {m.name}) process={m.process} ;;" for m in hosts),
        "own": shlex.join(_OWN),
        "folder": str(folder),
        "mark": MARK,
    }.items():
        text = text.replace("{" + name + "}", value)
    path = folder / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o755)
    return path


def _name(number: int) -> str:
    return f"machine{number}" if number else "head"


def _address(number: int) -> str:
    return f"10.77.0.{number or 254}"


@contextlib.contextmanager
def _machine(number: int, names: Path, own: Sequence[str]) -> Iterator[Machine]:
    """Gives a machine that no cable leads to, which knows the names of all."""
    inside = [
        f"hostname {_name(number)}",
        f"mount --bind {shlex.quote(str(names))} /etc/hosts",
        "ip link set lo up",
        "echo ready",
        "read end",
    ]
    new_proc = ["--fork", "--mount-proc"] if "--pid" in own else ["--fork"]
    holder = subprocess.Popen(
        ["unshare", *own, *new_proc, "--kill-child", "sh", "-c", " && ".join(inside)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if holder.stdout.readline().strip() != "ready":
            raise OSError(holder.communicate()[1].strip())
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()
        yield Machine(_name(number), _address(number), holder, int(children))
    finally:
        holder.kill()
        holder.communicate()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
