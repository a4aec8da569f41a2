"""The formats of JSON Schema, as regexes of whole texts: for strings that stand bare, which the libraries' own are not for. None holds
a '<', with which tags begin."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# Of what RFC 3339 knows that which clients read: no year 0, no second 60 (one in some years), and capital letters.
_DAYS: Final = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
_YEAR: Final = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH: Final = "(0[48]|[2468][048]|[13579][26])"  # what follows the century in a leap year, and the centuries that are one
_LEAP: Final = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DATE: Final = f"({_YEAR}-({_DAYS})|{_LEAP}-02-29)"
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_HOURS: Final = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DURATION: Final = f"P([0-9]+W|([0-9]+D|[0-9]+M([0-9]+D)?|[0-9]+Y([0-9]+M([0-9]+D)?)?)({_HOURS})?|{_HOURS})"
_LABEL: Final = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME: Final = rf"{_LABEL}(\.{_LABEL})*"
_ATOM: Final = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4: Final = rf"{_BYTE}(\.{_BYTE}){{3}}"
_HEX: Final = "[0-9A-Fa-f]{1,4}"
_LAST: Final = f"({_HEX}:{_HEX}|{_IPV4})"
_IPV6: Final = (
    f"(({_HEX}:){{6}}{_LAST}|::({_HEX}:){{5}}{_LAST}|({_HEX})?::({_HEX}:){{4}}{_LAST}|(({_HEX}:){{0,1}}{_HEX})?::({_HEX}:){{3}}{_LAST}|"
    f"(({_HEX}:){{0,2}}{_HEX})?::({_HEX}:){{2}}{_LAST}|(({_HEX}:){{0,3}}{_HEX})?::{_HEX}:{_LAST}|(({_HEX}:){{0,4}}{_HEX})?::{_LAST}|"
    f"(({_HEX}:){{0,5}}{_HEX})?::{_HEX}|(({_HEX}:){{0,6}}{_HEX})?::)"
)
_UUID: Final = "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
UUIDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        f"uuid{version}": f"[0-9A-Fa-f]{{8}}-[0-9A-Fa-f]{{4}}-{version}[0-9A-Fa-f]{{3}}-[89ABab][0-9A-Fa-f]{{3}}-[0-9A-Fa-f]{{12}}"
        for version in range(1, 9)
    }
)
"""Pydantic's names, for those of RFC 9562 of one version."""
_PLAIN: Final = "A-Za-z0-9._~!$&'()*+,;="  # what any part of an address may hold
_PERCENT: Final = "%[0-9A-Fa-f]{2}"
_AUTHORITY: Final = rf"(([{_PLAIN}:-]|{_PERCENT})*@)?(\[{_IPV6}\]|([{_PLAIN}-]|{_PERCENT})*)(:[0-9]*)?"
_CHARACTER: Final = f"([{_PLAIN}:@-]|{_PERCENT})"
_TAIL: Final = f"([{_PLAIN}:@/?-]|{_PERCENT})*"
_PATH: Final = f"//{_AUTHORITY}(/{_CHARACTER}*)*|/({_CHARACTER}+(/{_CHARACTER}*)*)?|{_CHARACTER}+(/{_CHARACTER}*)*"
_URI: Final = rf"[A-Za-z][A-Za-z0-9+.-]*:({_PATH})?(\?{_TAIL})?(#{_TAIL})?"

FORMATS: Final[Mapping[str, str]] = MappingProxyType({
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": rf"{_ATOM}(\.{_ATOM})*@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": _UUID,
    "uri": _URI,
    **UUIDS,
})  # fmt: skip
"""By their names; those that llguidance knows, and pydantic's of UUIDs."""
