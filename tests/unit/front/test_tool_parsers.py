"""Calls told from content, in each format and whatever way the text arrives. Calls are get_weather(city, days, opts) and now()."""

from __future__ import annotations

import pytest

from banyan_runtime.front.chat.events import Content, Event
from banyan_runtime.front.chat.output import ChoiceParser, make_parser
from banyan_runtime.front.chat.reasoning import Start
from banyan_runtime.front.chat.tools.json_array import JSON_ARRAY
from banyan_runtime.front.chat.tools.kimi_k2 import KIMI_K2 as KIMI_K2_FORMAT
from tests.unit.front.parsing import TOOLS, always, call, cut_call, parsed, tool_parser

HERMES: list[tuple[str, list[Event]]] = [
    (
        'Hi <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        [Content("Hi"), *call(0, "get_weather", '{"city": "Paris"}')],
    ),
    ('a <tool_call>{"name":"now","arguments":{}}</tool_call>', [Content("a"), *call(0, "now")]),
    ("1 <today", [Content("1 <today")]),
    ("x <tool", [Content("x <tool")]),
    (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [*call(0, "get_weather", '{"city": "Paris", "days": 2}'), *call(1, "now")],
    ),
    ('<tool_call>{"name":"now"}</tool_call>', call(0, "now")),
    ('<tool_call>{"arguments":{"city":"A"},"name":"get_weather"}</tool_call>', call(0, "get_weather", '{"city":"A"}')),
    (r'<tool_call>{"name":"get_weather","arguments":"{\"city\":\"A\"}"}</tool_call>', call(0, "get_weather", '{"city":"A"}')),
    (
        '<tool_call>{"name":"get_weather","arguments":{"city":"a</tool_call>b"}}</tool_call>',
        call(0, "get_weather", '{"city":"a</tool_call>b"}'),
    ),
    (
        r'<tool_call>{"name":"get_weather","arguments":{"opts":{"a":"}\"{"}}}</tool_call>',
        call(0, "get_weather", r'{"opts":{"a":"}\"{"}}'),
    ),
    (
        r'<tool_call>{"name":"get_weather","arguments":{"city":"\u00e9\ud83d\ude00"}}</tool_call>',
        call(0, "get_weather", r'{"city":"\u00e9\ud83d\ude00"}'),
    ),
    ('<tool_call>{"name":"zzz","arguments":{"a":1}}</tool_call>', call(0, "zzz", '{"a":1}')),
    ("<tool_call>{oops}</tool_call>", [Content("<tool_call>{oops}</tool_call>")]),
    (
        '<tool_call>{"name":"now","arguments":{}}</tool_call><tool_call>nope</tool_call>',
        [*call(0, "now"), Content("<tool_call>nope</tool_call>")],
    ),
    ('<tool_call>{"name":"get_weather","arguments":{"city":"Pa', cut_call(0, "get_weather", '{"city":"Pa')),
    ('<tool_call>{"name":"get_w', [Content('<tool_call>{"name":"get_w')]),
    ('<tool_call>{"name":"now","arguments":{}}', call(0, "now")),
    ('<tool_call>{"name":"now","arguments":{}}</tool_call>done', [*call(0, "now"), Content("done")]),
    (
        '<tool_call>[{"name":"now","arguments":{}},{"name":"now","arguments":{}}]</tool_call>',
        [*call(0, "now"), *call(1, "now")],
    ),
    # Beyond the plain cases.
    ('<tool_call>{"name":"now","arguments":null}</tool_call>', call(0, "now")),
    ('<tool_call>{"name":"now","parameters":{"a":1}}</tool_call>', call(0, "now", '{"a":1}')),
    ('<tool_call>{"id":[1,"x"],"name":"now","arguments":{}, "type":"function"}</tool_call>', call(0, "now")),
    ('<tool_call>{"name":"now","arguments":{}}\n{"name":"now"}</tool_call>', [*call(0, "now"), *call(1, "now")]),
    ('<tool_call>{"name":"now"}<tool_call>{"name":"now"}', [*call(0, "now"), *call(1, "now")]),
    ('Hi \n<tool_call>{"name":"now"}</tool_call> \n', [Content("Hi"), *call(0, "now")]),
    ('Hi\n<tool_call>{"name":"now"}</tool_call>\nso', [Content("Hi"), *call(0, "now"), Content("\nso")]),
    ('\n<tool_call>{"name":"now"}</tool_call>\nso \n', [*call(0, "now"), Content("so \n")]),
    ("Hi \n<tool_call>nope </tool_call> \n", [Content("Hi \n<tool_call>nope </tool_call> \n")]),
    ("a </tool_call> b", [Content("a </tool_call> b")]),
    ("<tool_call>[]</tool_call>", [Content("<tool_call>[]</tool_call>")]),
    ('<tool_call><tool_call>{"name":"now"}</tool_call>', [Content("<tool_call>"), *call(0, "now")]),
    ('<tool_call>{"name":""}</tool_call>', [Content('<tool_call>{"name":""}</tool_call>')]),
    ('<tool_call>{"name":"a\\nb"}', [Content('<tool_call>{"name":"a\\nb"}')]),
    (
        '<tool_call>{"name":"now","arguments":{"a":[}}</tool_call><tool_call>{"name":"now"}</tool_call>',
        [*cut_call(0, "now", '{"a":[}}'), *call(1, "now")],
    ),
    ('<tool_call>{"arguments":{"a":1', [Content('<tool_call>{"arguments":{"a":1')]),
    ('<tool_call>{"name":"' + "n" * 300 + '"}', [Content('<tool_call>{"name":"' + "n" * 300 + '"}')]),
    ('<tool_call>{"name":"now","arguments":{}\n</tool_call>', call(0, "now")),
    ('<tool_call>{"name":"now","arguments":{}\n</tool_call>so', [*call(0, "now"), Content("so")]),
    ('<tool_call>{"name":"now","arguments":{} so', [*call(0, "now"), Content("so")]),
    ('<tool_call>{"name":"now","arguments":{}}</tool', [*call(0, "now"), Content("</tool")]),
]


