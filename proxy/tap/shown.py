"""What a choice says to its reader, read off the bytes that it came as."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from policies.message import KNOWN, NOTHING, ODD, Message, Place, Shown, beside, of_message, of_value, worse
from proxy.tap.rawjson import NULL, UNREADABLE, Object, is_null, read_value
from proxy.tap.repeats import repeats

_message = msgspec.json.Decoder(Message)
_string = msgspec.json.Decoder(str)
_UNREAD = "?"


def shown(choice: Object, place: Place) -> Shown:
    """What a choice shows there. Whatever else it could show somebody is a fault of it."""
    said = _shown(choice.get(place, NULL), place)
    if choice.keys() <= KNOWN[place]:
        return said
    others = {name: _value(choice[name]) for name in choice.keys() - KNOWN[place]}
    fault = beside(others, place)
    return said._replace(fault=worse(said.fault, fault)) if fault else said


def _shown(found: Raw, place: Place) -> Shown:
    if is_null(found):
        return NOTHING
    try:
        if place == "text":
            return Shown(_string.decode(found))
        said = of_message(_message.decode(found), place)
    except UNREADABLE:
        return of_value(_value(found), place)
    return said._replace(fault=ODD) if repeats(found) else said


def _value(found: Raw) -> object:
    """A value as Python reads it; where it does not, something that says anything."""
    value = read_value(found)
    return _UNREAD if value is None and not is_null(found) else value
