"""`sok-lite doctor`: what is installed, what is missing, and the line that mends it."""

import argparse

from sok_lite.cli.errors import FINDINGS, FINE
from sok_lite.cli.installed import BROKEN, CHECKS

HELP = "say what is installed, what is missing, and how to mend it"
EXAMPLES = "sok-lite doctor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    findings = [check() for check in CHECKS]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.state:8} {finding.name:{width}}  {finding.found}")
        if finding.mend is not None:
            print(f"{'':8} {'':{width}}  -> {finding.mend}")
    broken = [finding.name for finding in findings if finding.state == BROKEN]
    print(f"Broken: {', '.join(broken)}." if broken else "Nothing is broken.")
    return FINDINGS if broken else FINE
