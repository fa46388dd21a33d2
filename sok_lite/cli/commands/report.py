"""`sok-lite report`: reports on the content of a checkpoint's tables.

`inspect` shows a checkpoint's own description without reading a row. A report reads all rows, and
is comparable to `sok_lite.report` of live tables.
"""

import argparse
import time

from sok_lite.cli.arguments import add_reading
from sok_lite.cli.errors import FINE
from sok_lite.cli.progress import with_progress
from sok_lite.cli.reading import chosen, format_of, keys_of_ranks, open_sources
from sok_lite.reports.report import Report
from sok_lite.reports.tables import READ_COLUMNS, report_of_source

HELP = "read all rows of a checkpoint and summarize bytes, ages, norms, balance over ranks"
EXAMPLES = "sok-lite report runs/model\nsok-lite report runs/model --html report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reading(parser)
    parser.add_argument("--html", metavar="FILE", help="write the report to FILE as an HTML page")


def run(args: argparse.Namespace) -> int:
    name = format_of(args.path, args.from_format)
    sources = chosen(open_sources(args.path, name, args.from_option), args.table, args.path)
    of_ranks = keys_of_ranks(sources)
    with with_progress(sources, "report", args.progress, only=READ_COLUMNS) as read:
        found = [report_of_source(each, of_ranks.get(each.name, ())) for each in read]
    ranks = max(map(len, of_ranks.values()), default=1)
    report = Report(tuple(found), ranks, time.time(), args.path)
    if args.html is not None:
        report.save_html(args.html)
    print(report.to_json() if args.json else report)
    return FINE
