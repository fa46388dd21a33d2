"""Servers that have folders: of S3, by moto, and of SFTP, by asyncssh; each in a process."""

import re
import subprocess
import sys
from contextlib import contextmanager

import pytest

USER, PASSWORD, BUCKET = "sok", "lite", "bucket"
# What the servers and their clients need.
PACKAGES = {"memory": ["fsspec"], "s3": ["moto", "flask", "s3fs"], "sftp": ["asyncssh", "paramiko"]}


@contextmanager
def s3_server():
    """Yields the address of a bucket, with what s3fs needs to know in the environment."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with pytest.MonkeyPatch.context() as patch, _running(command, r"http://[\d.]+:(\d+)") as port:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        # A name, so that it is looked up.
        patch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{port}")
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)
        yield f"s3://{BUCKET}"


@contextmanager
def sftp_server(folder, port=0):
    """Yields the address of a folder of this machine.

    Args:
      port: of the server; 0: any.
    """
    command = [sys.executable, "-m", "tests.support.sftp_server", USER, PASSWORD, f"{port}"]
    with _running(command, r"port (\d+)") as port:
        yield f"sftp://{USER}:{PASSWORD}@localhost:{port}{folder}"


@contextmanager
def _running(command, pattern):
    """Starts a program, and yields what the line says that it prints when it serves."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            match = re.search(pattern, line)
            if match:
                break
        else:
            raise RuntimeError("".join(said))
        yield match[1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
