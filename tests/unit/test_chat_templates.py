"""Small templates with the features that those of Llama 3, Qwen, Mistral and SmolLM3 use."""

import json
from datetime import datetime
from typing import Any

import pytest

from router.chat_template import ChatTemplate, TemplateError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Météo <b>"}}
CALL = {"function": {"name": "weather", "arguments": {"city": "Žižkov"}}}
SYSTEM = {"role": "system", "content": " Be brief. "}


def render(source: str, messages: list[dict[str, Any]], prompt: bool = True, **kwargs: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(messages, prompt, kwargs)


def chat(*texts: str) -> list[dict[str, Any]]:
    """Messages of the user and the assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


# --- as Llama 3: a date unless one is given, the system message taken out, tools with indents -----

DATED = """\
{%- if day is not defined and strftime_now is defined %}
  {%- set day = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
  {%- set system, rest = messages[0]['content'] | trim, messages[1:] %}
{%- else %}
  {%- set system, rest = '', messages %}
{%- endif %}
{{- bos_token }}[{{ day }}] {{ system }}
{% for tool in tools or [] %}
  {{- tool | tojson(indent=2) }}
{% endfor %}
{%- for m in rest %}
  {%- if 'tool_calls' in m %}
    {%- if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
    {{- '=> ' ~ m.tool_calls[0].function.name ~ m.tool_calls[0].function.arguments | tojson }}
  {%- elif m.role == 'tool' and m.content is iterable %}
    {{- '<= ' + m.content | tojson }}
  {%- else %}
    {{- m.role + ': ' + m['content'] | trim }}
  {%- endif %}
  {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}
"""


def test_a_date_and_a_system_message() -> None:
    today = datetime.now().strftime("%d %b %Y")
    expected = f"<s>[{today}] Be brief.\nuser: Hi</s>assistant: "
    assert render(DATED, [SYSTEM, *chat(" Hi ")]) == expected
    assert render(DATED, chat("Hi"), prompt=False, day="1 May") == "<s>[1 May] \nuser: Hi</s>"


def test_tools_and_what_they_say() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages = [*chat("Hi"), called, {"role": "tool", "content": "21 °C"}]
    text = render(DATED, messages, tools=[TOOL], day="1 May")
    assert text == (
        f"<s>[1 May] \n{json.dumps(TOOL, indent=2, ensure_ascii=False)}\n"
        'user: Hi</s>=> weather{"city": "Žižkov"}</s><= "21 °C"</s>assistant: '
    )
    called["tool_calls"] = [CALL, CALL]
    with pytest.raises(TemplateError, match="^one call at a time$"):
        render(DATED, messages)


# --- as Qwen 3: a namespace, messages backwards, old thoughts cut out -----------------------------

THOUGHTFUL = """\
{%- set seen = namespace(last=-1) %}
{%- for m in messages[::-1] %}
  {%- if seen.last < 0 and m.role == 'user' and m.content is string
      and not m.content.startswith('<result>') %}
    {%- set seen.last = messages | length - 1 - loop.index0 %}
  {%- endif %}
{%- endfor %}
{%- for m in messages %}
  {%- set text = m.content %}
  {%- if m.role == 'assistant' and loop.index0 < seen.last and '</think>' in text %}
    {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
  {%- endif %}
  {%- if m.role == 'tool' and (loop.first or messages[loop.index0 - 1].role != 'tool') %}
    {{- '<tools>' }}
  {%- endif %}
  {{- '<' ~ m.role ~ '>' ~ text.rstrip('\\n') }}
  {%- for call in m.tool_calls or [] %}
    {%- if call.function %}{% set call = call.function %}{% endif %}
    {%- if call.arguments is string %}{{ call.arguments }}
    {%- else %}{{ call.arguments | tojson }}{% endif %}
  {%- endfor %}
  {%- if m.role == 'tool' and (loop.last or loop.nextitem.role != 'tool') %}{{ '</tools>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<assistant>' }}
  {%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- endif %}
"""


def test_old_thoughts_are_left_out() -> None:
    text = render(THOUGHTFUL, chat("Hi", "<think>hm</think>\n\nHello\n", "Bye"))
    assert text == "<user>Hi<assistant>Hello<user>Bye<assistant>"
    text = render(THOUGHTFUL, chat("Hi", "<think>hm</think>\n\nHello"), prompt=False)
    assert text == "<user>Hi<assistant><think>hm</think>\n\nHello"
    text = render(THOUGHTFUL, chat("Hi"), enable_thinking=False)
    assert text == "<user>Hi<assistant><think></think>"
    assert render(THOUGHTFUL, chat("Hi"), enable_thinking=True) == "<user>Hi<assistant>"


@pytest.mark.parametrize("arguments", [{"city": "Žižkov"}, '{"city": "Žižkov"}'])
def test_results_stand_together(arguments: object) -> None:
    call = {"function": {"name": "weather", "arguments": arguments}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    results = [{"role": "tool", "content": text} for text in ("21", "22")]
    text = render(THOUGHTFUL, [*chat("Hi"), called, *results])
    assert text == (
        '<user>Hi<assistant>{"city": "Žižkov"}<tools><tool>21<tool>22</tools><assistant>'
    )


# --- as Mistral: filters over the messages, roles that must alternate, slices of JSON -------------

STRICT = """\
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set turn = namespace(number=0) %}
{%- for m in messages | rejectattr('role', 'equalto', 'tool')
    | selectattr('tool_calls', 'undefined') %}
  {%- if (m.role == 'user') != (turn.number % 2 == 0) %}
    {{- raise_exception('roles must alternate, not ' + m.role + ' at ' ~ turn.number) }}
  {%- endif %}
  {%- set turn.number = turn.number + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for m in messages %}
  {%- if m == users[-1] and tools is not none %}
    {%- for name, value in tools[0].function.items() if name != 'description' %}
      {{- '[' + name + '=' + (value if value is string else value | tojson) + ']' }}
    {%- endfor %}
  {%- endif %}
  {%- if m.tool_calls is defined and m.tool_calls is not none %}
    {{- (m.tool_calls[0].function | tojson)[:-1] + ', "id": 1}' }}
  {%- else %}
    {{- ('[INST] ' + m.content + '[/INST]') if m.role == 'user' else ' ' + m.content | string }}
    {%- if m.role == 'assistant' %}{{ eos_token }}{% endif %}
  {%- endif %}
{%- endfor %}
"""


def test_roles_that_alternate() -> None:
    text = render(STRICT, chat("Hi", "Hello", "Bye"))
    assert text == "<s>[INST] Hi[/INST] Hello</s>[INST] Bye[/INST]"
    with pytest.raises(TemplateError, match="^roles must alternate, not user at 1$"):
        render(STRICT, [*chat("Hi"), *chat("Bye")])


def test_calls_and_their_results_are_no_turns() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages = [*chat("Hi"), called, {"role": "tool", "content": "21"}]
    assert render(STRICT, messages, tools=[TOOL]) == (
        "<s>[name=weather][INST] Hi[/INST]"
        '{"name": "weather", "arguments": {"city": "Žižkov"}, "id": 1} 21'
    )


# --- as SmolLM3 and others: macros, loop controls, marks for training -----------------------------


def test_macros_loop_controls_and_marks() -> None:
    source = (
        "{%- macro say(who, text) -%}<{{ who }}>{{ text.replace('/no_think', '').rstrip() }}"
        "{%- endmacro -%}"
        "{%- for m in messages -%}"
        "{%- if m.role == 'system' %}{% continue %}{% endif -%}"
        "{%- if m.content == 'stop' %}{% break %}{% endif -%}"
        "{%- if m.role == 'user' %}{{ say('u', m.content) }}"
        "{%- else %}{% generation %}{{ say('a', m.content) }}{% endgeneration %}{% endif -%}"
        "{%- endfor -%}"
        "{{ xml_tools | default('none') }}{{ '%02d' | format(7) }}"
    )
    messages = [SYSTEM, *chat("Hi /no_think", "Hello", "stop", "never")]
    assert render(source, messages) == "<u>Hi<a>Hellonone07"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("['<é>', 1.5, none] | tojson", '["<é>", 1.5, null]'),
        ("'é' | tojson(ensure_ascii=True)", '"\\u00e9"'),
        ("{'b': 1, 'a': 2} | tojson(sort_keys=True)", '{"a": 2, "b": 1}'),
        ("[1, 2] | tojson(separators=(',', ':'))", "[1,2]"),
        ("messages | map(attribute='role') | join(',')", "user,assistant"),
        ("messages[-1].content | upper", "HELLO"),
        ("(messages | last).role in ['user', 'assistant']", "True"),
    ],
)
def test_expressions(expression: str, expected: str) -> None:
    assert render("{{ " + expression + " }}", chat("Hi", "Hello")) == expected


def test_the_conversation_cannot_be_changed() -> None:
    with pytest.raises(TemplateError, match="unsafe"):
        render("{% set _ = messages[0].update({'role': 'x'}) %}", chat("Hi"))
