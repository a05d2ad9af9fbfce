"""Section of the settings about webhooks: who may register some, where they may lead, and how they are tried."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field, field_validator

from policies._sections import Section

RETRIES = (5, 30, 180, 1080, 6480, 21_600, 43_200, 86_400, 86_400)
"""Seconds before each further try: six times as long each time, a day at most; after 2.8 days none is left."""

Port = Annotated[int, Field(gt=0, lt=65536)]


class DeliverySettings(Section):
    """How events get to the webhooks that clients and admins register (`/v1/webhooks`, `countersign webhooks add`).

    Attributes:
        endpoints: webhooks that one client key may register; 0 leaves that to admins.
        retries: seconds before each further try of a delivery that failed; after the last one it is a dead letter.
        ports: ports that webhooks may be at; an empty list is any.
        networks: networks (`10.20.0.0/16`) that are not on the open internet and that webhooks may be in all the same,
            there with http too.
        waiting: deliveries that may wait for one webhook; what happens beyond is dropped, counted, and leaves a gap in
            its sequence numbers. So many that failed for good are kept, too.
        log: deliveries that arrived and are kept for one webhook, the latest.
        log_ttl: seconds that those are kept which are over.
        disable_after: seconds of nothing but failures after which a webhook is switched off.
        senders: deliveries that one process makes at once.
    """

    endpoints: int = Field(10, ge=0, le=1000)
    retries: tuple[Annotated[int, Field(ge=0, le=7 * 86_400)], ...] = RETRIES
    ports: tuple[Port, ...] = (443, 8443)
    networks: tuple[str, ...] = ()
    waiting: int = Field(10_000, gt=0, le=1_000_000)
    log: int = Field(1000, gt=0, le=100_000)
    log_ttl: int = Field(7 * 86_400, gt=0)
    disable_after: int = Field(5 * 86_400, gt=0)
    senders: int = Field(4, gt=0, le=64)

    @field_validator("networks")
    @classmethod
    def _are_networks(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            try:
                ipaddress.ip_network(value)
            except ValueError as error:
                raise ValueError("expected networks such as 10.20.0.0/16") from error
        return values
