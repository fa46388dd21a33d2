"""Records TensorFlow's kernels on a GPU: operations, types, and which arguments are on the host.

The record goes to tests/support/gpu_kernels.json, by which the simulated GPU judges graphs. It has
what all of the given releases have: the oldest and the newest supported. Needs no GPU and no CUDA:
TensorFlow for GPUs is imported for its list of kernels alone. It is in no environment of ours:

  pip install --target /tmp/oldest 'tensorflow==2.16.*'
  pip install --target /tmp/newest 'tensorflow==2.21.*'
  python -m tools.record_gpu_kernels /tmp/oldest /tmp/newest
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests" / "support" / "gpu_kernels.json"

# Types that tables and programs around them use.
TYPES = "bfloat16 bool double float half int8 int16 int32 int64 resource string uint8 uint16 uint32"
TYPES += " uint64 variant"

PROGRAM = """
import json, sys
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework.kernels import get_all_registered_kernels

names = {number: name[3:].lower() for name, number in types_pb2.DataType.items()}
if not tf.test.is_built_with_cuda():
    sys.exit("this TensorFlow is not for GPUs")
kernels = [
    (
        *(each.op, each.device_type, list(each.host_memory_arg)),
        {of.name: [names[kind] for kind in of.allowed_values.list.type] for of in each.constraint},
    )
    for each in get_all_registered_kernels().kernel
    if each.device_type in ("GPU", "DEFAULT") and not each.label
]
print(json.dumps([tf.__version__, kernels]))
"""

# A device's kind ("DEFAULT" is any), arguments in host memory, and types by attributes.
Kernel = tuple[str, tuple[str, ...], tuple[tuple[str, frozenset[str]], ...]]


def kernels_in(folder: str) -> tuple[str, dict[str, set[Kernel]]]:
    """Returns the version of the TensorFlow in a folder, and its kernels by operation."""
    env = {**os.environ, "PYTHONPATH": folder, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-S", "-c", PROGRAM]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, text=True)
    version, kernels = json.loads(done.stdout.splitlines()[-1])
    found = defaultdict(set)
    for name, device, host, types in kernels:
        known = {attr: frozenset(of) & set(TYPES.split()) for attr, of in types.items() if of}
        if all(known.values()):
            found[name].add((device, tuple(sorted(host)), tuple(sorted(known.items()))))
    return version, found


def joined(kernels: set[Kernel]) -> list[dict[str, Any]]:
    """Returns kernels as few as can be: those that differ in one attribute's types are one.

    Those that are a GPU's own come first: TensorFlow takes them before those of any device.
    """
    own_types = {types for device, _, types in kernels if device == "GPU"}
    left = {each for each in kernels if each[0] == "GPU" or each[2] not in own_types}
    for attr in sorted({name for _, _, types in left for name, _ in types}):
        alike = defaultdict(list)
        for device, host, types in left:
            others = tuple(each for each in types if each[0] != attr)
            alike[device, host, others, len(types)].append(dict(types).get(attr, frozenset()))
        left = set()
        for (device, host, others, count), sets in alike.items():
            own = [(attr, frozenset().union(*sets))] if count > len(others) else []
            left.add((device, host, tuple(sorted([*others, *own]))))
    in_order = sorted(left, key=lambda each: (each[0] != "GPU", each[1], str(sorted(each[2]))))
    return [
        {"host": list(host), "types": {name: " ".join(sorted(of)) for name, of in types}}
        for _, host, types in in_order
    ]


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", help="where releases of TensorFlow for GPUs are")
    releases = dict(kernels_in(folder) for folder in parser.parse_args().folders)
    common = set.intersection(*(set(found) for found in releases.values()))
    both = {
        name: joined(set.intersection(*(found[name] for found in releases.values())))
        for name in sorted(common)
    }
    lines = [f"    {json.dumps(name)}: {json.dumps(each)}" for name, each in both.items() if each]
    text = f'{{\n  "versions": {json.dumps(sorted(releases))},\n  "kernels": {{\n'
    RECORDED.write_text(text + ",\n".join(lines) + "\n  }\n}\n")
    print(f"kernels of {len(lines)} operations are recorded in {RECORDED.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
