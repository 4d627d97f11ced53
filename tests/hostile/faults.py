"""Random faults: in bytes, and in the values of JSON and YAML."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import yaml

NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, -(2**63) - 1, 1e308, -0.0, 1e-320, float("inf"), float("nan")),
    *("", " ", "\x00", "\ud800", "a" * 5000, "é\u202e", "1e5", "null", "auto", "../../../etc/passwd", "/dev/zero", "-"),
    *([], {}, [[]], [None], {"": None}, {"a": {"a": {"a": 1}}}, [1] * 2000, "[" * 900, "{" * 900, "%s%n", "*", "&a"),
)
TOKENS = tuple(
    b'\x00 \xff \xef\xbb\xbf \xff\xfe {{{{ ]]]] "" :: - ,, &a *a !!python/object:os.system'.split()
    + b"NaN 1e999 -0 \r \x1b[2J".split()
)

STATEMENTS = (
    *("{{ messages }}", "{{ messages[99].content }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{{ x.y.z }}"),
    *("{% for a in range(3) %}", "{% endfor %}", "{% if true %}", "{% endif %}", "{% set messages = none %}"),
    *("{% for a in range(99999999) %}{% endfor %}", "{{ 'x' * 4000000000 }}", "{{ [1] * 99999999999 }}"),
    *("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ messages.__class__.__mro__ }}", "{% include 'x' %}"),
    *("{{ strftime_now('%Y' * 999) }}", "{% generation %}", "{% break %}", "{{ '{:>9999999999}'.format(1) }}", "{{"),
    *("{{ messages | tojson(indent=99999) }}", "{{ 9 ** 9 ** 9 }}", "{{ '%9999999999d' % 1 }}", "{{ cycler }}"),
)


def change_bytes(rng: random.Random, raw: bytes) -> bytes:
    """One to four faults: bits, missing, repeated, moved and foreign bytes, an early end."""
    found = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        end = min(len(found), at + rng.choice((1, 1, 2, 8, 64, 1024)))
        kind = rng.randrange(6)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[at:end]
        elif kind == 2:
            found[at:at] = found[at:end] * rng.choice((1, 1, 3))
        elif kind == 3:
            found[at:at] = rng.choice(TOKENS)
        elif kind == 4:
            del found[at:]
        else:
            found[at:end] = rng.randbytes(end - at)
    return bytes(found)


def change_values(rng: random.Random, value: Any) -> Any:
    """One to three faults in a tree of plain values: another value, a missing, renamed or further key."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return copy.deepcopy(rng.choice(NASTY))
        inside, key = rng.choice(places)
        kind = rng.randrange(5)
        if kind == 0 and isinstance(inside, dict):
            inside[rng.choice(("x", "", str(key) + "s", "name", "__class__"))] = inside.pop(key)
        elif kind == 1:
            del inside[key]
        elif kind == 2 and isinstance(inside, dict):
            other_inside, other = rng.choice(places)
            with contextlib.suppress(LookupError):
                inside[key] = json.loads(json.dumps(other_inside[other]))
        else:
            inside[key] = copy.deepcopy(rng.choice(NASTY))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield value, key
            yield from _places(inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value[:50]):
            yield value, index
            yield from _places(inner)


def change_json(rng: random.Random, raw: bytes) -> bytes:
    if rng.random() < 0.4:
        return change_bytes(rng, raw)
    return json.dumps(change_values(rng, json.loads(raw))).encode("utf-8", "surrogatepass")


def change_yaml(rng: random.Random, raw: bytes) -> bytes:
    if rng.random() < 0.4:
        return change_bytes(rng, raw)
    changed = change_values(rng, yaml.safe_load(raw))
    with contextlib.suppress(yaml.YAMLError, UnicodeError):
        return yaml.safe_dump(changed, allow_unicode=True).encode()
    return json.dumps(changed).encode("utf-8", "surrogatepass")


def change_lines(rng: random.Random, raw: bytes) -> bytes:
    """JSON lines: of some the values, else the bytes."""
    if rng.random() < 0.4:
        return change_bytes(rng, raw)
    lines = raw.splitlines()
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(lines))
        with contextlib.suppress(ValueError):  # changed already
            lines[at] = json.dumps(change_values(rng, json.loads(lines[at]))).encode("utf-8", "surrogatepass")
    return b"\n".join(lines) + b"\n"


def change_header(rng: random.Random, raw: bytes) -> bytes:
    """Of safetensors: the header, or what follows it at once."""
    size = int.from_bytes(raw[:8], "little") + 8
    if rng.random() < 0.5:
        header = json.dumps(change_values(rng, json.loads(raw[8:size]))).encode("utf-8", "surrogatepass")
        return len(header).to_bytes(8, "little") + header + raw[size:]
    return change_bytes(rng, raw[: size + 64]) + raw[size + 64 :]


def change_packed(rng: random.Random, raw: bytes) -> bytes:
    """gzip: the archive, or what is in it."""
    if rng.random() < 0.5:
        return change_bytes(rng, raw)
    return gzip.compress(change_bytes(rng, gzip.decompress(raw)), mtime=0)


def change_template(rng: random.Random, raw: bytes) -> bytes:
    """A chat template: its statements in another order, missing, repeated or strange; or its bytes."""
    if rng.random() < 0.3:
        return change_bytes(rng, raw)
    parts = re.split(r"({[{%].*?[%}]})", raw.decode(), flags=re.DOTALL)
    for _ in range(rng.randint(1, 3)):
        at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
        kind = rng.randrange(4)
        if kind == 0:
            parts[at], parts[other] = parts[other], parts[at]
        elif kind == 1:
            parts[at] = ""
        elif kind == 2:
            parts.insert(at, parts[other])
        else:
            parts[at] = rng.choice(STATEMENTS)
    return "".join(parts).encode()
