"""What a machine can do, as tools/scaling_model.py assumes: each number with its source.

Nothing of `H200` has been measured by this project. `A` is the machine of docs/performance.md.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple


class Given(NamedTuple):
    """A number that the model is given.

    Attributes:
      cautious, hopeful: its two ends.
      unit: of both.
      kind: "published", "measured" (by us), "counted" (of our code), "derived" or "assumed".
      source: of both, or why.
    """

    cautious: float
    hopeful: float
    unit: str
    kind: str
    source: str

    def at(self, is_hopeful: bool) -> float:
        """Returns one of the ends."""
        return self.hopeful if is_hopeful else self.cautious


@dataclass(frozen=True)
class Machine:
    """One rank's share of a machine, and how ranks are connected. Links count one direction.

    Attributes:
      name: of the machine.
      ranks_per_node: ranks that share a node.
      accesses: random reads of at most 64 bytes.
      stream: bytes read or written in order.
      host_alone, host: of a step on one rank and on several: launches, waits and Python.
      dense: operations of the dense model.
      framework: of a step, what TensorFlow does around tables and dense layers.
      local_link, network: bytes to ranks of the same node, and of others.
      local_latency, latency: of a trip that stays within the node, and of one that does not.
      peer: of a trip, for each rank that is written to.
      near, far: bytes for tables in the memory that kernels read fastest, and in that behind it.
      far_link: bytes of single rows out of `far` or into it.
    """

    name: str
    ranks_per_node: int
    accesses: Given
    stream: Given
    host_alone: Given
    host: Given
    dense: Given
    framework: Given
    local_link: Given
    network: Given
    local_latency: Given
    latency: Given
    peer: Given
    near: Given
    far: Given
    far_link: Given

    def explain(self) -> str:
        """Returns what is assumed, a line each."""
        lines = [f"{self.name}, {self.ranks_per_node} ranks a node"]
        for field in fields(self):
            given = getattr(self, field.name)
            if isinstance(given, Given):
                ends = f"{given.cautious:.3g} to {given.hopeful:.3g} {given.unit}"
                lines.append(f"  {field.name}: {ends}; {given.kind}: {given.source}")
        return "\n".join(lines)


_LAUNCHES = "tools/count_launches.py, 2026-11-23; 12 us a launch, 18 us a wait by estimate"

H200 = Machine(
    name="nodes of 8 H200 SXM",
    ranks_per_node=8,
    # Hopeful: HierarchicalKV's find* on an H100 NVL, and BGHT's on an A100, scaled by bandwidth.
    # Cautious: so that a step of dynamicemb's takes what it does on an H100, scaled by bandwidth.
    accesses=Given(15e9, 36e9, "1/s", "derived", "published rates of dynamicemb, HKV and BGHT"),
    stream=Given(0.44 * 4.8e12, 0.88 * 4.8e12, "B/s", "published", "4.8 TB/s; shares as above"),
    host_alone=Given(0.00030, 0.00030, "s", "counted", f"22 launches, 2 waits: {_LAUNCHES}"),
    host=Given(0.00072, 0.00072, "s", "counted", f"51 launches, 6 waits: {_LAUNCHES}"),
    # 495 TFLOPS of TF32 without sparsity are published; the layers of click models are small.
    dense=Given(0.1 * 495e12, 0.4 * 495e12, "1/s", "published", "TF32 peak; shares assumed"),
    framework=Given(0.002, 0.0005, "s", "assumed", "a graph of some hundred operations"),
    local_link=Given(0.55 * 450e9, 0.8 * 450e9, "B/s", "published", "NVLink 4; shares assumed"),
    # An all-to-all uses one adapter a GPU: 48 to 49 GB/s of 400 Gb/s (NVIDIA/nccl-tests issue 267);
    # 20 GB/s were seen on 16 nodes of H20 (NVIDIA/nccl issue 1792).
    network=Given(20e9, 48e9, "B/s", "published", "issues of NCCL and its tests; 400 Gb/s a GPU"),
    local_latency=Given(30e-6, 15e-6, "s", "assumed", "a group of sends and receives"),
    latency=Given(60e-6, 25e-6, "s", "assumed", "the same over InfiniBand"),
    peer=Given(2e-6, 0.5e-6, "s", "assumed", "a send and a receive more in a group"),
    near=Given(0.7 * 141e9, 0.85 * 141e9, "B", "published", "141 GB; shares assumed"),
    far=Given(0.6 * 256e9, 0.85 * 256e9, "B", "published", "2 TB a DGX H200; shares assumed"),
    # Peers read rows of pinned host memory at 28 to 30 GB/s; PCIe Gen5 x16 allows 55 to 63.
    far_link=Given(28e9, 55e9, "B/s", "published", "dynamicemb and FBGEMM on H100; PCIe Gen5"),
)

_RUN = "`scripts.bench ranks shares` on machine A, 2026-11-23, busy"

A = Machine(
    name="machine A, a core each rank",
    ranks_per_node=8,
    accesses=Given(0.2e9, 0.2e9, "1/s", "measured", "13 to 16 ns for three lines"),
    stream=Given(4e9, 4e9, "B/s", "measured", f"so that train-8192 on one rank fits, {_RUN}"),
    host_alone=Given(0.0027, 0.0027, "s", "measured", f"train-32, {_RUN}"),
    host=Given(0.0050, 0.0050, "s", "measured", f"train-32 on two ranks, {_RUN}"),
    dense=Given(1e10, 1e10, "1/s", "assumed", "not compared: the tables' part is"),
    framework=Given(0, 0, "s", "assumed", "not compared: the tables' part is"),
    local_link=Given(5e9, 5e9, "B/s", "measured", "8 MB in 1.4 to 1.7 ms, docs/measurements.md"),
    network=Given(1e8, 1e8, "B/s", "assumed", "there is none"),
    local_latency=Given(1e-4, 1e-4, "s", "measured", "1 KB in 0.08 to 0.11 ms"),
    latency=Given(1e-3, 1e-3, "s", "assumed", "there is none"),
    peer=Given(0, 0, "s", "assumed", "in the latency"),
    near=Given(16e9, 16e9, "B", "assumed", "of 24 GB"),
    far=Given(0, 0, "B", "assumed", "no second tier"),
    far_link=Given(1e9, 1e9, "B/s", "assumed", "no second tier"),
)
