"""Opens the connections of tools, to addresses that an `AddressGuard` allows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import httpcore2

from coa_jax.tools.net.address import AddressGuard, resolve


class GuardedBackend(httpcore2.AsyncNetworkBackend):
    """Opens connections only to addresses that are allowed.

    TLS verifies the certificate for the requested host name as usual.
    """

    def __init__(self, guard: AddressGuard):
        self._guard = guard
        self._inner = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connects to the first address of a host that answers.

        Args:
            host: host name or address, all of whose addresses must be allowed.
            port: port of the connection.
            timeout: time limit in seconds; None for an hour.
            local_address, socket_options: as in `httpcore2.AsyncNetworkBackend.connect_tcp`.
        """
        deadline = asyncio.get_running_loop().time() + (timeout or 3600.0)
        try:
            addresses = await asyncio.wait_for(
                resolve(host.rstrip(".").lower(), port, self._guard), timeout
            )
        except TimeoutError:
            raise httpcore2.ConnectTimeout("the look-up of the name took too long") from None
        for position, address in enumerate(addresses):
            remaining_s = deadline - asyncio.get_running_loop().time()
            share = max(remaining_s, 0.001) / (len(addresses) - position)
            try:
                return await self._inner.connect_tcp(
                    address, port, share, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                if position == len(addresses) - 1:
                    raise
        raise httpcore2.ConnectError("the host has no address")
