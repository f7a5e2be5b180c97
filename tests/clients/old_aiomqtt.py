"""Messages to an older aiomqtt over TLS, which reads one packet and then waits for the socket: ``old_aiomqtt.py PORT CAFILE``.

Run by the Python that has the package; writes a line of JSON for each test.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import sys

import aiomqtt

COUNTS = (2, 100, 3000)
SECONDS = 30


async def received(port: int, context: ssl.SSLContext, version: aiomqtt.ProtocolVersion, qos: int, count: int) -> str:
    """Publish ``count`` messages to a subscriber; "" if it gets them all, else what is missing."""
    topic, got = f"old/{version.value}/{qos}/{count}", 0
    options = {"port": port, "tls_context": context, "protocol": version, "timeout": SECONDS}
    try:
        async with asyncio.timeout(2 * SECONDS), aiomqtt.Client("localhost", **options) as subscriber:
            await subscriber.subscribe(topic, qos=qos)
            async with aiomqtt.Client("localhost", max_queued_outgoing_messages=0, **options) as publisher:
                sending = asyncio.gather(*(publisher.publish(topic, str(n), qos=qos) for n in range(count)))
                async for _ in subscriber.messages:
                    got += 1
                    if got == count:
                        break
                await sending
    except (TimeoutError, aiomqtt.MqttError) as error:
        return f"{got} of {count} received: {type(error).__name__} {error}".strip()
    return ""


async def main(port: int, authority: str) -> None:
    logging.disable(logging.WARNING)  # it warns of each message that waits
    context = ssl.create_default_context(cafile=authority)
    for version, name in ((aiomqtt.ProtocolVersion.V311, "3.1.1"), (aiomqtt.ProtocolVersion.V5, "5.0")):
        for qos in (0, 1, 2):
            for count in COUNTS:
                detail = await received(port, context, version, qos, count)
                test = f"{count} messages {name} QoS {qos}"
                print(json.dumps({"test": test, "outcome": "failed" if detail else "passed", "detail": detail}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