LLAMA3: list[tuple[str, list[Event]]] = [
    (
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "A"}}; {"name": "now", "parameters": {}}',
        [*call(0, "get_weather", '{"city": "A"}'), *call(1, "now")],
    ),
    ('{"answer": 42}', [Content('{"answer": 42}')]),
    ('Sure: {"name": "now", "parameters": {}}', [Content('Sure: {"name": "now", "parameters": {}}')]),
    (
        '{"name": "get_weather", "parameters": {"city": "it\'s: \'x\'"}}',
        call(0, "get_weather", '{"city": "it\'s: \'x\'"}'),
    ),
    ('\n{"type": "function", "name": "now", "parameters": {}}\n', call(0, "now")),
    ('{"parameters": {"city": "A"}, "name": "get_weather"}', call(0, "get_weather", '{"city": "A"}')),
    ('{"name": "Ada"}', [Content('{"name": "Ada"}')]),
    (' {"name": "Ada", "age": 36}\n', [Content(' {"name": "Ada", "age": 36}\n')]),
    ('{"name": ["Ada"]}', [Content('{"name": ["Ada"]}')]),
    ("<|python_tag|>print(1)", [Content("<|python_tag|>print(1)")]),
    ('Well. <|python_tag|>{"name": "now"}', [Content("Well."), *call(0, "now")]),
    ('{"name": "now", "parameters": {}}; {"answer": 42}', [*call(0, "now"), Content('; {"answer": 42}')]),
    ('{"name": "now", "parameters": {}} <|python_tag|>{"name": "now"}, ', [*call(0, "now"), *call(1, "now")]),
    ('{"name": "get_weather", "parameters": {"city": "A', cut_call(0, "get_weather", '{"city": "A')),
]

