"""Tool calls: what is read is what was written, however the text comes, and nothing that is read ever raises."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lfm2_cb import ToolCall, parse_tool_calls
from lfm2_cb.requests.tool_calls import CALL_END, CALL_START, ToolCallParser, render_tool_calls

WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"properties": {"city": {}, "days": {}}}},
}
SEND = {"type": "function", "name": "send-mail", "parameters": {"properties": {"from": {}, "to": {}}}}
TOOLS = [WEATHER, SEND]


def marked(block):
    return f"{CALL_START}{block}{CALL_END}"


def call(name="get_weather", **arguments):
    return ToolCall(name, arguments)


READ = {
    '[get_weather(city="Bath")]': [call(city="Bath")],
    "[get_weather(city='Bath', days=3), f()]": [call(city="Bath", days=3), call("f")],
    'get_weather(city="Bath")': [call(city="Bath")],
    ' [ a.b.c( x = [1, 2.5, -3, (4,), {"k": None}] ) ]\n': [call("a.b.c", x=[1, 2.5, -3, [4], {"k": None}])],
    "[f(a=True, b=False, c=None, d=true, e=false, g=null)]": [
        call("f", a=True, b=False, c=None, d=True, e=False, g=None)
    ],
    '[send-mail(from="me", to="you", class=07)]': [call("send-mail", **{"from": "me", "to": "you", "class": 7})],
    '[f(a="two\nlines\tand \\d and \\/ and \\u00e9 and \\ud83d\\ude00 and \\ud800")]': [
        call("f", a="two\nlines\tand \\d and / and é and 😀 and \ufffd")
    ],
    "[f(a='it\\'s', b=\"say \\\"x\\\"\", c='a=(b', d=r'\\d')]": [call("f", a="it's", b='say "x"', c="a=(b", d="\\d")],
    '[get_weather("Bath", days=1)]': [call(city="Bath", days=1)],
    '[{"name": "f", "arguments": {"a": [1, null]}}, {"name": "g", "parameters": {}}]': [
        call("f", a=[1, None]),
        call("g"),
    ],
    '{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}': [call("f", a=1)],
    "[f(a=1e999, b=-1e999, c=1e5)]": [call("f", a=1.7976931348623157e308, b=-1.7976931348623157e308, c=1e5)],
    f'[f(a="the marker {CALL_END} in a string")]': [call("f", a=f"the marker {CALL_END} in a string")],
    f"[f(a='{CALL_START}')]": [call("f", a=CALL_START)],
}
BROKEN = [
    *("", "[]", "f", "[f]", "[f(]", "[f(a=)]", "[f(a=b)]", "[f(a=1+1)]", "[f('x')]", "[f(**{})]", "[f(*[1])]"),
    *("[f(a=1)", '[f(a="x]', "[f(a=b'x')]", "[f(a={1: 2})]", "[f(a=1, a=2)]", "f(); g()", "1", "[1]", "[{}]"),
    *("[get_weather('a', city='b')]", '{"name": 1}', '{"name": "f", "arguments": [1]}', '{"arguments": {}}'),
    *('{"name": "f", "arguments": "x"}', '[{"name": "f", "arguments": {"a": NaN}}]', "(lambda: 1)()", "\x00"),
    *('[f(a="\\x")]', "[f(a=1j)]", "[f(a=...)]", '[{"name":' * 5000, "[" + "9" * 5000),
    *("[f(a=" + "[" * 5000 + "]" * 5000 + ")]", "[f(a=" + "-" * 50_000 + "1)]"),
]


@pytest.mark.parametrize("block", READ)
def test_calls_are_read(block):
    assert parse_tool_calls(f"Let me see. {marked(block)} Done.", TOOLS) == ("Let me see.  Done.", READ[block])
    assert parse_tool_calls(f"{CALL_START}{block}", TOOLS) == ("", READ[block])  # its end marker is missing


@pytest.mark.parametrize("block", BROKEN, ids=lambda block: block[:30])
def test_broken_calls_stay_text(block):
    for text in (marked(block), f"x {marked(block)} y", block, f"{CALL_START}{block}"):
        assert parse_tool_calls(text, TOOLS) == (text, [])


def test_what_follows_a_broken_call_is_read():
    text = f"{marked('[f(]')} and {marked('[f()]')}"
    assert parse_tool_calls(text) == (f"{marked('[f(]')} and ", [call("f")])


def test_without_markers_only_an_answer_of_known_calls_is_one():
    bare = '[get_weather(city="Bath"), send-mail(to="you")]'
    calls = [call(city="Bath"), call("send-mail", to="you")]
    json_calls = json.dumps([{"name": c.name, "arguments": c.arguments} for c in calls])
    for text in (bare, f"\n {bare}\n", json_calls):
        assert parse_tool_calls(text, TOOLS) == ("", calls)
        assert parse_tool_calls(text) == (text, [])
    for text in (f"Sure: {bare}", "[f()]", "[get_weather(], said he", "get_weather is a function", '{"name": "x"}'):
        assert parse_tool_calls(text, TOOLS) == (text, [])


def test_text_that_cannot_be_a_call_is_not_held_back():
    parser = ToolCallParser(TOOLS)
    assert parser.add("[1] He said") == ["[1] He said"]
    assert parser.add(" <|tool") == [" "] and parser.add("box|>") == ["<|toolbox|>"]
    assert parser.add(f"so{CALL_START}[get_weather(") == ["so"] and parser.add("days=2)]") == []
    assert parser.add(f"{CALL_END}.") == [call(days=2), "."] and parser.finish() == []


TEXT = st.one_of(
    st.sampled_from([*map(marked, READ), *map(marked, BROKEN[:20]), *READ, "get_weather(", CALL_START, CALL_END]),
    st.text("[]()=,'\"\\ \nfa1<|", max_size=12),
)


@given(st.lists(TEXT, max_size=5).map("".join), st.data())
def test_calls_do_not_depend_on_how_the_text_is_cut(text, data):
    parser, pieces, rest = ToolCallParser(TOOLS), [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces += parser.add(rest[:size])
        rest = rest[size:]
    pieces += parser.finish()
    said = "".join(piece for piece in pieces if isinstance(piece, str))
    assert (said, [piece for piece in pieces if isinstance(piece, ToolCall)]) == parse_tool_calls(text, TOOLS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,12}", fullmatch=True) | st.sampled_from(["from", "class", "a b", "-"])


@given(st.lists(st.builds(ToolCall, NAMES, st.dictionaries(NAMES, JSON, max_size=3)), min_size=1, max_size=3))
@example([ToolCall("f", {"a": "\x00\x1f\\'\"\n/", "b": CALL_END})])
def test_what_is_written_is_read(calls):
    assert parse_tool_calls(render_tool_calls(calls)) == ("", calls)


def test_calls_are_written_as_the_model_writes_them():
    written = render_tool_calls([call(city="Bath", days=3), ToolCall("f", {"a": True, "b": [None, {"x": False}]})])
    assert written == marked('[get_weather(city="Bath", days=3), f(a=True, b=[None, {"x": false}])]')


@given(st.text(), st.booleans())
def test_nothing_that_a_model_writes_raises(text, is_marked):
    whole = marked(text) if is_marked else text
    said, calls = parse_tool_calls(whole, TOOLS)
    assert calls or said == whole
