from __future__ import annotations

import dataclasses
from functools import cache
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import bundle, distance, jws, margin
from policies.examination import Outcome, examine
from policies.judging import Declared, Grounds
from policies.profile import Profile, ProfileKey, fit
from tests.policies.recorded import CPU, EOS, REFERENCE, VOCABULARY, replayed
from tests.support.bundles import KEY, OTHER_KEY, Made, asking, made, placed

TRUSTED = {jws.kid_of(jws.public_bytes(KEY)): jws.public_bytes(KEY)}
DECLARED = Declared(VOCABULARY, 2048, (EOS,))


@cache
def profile() -> Profile:
    key = ProfileKey("smollm2", CPU, "bf16", REFERENCE)
    honest = [*replayed("single")[4:], *replayed("batch")]
    rows = [row for each in honest for row in distance.calibration_rows(*each, arm="one")]
    return fit(rows + [row for each in honest for row in margin.calibration_rows(*each, arm="one")], key)


@cache
def audited(kind: str = "single", number: int = 0) -> Made:
    evidence, replay = replayed(kind)[number]
    sampling = dataclasses.replace(evidence.sampling, max_tokens=len(evidence.output_ids))
    evidence = dataclasses.replace(evidence, sampling=sampling, finish_reason="length")
    evidence = dataclasses.replace(
        evidence, id=f"{number:032x}", request=asking(evidence), shown_sha256="5" * 64, owner="9" * 64
    )
    return made([evidence], Grounds(DECLARED, profile=profile(), replays=[replay], earlier=[None]))


def outcome(data: bytes) -> Outcome:
    return examine(data, TRUSTED).outcome


@cache
def whole() -> bytes:
    return audited().bytes


@pytest.mark.parametrize("kind", ["single", "batch", "fp8"])
def test_every_answer_is_judged_the_same_again(kind: str) -> None:
    words = set()
    for number in range(3):
        found = examine(audited(kind, number).bytes, TRUSTED)
        assert found.outcome is Outcome.VERIFIED, found.faults
        assert found.receipt is not None
        assert found.derived is not None
        assert found.derived["verdict"] == found.receipt.verdict
        words.add(found.receipt.verdict)
    assert ("reject" in words) == (kind == "fp8")


def test_the_key_is_asked_for() -> None:
    assert examine(whole()).outcome is Outcome.UNTRUSTED_KEY
    assert examine(whole(), any_key=True).outcome is Outcome.VERIFIED
    assert examine(whole(), {next(iter(TRUSTED)): b""}).outcome is Outcome.VERIFIED
    assert examine(whole(), {"x": b""}, any_key=True).outcome is Outcome.UNTRUSTED_KEY
    forged = dataclasses.replace(audited(), key=OTHER_KEY)
    assert outcome(forged.bytes) is Outcome.UNTRUSTED_KEY
    assert examine(forged.bytes, any_key=True).outcome is Outcome.VERIFIED


@pytest.mark.parametrize("says", [{"verdict": "reject"}, {"reasons": ["x"]}, {"checks": []}, {"audited": False}])
def test_another_verdict_under_the_valid_key_cannot_be_derived(says: dict[str, Any]) -> None:
    lied = audited().saying(**says)
    assert outcome(lied.bytes) is Outcome.NOT_DERIVABLE
    # The proof of the honest receipt, which is all that somebody without the log's key has, does not save it.
    assert outcome(bundle.pack(msgspec.structs.replace(lied.bundle, log=audited().bundle.log))) is Outcome.NOT_DERIVABLE


def test_numbers_count_beyond_rounding() -> None:
    checks = [*audited().statement["verification"]["checks"]]
    at = next(at for at, check in enumerate(checks) if check["name"] == "distance")

    def with_score(factor: float) -> Outcome:
        metrics = checks[at]["metrics"]
        moved = {**checks[at], "metrics": {**metrics, "score": metrics["score"] * factor}}
        return outcome(audited().saying(checks=[*checks[:at], moved, *checks[at + 1 :]]).bytes)

    assert with_score(1 + 1e-12) is Outcome.VERIFIED
    assert with_score(1.001) is Outcome.NOT_DERIVABLE