PYTHONIC: list[tuple[str, list[Event]]] = [
    ('[get_weather(city="A", days=2), now()]', [*call(0, "get_weather", '{"city": "A", "days": 2}'), *call(1, "now")]),
    ('[get_weather(city="a]b)")]', call(0, "get_weather", '{"city": "a]b)"}')),
    ("[1, 2]", [Content("[1, 2]")]),
    ("The list is [1]", [Content("The list is [1]")]),
    ("The list is [now()]", [Content("The list is [now()]")]),
    (
        '[get_weather(opts={"k": [None, True]}, days=-1)]',
        call(0, "get_weather", '{"opts": {"k": [null, true]}, "days": -1}'),
    ),
    (" <|python_start|>[now()]<|python_end|>\n", call(0, "now")),
    ("Let me see.\n<|python_start|>[now()]<|python_end|>", [Content("Let me see."), *call(0, "now")]),
    ("[a.b-c(x=null, y=[true, false], z=(1, 2.5))]", call(0, "a.b-c", '{"x": null, "y": [true, false], "z": [1, 2.5]}')),
    ("""[get_weather(city='''it's "A"''', days=+1)]""", call(0, "get_weather", r'{"city": "it\'s \"A\"", "days": 1}'.replace(r"\'", "'"))),
    (r"[get_weather(city='it\'s \u00e9', opts={'': ''})]", call(0, "get_weather", '{"city": "it\'s é", "opts": {"": ""}}')),
    (
        "[f(from='a', class=3, my-key=\"x\", None=None, True=true, in=[1, {'in': 2}], lambda=-1.5)]",
        call(0, "f", '{"from": "a", "class": 3, "my-key": "x", "None": null, "True": true, "in": [1, {"in": 2}], "lambda": -1.5}'),
    ),
    (
        "[f(Content-Type='a,b)', $top = 3 , @id='', 2fa=True, größe=1,), now()]",
        [
            *call(0, "f", '{"Content-Type": "a,b)", "$top": 3, "@id": "", "2fa": true, "größe": 1}'),
            *call(1, "now"),
        ],
    ),
    ("<function_calls>\nf(to='x',\n  import={'a-b': (1,\n2)})\n</function_calls>", call(0, "f", '{"to": "x", "import": {"a-b": [1, 2]}}')),
    ("[f(from='a'), f(from=b)]", [*call(0, "f", '{"from": "a"}'), Content("f(from=b)]")]),
    *(
        (f"[now({text})]", [Content(f"[now({text})]")])
        for text in (
            "from=1, from=2",
            "-x=1",
            ".x=1",
            "a b=1",
            "=1",
            ",",
            "a=1,,",
            "a=",
            "a=,b=1",
            "a=1 b=2",
            "a==1",
            "a!=1",
            "a>=1",
            "a:=1",
            "a=*b",
            "a=b=1",
            "**{'a': 1}",
            "a=1]+[2",
            "a=x for x in y",
            "a=lambda x, b: 1",
            "a=f(from=1)",
            "a={1, 2}",
            "class",
            "a=1 # , b",
        )
    ),
    ("[now(), now(]", [*call(0, "now"), Content("now(]")]),
    ("[now() or what]", [Content("[now() or what]")]),
    ("[now(x)]", [Content("[now(x)]")]),
    ("[now(x=y)]", [Content("[now(x=y)]")]),
    ("[now(x=1e999)]", [Content("[now(x=1e999)]")]),
    ("[now(x=[1)]", [Content("[now(x=[1)]")]),
    ("[now()", [Content("[now()")]),
    ("[]", [Content("[]")]),
    ("[see](http://x)", [Content("[see](http://x)")]),
    (
        '<function_calls>\nget_weather(city="A")\nnow()\n</function_calls> Wait.',
        [*call(0, "get_weather", '{"city": "A"}'), *call(1, "now"), Content("Wait.")],
    ),
    ("<function_calls></function_calls>", [Content("<function_calls></function_calls>")]),
]

