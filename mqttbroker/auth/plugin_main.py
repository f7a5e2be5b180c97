"""The process that runs a plug-in.

It talks with the broker over a socket, in frames of a length of 4 bytes and JSON. The first frame names the plug-in,
and the answer is ``{"ready": true}`` or ``{"error": "..."}``. Each further one is a login with an ``id``, and so is its
answer. It ends with the broker, even while the plug-in is busy.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import inspect
import json
import os
import select
import socket
import sys
import threading
from typing import Any

from mqttbroker.auth.plugin import Accepted, Answer, Ignored, Login, Plugin, Rejected, Unavailable

MAX_FRAME = 16 << 20  # bytes
NICENESS = 5
CLOSE_SECONDS = 1.0


def encode(message: dict[str, Any]) -> bytes:
    data = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return len(data).to_bytes(4, "big") + data


def load(reference: str, options: dict[str, Any]) -> Plugin:
    """The plug-in of "module:object"; a class or function is called with the options. Raises any exception."""
    module, _, name = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    plugin = found(**options) if callable(found) and not hasattr(type(found), "authenticate") else found
    if not inspect.iscoroutinefunction(getattr(plugin, "authenticate", None)):
        raise TypeError(f"{reference} has no method: async def authenticate(self, login)")
    checked: Plugin = plugin
    return checked


def reason_of(error: BaseException) -> str:
    """One line, without secrets that a traceback could show."""
    text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300].rstrip(": ")


class Worker:
    """Answers the logins that come over a connection."""

    def __init__(self, plugin: Plugin, timeout: float, writer: asyncio.StreamWriter) -> None:
        self._plugin = plugin
        self._timeout = timeout
        self._writer = writer
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, message: dict[str, Any]) -> None:
        task = asyncio.create_task(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: dict[str, Any]) -> None:
        number = message.pop("id")
        try:
            if message["password"] is not None:
                message["password"] = base64.b64decode(message["password"])
            async with asyncio.timeout(self._timeout):
                answer = await self._plugin.authenticate(Login(**message))
            frame = encode({"id": number, **_fields(answer)})
        except TimeoutError:
            frame = encode({"id": number, "error": "timeout"})
        except Unavailable as error:
            frame = encode({"id": number, "error": " ".join(str(error).split())[:300]})
        except BaseException as error:  # of the plug-in, such as SystemExit, which must not end the other logins
            frame = encode({"id": number, "error": reason_of(error)})
        self._writer.write(frame)

    async def close(self) -> None:
        close: Any = getattr(self._plugin, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await close()


def _fields(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, Accepted):
        fields = {"username": answer.username, "client_id": answer.client_id, "acl": answer.acl}
        return {"result": "allow", **fields, "expires_at": answer.expires_at}
    if isinstance(answer, Rejected):
        return {"result": "deny"}
    if isinstance(answer, Ignored):
        return {"result": "ignore"}
    raise TypeError(f"authenticate returned {type(answer).__name__}, not Accepted, Rejected or Ignored")


async def serve(sock: socket.socket) -> None:
    """Load the plug-in of the first frame, and answer logins until the broker closes the connection."""
    reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_FRAME)
    first = await _read(reader)
    _limit_memory(first["max_memory"])
    if first["path"]:
        sys.path.insert(0, first["path"])
    try:
        worker = Worker(load(first["plugin"], first["options"]), first["timeout"], writer)
    except BaseException as error:
        writer.write(encode({"error": reason_of(error)}))
        await writer.drain()
        return
    writer.write(encode({"ready": True}))
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            worker.receive(await _read(reader))
    await worker.close()


async def _read(reader: asyncio.StreamReader) -> dict[str, Any]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    message: dict[str, Any] = json.loads(await reader.readexactly(size))
    return message


def _limit_memory(size: int) -> None:
    """Let an allocation beyond ``size`` bytes fail, and let the kernel end this process before the broker."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    except (ImportError, OSError, ValueError):
        pass
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _end_with_broker(descriptor: int) -> None:
    """End the process when the broker's side of the socket is closed, also while the plug-in blocks the event loop."""

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, getattr(select, "POLLRDHUP", 0))
        poll.poll()
        threading.Event().wait(CLOSE_SECONDS + 0.5)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(NICENESS)
    _end_with_broker(descriptor)
    asyncio.run(serve(socket.socket(fileno=descriptor)))
