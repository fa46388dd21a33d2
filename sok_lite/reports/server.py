"""Metrics for Prometheus over HTTP: one port per process, whatever else runs on the host."""

import errno
import logging
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from weakref import WeakSet

from sok_lite.reports.openmetrics import CONTENT_TYPE

_log = logging.getLogger("sok_lite")
_MOST_PORTS = 100  # that are tried
_of_process: WeakSet[ThreadingHTTPServer] = WeakSet()  # closed ones included


def serve_text(text: Callable[[], str], host: str, port: int, whose: str) -> ThreadingHTTPServer:
    """Serves a text for each GET, from threads that end with the process.

    Args:
      host: address to listen at; "": all of the machine.
      port: the first to try, then the next 99. 0: any free port.

    Returns:
      The server: `server_port` is its port, `shutdown()` and `server_close()` end it.

    Raises:
      OSError: no port is free, or the address cannot be listened at.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Suppresses the line on stderr per request."""

    end = min(port + _MOST_PORTS, 1 << 16)
    for each in range(port, end):
        try:
            server = ThreadingHTTPServer((host, each), Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        Thread(target=server.serve_forever, name="sok_lite metrics", daemon=True).start()
        found = server.server_port
        whose_port = "by an earlier serve of this process" if _is_own(port) else "as by another job"
        _of_process.add(server)
        if port in (0, found):
            _log.info("%s serves its metrics on port %d.", whose, found)
        else:
            _log.warning(
                "%s serves its metrics on port %d: port %d is taken, %s.",
                *(whose, found, port, whose_port),
            )
        return server
    raise OSError(
        errno.EADDRINUSE,
        f"No port for metrics: {port} to {end - 1} are taken. Give another `port`, or 0 for any",
    )


def _is_own(port: int) -> bool:
    """Whether a server of this process listens on a port."""
    return any(
        server.server_port == port and server.socket.fileno() != -1 for server in list(_of_process)
    )
