"""Messages, sockets and the two ends of a line: `Actor` listens, `Client` connects."""

from sao.transport.actor import LATER, Actor
from sao.transport.client import Client
from sao.transport.mailbox import Mailbox, Peer, Reply, Request
from sao.transport.messages import Message
from sao.transport.sockets import private_folder

__all__ = [
    "LATER",
    "Actor",
    "Client",
    "Mailbox",
    "Message",
    "Peer",
    "Reply",
    "Request",
    "private_folder",
]
