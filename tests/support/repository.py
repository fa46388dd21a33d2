"""A git repository of a test's own, whatever the user's settings and a hook's variables are."""

import os
import subprocess


def git_in(folder, monkeypatch):
    """Returns a function that runs git in a folder and returns what it prints.

    The variables of a hook, which name another repository, are gone for the whole test.
    """
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    settings = ("user.name=n", "user.email=e", "commit.gpgsign=false", "core.hooksPath=/dev/null")
    command = ["git", "-C", str(folder), *(word for each in settings for word in ("-c", each))]

    def git(*arguments):
        done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    return git
