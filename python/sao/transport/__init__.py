"""Messages between processes, and the two ends of a connection: an `Actor` listens, a `Client` connects."""

from sao.transport.actor import LATER, Actor
from sao.transport.client import Callbacks, Client
from sao.transport.mailbox import Mailbox, Peer, Request
from sao.transport.messages import Message
from sao.transport.sockets import Limits, private_folder

__all__ = ["LATER", "Actor", "Callbacks", "Client", "Limits", "Mailbox", "Message", "Peer", "Request", "private_folder"]
