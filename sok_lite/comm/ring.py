"""TCP connections from each rank to the next, made with the help of a communicator.

Ranks exchange all the addresses that they may have, with a token: a process that answers at one of
them and knows the token is that rank.
"""

import fcntl
import json
import secrets
import socket
import struct
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any

import numpy as np

from sok_lite.comm.protocol import Communicator, CommunicatorError

_CONNECT_TIMEOUT_S = 30.0
_CALL_TIMEOUT_S = 10.0
_TOKEN_TIMEOUT_S = 2.0  # it is sent with the call
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface
_TOKEN_BYTES = 16


def connect_ring(comm: Communicator) -> tuple[socket.socket, socket.socket]:
    """Connects each rank with the next. Every rank must call it, in a collective of `comm`.

    Returns:
      Links to the rank after this one and from the rank before it; with two ranks they are two.

    Raises:
      CommunicatorError: a rank cannot be reached; on all ranks.
    """
    token = secrets.token_hex(_TOKEN_BYTES)
    links: list[socket.socket] = []
    with socket.create_server(("", 0)) as listener:
        listener.settimeout(_CONNECT_TIMEOUT_S)
        port = listener.getsockname()[1]
        cards = _cards(comm, {"port": port, "token": token, "hosts": _addresses()})
        reason = ""
        try:
            # Both at once: who waits for an answer must answer meanwhile.
            with ThreadPoolExecutor(1) as pool:
                answered = pool.submit(_accept, listener, token)
                links.append(_call(cards[(comm.rank + 1) % comm.size]))
                links.append(answered.result())
        except OSError as error:
            reason = f"Rank {comm.rank} cannot reach the ranks beside it by TCP: {error}"
    for rank, other in enumerate(_cards(comm, {"reason": reason})):
        if other["reason"]:
            for link in links:
                link.close()
            raise CommunicatorError(f"Rank {rank} fails: {other['reason']}.")
    for link in links:
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return links[0], links[1]


def _cards(comm: Communicator, card: dict[str, Any]) -> list[dict[str, Any]]:
    text = np.frombuffer(json.dumps(card).encode(), np.uint8).reshape(-1, 1)
    gathered = comm._allgatherv("alarm", text)
    return [json.loads(part.tobytes()) for part in gathered.by_rank()]


def _addresses() -> list[str]:
    """Returns the addresses by which other ranks may find this one."""
    found = ["127.0.0.1"]
    name = socket.gethostname()
    with suppress(OSError):
        found += [str(each[4][0]) for each in socket.getaddrinfo(name, None, socket.AF_INET)]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Of each network: a name may be of this machine alone, and none may lead out of it.
        for _, interface in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", interface.encode())
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
        # The address by which packets leave this machine; nothing is sent.
        probe.connect(("192.0.2.1", 9))
        found.append(probe.getsockname()[0])
    return list(dict.fromkeys(found))


def _call(card: dict[str, Any]) -> socket.socket:
    """Returns a link to the rank that has this card: whoever answers its token is that rank."""
    # All addresses at once: of one that leads nowhere, nothing may come for long.
    pool = ThreadPoolExecutor(len(card["hosts"]))
    calls = {pool.submit(_answer_of, host, card): host for host in card["hosts"]}
    pool.shutdown(wait=False)
    failures = []
    for call in as_completed(calls):
        link = call.result()
        if isinstance(link, socket.socket):  # it answers one call only
            return link
        failures.append(f"{calls[call]}: {link}")
    raise ConnectionError("; ".join(failures))


def _answer_of(host: str, card: dict[str, Any]) -> socket.socket | OSError:
    """Returns a link to a process that knows the token, or why there is none."""
    try:
        link = socket.create_connection((host, card["port"]), _CALL_TIMEOUT_S)
    except OSError as error:
        return error
    try:
        link.sendall(card["token"].encode())
        if _exactly(link, 2) == b"ok":
            return link
        failure: OSError = ConnectionError("another program answers")
    except OSError as error:
        failure = error
    link.close()
    return failure


def _accept(listener: socket.socket, token: str) -> socket.socket:
    """Returns the link of the first caller that knows the token."""
    while True:
        link, _ = listener.accept()
        link.settimeout(_TOKEN_TIMEOUT_S)
        with suppress(OSError):  # of another program
            if _exactly(link, len(token)) == token.encode():
                link.sendall(b"ok")
                return link
        link.close()


def _exactly(link: socket.socket, count: int) -> bytes:
    came = b""
    while len(came) < count:
        part = link.recv(count - len(came))
        if not part:
            break
        came += part
    return came