QWEN3_CODER: list[tuple[str, list[Event]]] = [
    (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [*call(0, "get_weather", '{"city": "Paris", "days": 2}'), *call(1, "now")],
    ),
    (
        "<function=get_weather>\n<parameter=city>\n123\n</parameter>\n<parameter=days>\nx\n</parameter>\n</function>",
        call(0, "get_weather", '{"city": "123", "days": "x"}'),
    ),
    ("<function=get_weather><parameter=city>null</parameter></function>", call(0, "get_weather", '{"city": "null"}')),
    (
        "<function=get_weather>\n<parameter=city>\nA\n<parameter=days>\n3\n</parameter>\n</function>",
        call(0, "get_weather", '{"city": "A", "days": 3}'),
    ),
    (
        "<function=get_weather>\n<parameter=city>\n\nl1\n\nl2\n\n</parameter>\n</function>",
        call(0, "get_weather", r'{"city": "\nl1\n\nl2\n"}'),
    ),
    ("<function=get_weather><parameter=city>\nl1\n\nl2\n</parameter></function>", call(0, "get_weather", r'{"city": "l1\n\nl2"}')),
    ("<function=get_weather><parameter=city></parameter></function>", call(0, "get_weather", '{"city": ""}')),
    ('<function=get_weather><parameter=city>"é"\\</parameter></function>', call(0, "get_weather", r'{"city": "\"é\"\\"}')),
    ("Hi\n<function=now\n</function></tool_call>\n", [Content("Hi"), *call(0, "now")]),
    (
        "<tool_call><function=get_weather><parameter=city>\nA\n<function=now></function>",
        [*call(0, "get_weather", '{"city": "A"}'), *call(1, "now")],
    ),
    (
        "<function=get_weather>\nwell\n<parameter=city>A</parameter></function>!",
        [*call(0, "get_weather", '{"city": "A"}'), Content("well\n!")],
    ),
    ("<function=get_weather><parameter=city>\nPar", cut_call(0, "get_weather", '{"city": "Par')),
    ("<function=get_weather><parameter=days>\n12", cut_call(0, "get_weather", '{"days": ')),
    ("<tool_call>\n<fun", [Content("<tool_call>\n<fun")]),
    ("<tool_call>\n{}</tool_call>", [Content("<tool_call>\n{}</tool_call>")]),
    ("<function=>x", [Content("<function=>x")]),
    ("a <b> </function> c", [Content("a <b> </function> c")]),
]

MISTRAL: list[tuple[str, list[Event]]] = [
    (
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "A]"}}]',
        [*call(0, "now"), *call(1, "get_weather", '{"city": "A]"}')],
    ),
    ('[TOOL_CALLS][{"name": "now", "arguments": {}}]', call(0, "now")),
    (
        'ok[TOOL_CALLS]get_weather[ARGS]{"city": "A"}[TOOL_CALLS]now[ARGS]{}',
        [Content("ok"), *call(0, "get_weather", '{"city": "A"}'), *call(1, "now")],
    ),
    ("[TOOL_CALLS]now{}", call(0, "now")),
    ("see [1] and [2]", [Content("see [1] and [2]")]),
    ('[TOOL_CALLS] {"name": "now", "arguments": "{}"} so', [*call(0, "now"), Content("so")]),
    ("[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}", call(0, "now", id="a1b2c3d4e")),
    ("[TOOL_CALLS]now[CALL_ID]12[ARGS] {}", call(0, "now")),
    ("[TOOL_CALLS]now[ARGS][TOOL_CALLS]now[ARGS]{}", [*call(0, "now"), *call(1, "now")]),
    ("[TOOL_CALLS]now[TOOL_CALLS]now[ARGS]{}", [Content("[TOOL_CALLS]now"), *call(0, "now")]),
    ("[TOOL_CALLS]now[ARGS]oops", cut_call(0, "now", "oops")),
    ("[TOOL_CALLS] [1, 2]", [Content("[TOOL_CALLS] [1, 2]")]),
    ("[TOOL_CALLS]nam", [Content("[TOOL_CALLS]nam")]),
]

