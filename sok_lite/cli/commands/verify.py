"""`sok-lite verify`: whether a checkpoint is whole."""

import argparse
import os

from sok_lite.cli.arguments import local
from sok_lite.cli.errors import FINDINGS, FINE
from sok_lite.cli.progress import progress_bar
from sok_lite.cli.verified import findings_of_table
from sok_lite.engine.files import manifest
from sok_lite.engine.files.rewriting import owner_rule
from sok_lite.reports.text import counted

HELP = "read every byte of a checkpoint and say what is wrong with it"
EXAMPLES = "sok-lite verify runs/model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=local, help="a checkpoint")


def run(args: argparse.Namespace) -> int:
    try:
        found = manifest.read(args.path)
    except ValueError as error:
        print(error)
        return FINDINGS
    folder, count = os.path.abspath(args.path), 0
    shards = [shard for facts in found.tables.values() for shard in facts.shards]
    total = sum(file.num_bytes for shard in shards for file in shard.written_files)
    with progress_bar("verify", total, args.progress) as add:
        for facts in found.tables.values():
            for finding in findings_of_table(folder, facts, add):
                print(finding)
                count += 1
            if owner_rule(facts.owner, found.ranks) is None:
                print(f"table {facts.name!r}: whose its keys are was not looked at: {facts.owner}")
    if count:
        print(f"{counted(count, 'finding')}")
        return FINDINGS
    num_keys = sum(shard.rows for shard in shards)
    sizes = counted(len(found.tables), "table"), counted(num_keys, "key"), counted(total, "byte")
    print(f"{args.path} is whole: {', '.join(sizes)}")
    return FINE