def test_what_the_log_must_show() -> None:
    honest = audited().bundle
    for log in (None, placed(audited("single", 1).bundle.receipt)):
        assert outcome(bundle.pack(msgspec.structs.replace(honest, log=log))) is Outcome.NOT_IN_LOG
    foreign = placed(honest.receipt, OTHER_KEY)
    keys = (*honest.keys, jws.public_bytes(OTHER_KEY))
    assert outcome(bundle.pack(msgspec.structs.replace(honest, log=foreign, keys=keys))) is Outcome.UNTRUSTED_KEY


def test_other_keys_than_those_it_is_signed_with_are_found() -> None:
    honest, other = audited().bundle, jws.public_bytes(OTHER_KEY)
    for keys in ((), (other,), (*honest.keys, other), (other, *honest.keys), (*honest.keys, *honest.keys)):
        assert outcome(bundle.pack(msgspec.structs.replace(honest, keys=keys))) is Outcome.BAD_SIGNATURE


@given(st.data())
def test_any_changed_byte_is_found(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(whole()) - 1))
    changed = bytearray(whole())
    changed[at] ^= data.draw(st.integers(1, 255))
    assert outcome(bytes(changed)) is not Outcome.VERIFIED


@given(st.data())
def test_any_changed_byte_is_found_under_a_new_checksum(data: st.DataObject) -> None:
    """Whoever changes a bundle can mend its checksum."""
    body = bytearray(whole()[:-32])
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    assert outcome(bytes(body) + sha256(bytes(body)).digest()) is not Outcome.VERIFIED


@given(st.integers(0, 10**9), st.binary(min_size=1, max_size=40))
def test_what_is_cut_off_or_added_is_found(cut: int, more: bytes) -> None:
    assert outcome(whole()[: cut % len(whole())]) is Outcome.UNREADABLE
    assert outcome(whole() + more) is not Outcome.VERIFIED
    at = cut % len(whole())
    assert outcome(whole()[:at] + more + whole()[at:]) is not Outcome.VERIFIED


MEMBERS = [name for name in bundle.Bundle.__struct_fields__ if name != "keys"]


@given(st.sets(st.sampled_from(MEMBERS), min_size=1, max_size=len(MEMBERS) - 1), st.sampled_from(["single", "fp8"]))
def test_members_of_another_bundle_are_found(names: set[str], kind: str) -> None:
    mine, other = audited().bundle, audited(kind, 3).bundle
    mixed = msgspec.structs.replace(mine, **{name: getattr(other, name) for name in names})
    if mixed in (mine, other):
        return
    assert outcome(bundle.pack(mixed)) is not Outcome.VERIFIED


@pytest.mark.parametrize("name", bundle.Bundle.__struct_fields__)
def test_members_that_stand_twice_are_found(name: str) -> None:
    fields = msgspec.msgpack.decode(whole()[len(bundle.MAGIC) : -32])
    packed = b"".join(msgspec.msgpack.encode(key) + msgspec.msgpack.encode(value) for key, value in fields.items())
    again = msgspec.msgpack.encode(name) + msgspec.msgpack.encode(fields[name])
    for body in (packed + again, again + packed, packed + msgspec.msgpack.encode("more") + b"\xc0"):
        twice = bundle.MAGIC + bytes([0x80 | (len(fields) + 1)]) + body
        assert outcome(twice + sha256(twice).digest()) is Outcome.UNREADABLE
    for more in (fields[name], b"", None, 7, [fields[name]]):
        if more != fields[name]:
            other = bundle.MAGIC + msgspec.msgpack.encode({**fields, name: more})
            assert outcome(other + sha256(other).digest()) is not Outcome.VERIFIED


@given(st.binary(max_size=300))
def test_garbage_is_unreadable(data: bytes) -> None:
    for junk in (data, bundle.MAGIC + data):
        assert outcome(junk) is Outcome.UNREADABLE
