"""The TCP connections beside NCCL, for ranks that are threads, with real sockets."""

import socket
import struct

import pytest

from sok_lite.comm import CommunicatorError, ring, run_ranks


def connect(comm):
    """Connects a ring and sends a word along it."""
    after, before = comm._together(lambda call: ring.connect_ring(comm), "ring")
    with after, before:
        after.sendall(bytes([comm.rank]))
        assert before.recv(1) == bytes([(comm.rank - 1) % comm.size])


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_is_connected_with_the_next(size):
    run_ranks(size, connect)


def test_a_name_that_leads_nowhere_is_no_hindrance(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    found = ring._addresses()
    assert found[0] == "127.0.0.1"
    assert len(found) == len(set(found))
    for host in found:
        socket.inet_aton(host)
    run_ranks(2, connect)


@pytest.mark.parametrize("how", ["silent", "reset", "wrong"])
def test_other_programs_that_call_are_no_ranks(monkeypatch, how):
    monkeypatch.setattr(ring, "_TOKEN_TIMEOUT_S", 0.2)
    strangers = []
    cards = ring._cards

    def disturbed(comm, card):
        if "port" in card:
            stranger = socket.create_connection(("127.0.0.1", card["port"]))
            strangers.append(stranger)
            if how == "reset":
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stranger.close()
            elif how == "wrong":
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(64))
        return cards(comm, card)

    monkeypatch.setattr(ring, "_cards", disturbed)
    run_ranks(2, connect)
    for stranger in strangers:
        stranger.close()


def test_an_address_where_nobody_answers_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(ring, "_CALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(ring, "_CONNECT_TIMEOUT_S", 2.0)
    nowhere = [f"192.0.2.{i}" for i in range(1, 9)]
    monkeypatch.setattr(ring, "_addresses", lambda: [*nowhere, "127.0.0.1"])
    run_ranks(2, connect)


def test_ranks_that_cannot_be_reached_raise_on_all(monkeypatch):
    monkeypatch.setattr(ring, "_CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(ring, "_CONNECT_TIMEOUT_S", 0.5)
    addresses = ring._addresses
    told = []

    def program(comm):
        if comm.rank == 1:
            monkeypatch.setattr(ring, "_addresses", lambda: ["192.0.2.1"])
        comm.barrier()
        with pytest.raises(CommunicatorError, match=r"cannot reach .* 192\.0\.2\.1"):
            connect(comm)
        monkeypatch.setattr(ring, "_addresses", addresses)
        comm.barrier()
        connect(comm)
        told.append(comm.rank)

    run_ranks(2, program)
    assert sorted(told) == [0, 1]