DEEPSEEK_V3: list[tuple[str, list[Event]]] = [
    (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [*call(0, "get_weather", '{"city": "Paris", "days": 2}'), *call(1, "now")],
    ),
    ("Hm\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n<｜tool▁call▁end｜>\nok", [Content("Hm"), *call(0, "now"), Content("\nok")]),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>now```json\n{}", call(0, "now")),
    ("<｜tool▁call▁begin｜>nope<｜tool▁call▁end｜>", [Content("<｜tool▁call▁begin｜>nope<｜tool▁call▁end｜>")]),
    ("<｜tool▁calls▁begin｜>nope", [Content("<｜tool▁calls▁begin｜>nope")]),
]

DEEPSEEK_V31: list[tuple[str, list[Event]]] = [
    (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [*call(0, "get_weather", '{"city": "Paris", "days": 2}'), *call(1, "now")],
    ),
    ("<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>", call(0, "now")),
    (
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>oops<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}",
        [*cut_call(0, "now", "oops"), *call(1, "now")],
    ),
    (
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>nope<｜tool▁call▁end｜>",
        [*call(0, "now"), Content("<｜tool▁call▁begin｜>nope<｜tool▁call▁end｜>")],
    ),
]

GLM45: list[tuple[str, list[Event]]] = [
    (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>123</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        [*call(0, "get_weather", '{"city": "123", "days": 2}'), *call(1, "now")],
    ),
    ("<tool_call>now</tool_call>", call(0, "now")),
    (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>A\n</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call>!",
        [*call(0, "get_weather", r'{"city": "A\n", "days": 2}'), Content("!")],
    ),
    (
        r"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>A</arg_value>\n</tool_call>",
        call(0, "get_weather", '{"city": "A"}'),
    ),
    ("<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa", cut_call(0, "get_weather", '{"city": "Pa')),
    ("<tool_call>now<tool_call>now</tool_call>", [Content("<tool_call>now"), *call(0, "now")]),
    ("the <tool_call> tag\nis for tools", [Content("the <tool_call> tag\nis for tools")]),
    ('<tool_call>{"name": "now"}</tool_call>', [Content('<tool_call>{"name": "now"}</tool_call>')]),
    ("<tool_call>now", [Content("<tool_call>now")]),
]

KIMI_K2: list[tuple[str, list[Event]]] = [
    (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:4<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:5<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        [
            *call(0, "get_weather", '{"city": "Paris", "days": 2}', "functions.get_weather:4"),
            *call(1, "now", id="functions.now:5"),
        ],
    ),
    ("Hi <|tool_call_begin|>now:0<|tool_call_argument_begin|> {}<|tool_call_end|>", [Content("Hi"), *call(0, "now")]),
    (
        "<|tool_call_begin|>functions.ge<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}",
        call(0, "now", id="functions.now:0"),
    ),
    ("<|tool_call_begin|>0<|tool_call_argument_begin|>{}", [Content("<|tool_call_begin|>0<|tool_call_argument_begin|>{}")]),
    ("<|tool_call_begin|>a<|tool_call_begin|>b", [Content("<|tool_call_begin|>a<|tool_call_begin|>b")]),
    ("<|tool_call_begin|>functions.now:0<|tool_call_end|>.", [*call(0, "now", id="functions.now:0"), Content(".")]),
    (
        "<|tool_calls_section_begin|><|tool_calls_section_end|>",
        [Content("<|tool_calls_section_begin|><|tool_calls_section_end|>")],
    ),
]

JSON_ARRAYS: list[tuple[str, list[Event]]] = [
    (
        '[{"name": "now", "parameters": {}}, {"name": "get_weather", "parameters": {"city": "]"}}]\n',
        [*call(0, "now"), *call(1, "get_weather", '{"city": "]"}')],
    ),
    ('[{"name": "get_weather", "parameters": {"city": "A', cut_call(0, "get_weather", '{"city": "A')),
    ("no array", [Content("no array")]),
    (" [] ", [Content(" [] ")]),
    ('[{"name": "now", "parameters": {}}] and so on', [*call(0, "now"), Content("and so on")]),
]

EXAMPLES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_CODER,
    "mistral": MISTRAL,
    "deepseekv3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK_V31,
    "glm45": GLM45,
    "kimi_k2": KIMI_K2,
}


EACH_FORM_FIRST = sorted(((number, name) for name, examples in EXAMPLES.items() for number in range(len(examples))))


@pytest.mark.matrix(gate=2 * len(EXAMPLES))
@pytest.mark.parametrize(("name", "text", "events"), [(name, *EXAMPLES[name][number]) for number, name in EACH_FORM_FIRST])
def test_every_way_of_cutting_gives_the_same_calls_and_content(name: str, text: str, events: list[Event]) -> None:
    always(lambda: tool_parser(name), text, events)


@pytest.mark.parametrize(("text", "events"), JSON_ARRAYS)
def test_a_forced_array_of_calls_is_read_as_calls(text: str, events: list[Event]) -> None:
    def array() -> ChoiceParser:
        parser = make_parser(None, Start.CONTENT, JSON_ARRAY, TOOLS)
        assert parser is not None
        return parser

    always(array, text, events)


def test_a_number_as_header_means_the_only_tool() -> None:
    parser = make_parser(None, Start.CONTENT, KIMI_K2_FORMAT, {"now": {}})
    assert parser is not None
    assert parsed(parser, ["<|tool_call_begin|>0<|tool_call_argument_begin|>{}<|tool_call_end|>"]) == call(0, "now")
