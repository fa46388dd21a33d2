"""Communication between ranks: one protocol, and a transport per launcher. Re-exports only."""

from sok_lite.comm.elastic import ElasticCommunicator
from sok_lite.comm.gpu_transport import (
    TRANSPORTS,
    TransportKind,
    checked_transport,
    choose_transport,
)
from sok_lite.comm.launch import TOOLS, launched_ranks, make_communicator
from sok_lite.comm.protocol import (
    Communicator,
    CommunicatorError,
    Gathered,
    JobAborted,
    RanksDifferError,
)
from sok_lite.comm.single import SingleCommunicator
from sok_lite.comm.threads import ThreadsCommunicator, run_ranks

__all__ = [
    "TOOLS",
    "TRANSPORTS",
    "Communicator",
    "CommunicatorError",
    "ElasticCommunicator",
    "Gathered",
    "JobAborted",
    "RanksDifferError",
    "SingleCommunicator",
    "ThreadsCommunicator",
    "TransportKind",
    "checked_transport",
    "choose_transport",
    "launched_ranks",
    "make_communicator",
    "run_ranks",
]
