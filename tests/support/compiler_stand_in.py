"""A compiler that compiles nothing and lists what it is asked to."""

import re


def stand_in(folder, monkeypatch):
    """Has the package call it, with a cache of its own.

    Returns a function that returns its commands so far, sorted and without what each makes: those
    that compile a source.
    """
    log, compiler = folder / "commands", folder / "compiler"
    compiler.write_text(
        f'#!/bin/sh\necho "$*" >>{log}\nwhile [ "$1" != -o ]; do shift; done\necho made >"$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SOK_LITE_CACHE", str(folder / "cache"))

    def commands():
        lines = log.read_text().splitlines()
        return sorted(re.sub(r" -o \S+", "", line) for line in lines if " -c " in line)

    return commands
