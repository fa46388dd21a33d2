"""A git repository of a test's own, whatever the user's settings and a hook's variables are."""

import os
import subprocess


def git_in(folder):
    """Returns a function that runs git in a folder and returns what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    settings = ("user.name=n", "user.email=e", "commit.gpgsign=false", "core.hooksPath=/dev/null")
    command = ["git", "-C", str(folder), *(word for each in settings for word in ("-c", each))]

    def git(*arguments):
        done = subprocess.run(
            [*command, *arguments], check=True, capture_output=True, text=True, env=env
        )
        return done.stdout.strip()

    return git
