"""Which addresses a webhook may have, and what it takes."""

from __future__ import annotations

import contextlib
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from policies.settings import DeliverySettings
from policies.subscription import Subscription, check_url, is_public, may_reach

RULES = DeliverySettings()
INSIDE = DeliverySettings(networks=("10.20.0.0/16",), ports=())

REFUSED = [
    "http://example.com/", "ftp://example.com/", "//example.com/", "example.com", "", "https://", "https:///x",
    "https://user@example.com/", "https://user:word@example.com/", "https://@example.com/", "https://example.com/#x",
    "https://example.com:80/", "https://example.com:22/", "https://example.com:0/", "https://example.com:99999/",
    "https://example.com:x/", "https://exam ple.com/", "https://example.com/\n", "https://example.com\\@evil.com/",
    "https://ex\u00e4mple.com/", "https://127.0.0.1/", "https://10.0.0.1/", "https://169.254.169.254/latest/meta-data",
    "https://[::1]/", "https://[::ffff:10.0.0.1]/", "https://[64:ff9b::a00:1]/", "https://[2002:a00:1::]/",
    "https://[fe80::1%25eth0]/", "https://[fd00:ec2::254]/", "https://2130706433/", "https://0x7f000001/",
    "https://0x7f.1/", "https://0177.0.0.1/", "https://127.1/", "https://127.0.0.1./", "https://0/", "https://1.2.3.4.5/",
    "https://a..b/", "https://-x.com/", "https://x.com:443@evil.com/", "https://[v1.x]/", "https://" + "a" * 2050,
]  # fmt: skip


@pytest.mark.parametrize("url", REFUSED)
def test_no_webhook_may_be_there(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        check_url(url, RULES)


@pytest.mark.parametrize(
    "url",
    ["https://example.com/hook?x=1", "https://example.com:8443", "https://1.1.1.1/", "https://[2606:4700::1111]/",
     "https://xn--exmple-cua.com/", "https://a_b.example.com./"],
)  # fmt: skip
def test_one_may_be_there(url: str) -> None:
    check_url(url, RULES)


def test_a_network_of_the_operators_takes_http_and_any_port() -> None:
    check_url("http://10.20.1.2:8080/hook", INSIDE)
    check_url("http://hooks.internal:8080/", INSIDE)
    for url in ("http://10.21.0.1/", "https://127.0.0.1/", "https://[::ffff:10.21.0.1]/"):
        with pytest.raises(ValueError, match="open internet"):
            check_url(url, INSIDE)


@given(st.text(max_size=60), st.booleans())
def test_no_text_breaks_it(text: str, prefixed: bool) -> None:
    with contextlib.suppress(ValueError):
        check_url("https://" + text if prefixed else text, RULES)


@given(st.ip_addresses())
def test_what_may_be_reached_is_public_however_it_is_written(address: ipaddress.IPv4Address) -> None:
    assert may_reach(str(address)) == is_public(str(address))
    if isinstance(address, ipaddress.IPv4Address):
        assert is_public(f"::ffff:{address}") == is_public(str(address))
        packed = f"{int(address) >> 16:x}:{int(address) & 0xFFFF:x}"
        assert not any(map(is_public, (f"64:ff9b::{packed}", f"2002:{packed}::", f"::{packed}", f"2001::{packed}")))


@pytest.mark.parametrize("fields", [{"events": ["x"]}, {"verdicts": ["bad"]}, {"models": [""]}, {"more": 1}])
def test_a_filter_that_is_none_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Subscription.model_validate(fields)


@pytest.mark.parametrize("network", ["10.0.0.0/33", "x", "10.0.0.1/8"])
def test_a_network_that_is_none_is_refused(network: str) -> None:
    with pytest.raises(ValidationError, match="expected networks"):
        DeliverySettings(networks=(network,))


def test_filters_by_model_and_verdict() -> None:
    wanted = Subscription(models=("m",), verdicts=("reject", "withheld"), events=("verification.completed",))
    answers = [("m", "reject"), ("m", "withheld"), ("m", "pass"), ("n", "reject")]
    found = [wanted.wants_verdict({"model": model, "verdict": word}) for model, word in answers]
    assert found == ["verification.completed", "verification.completed", None, None]
    assert not wanted.wants_backend("backend.suspect", "m")
    backends = Subscription(events=("backend.suspect",), models=("m",))
    assert [backends.wants_backend(type, "m") for type in ("backend.suspect", "backend.recovered")] == [True, False]
    assert not backends.wants_backend("backend.suspect", "n")
