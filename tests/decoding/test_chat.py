"""Conversations are rendered as `transformers` renders them."""

import builtins
import json
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from manyheads import apply_chat, build, chat_prompt
from manyheads.errors import InputError, MissingPackageError
from tests.decoding.scripted import by_bytes
from tests.messages import refuses

CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
TOOLS = """{%- if tools %}
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{{ tool.function.parameters | tojson(indent=2) }}
{% endfor %}
</tools>
{%- endif %}
{% set state = namespace(turns=0) %}
{% for message in messages %}
{% if message.role == "tool" %}{% continue %}{% endif %}
{% set state.turns = state.turns + 1 %}
[{{ state.turns }}] {{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}
{{ call.name }}({{ call.arguments | tojson }})
{% endfor %}
{% endfor %}
"""
BRACKETS = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}
{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "tools": TOOLS, "brackets": BRACKETS}

USER = {"role": "user", "content": "  Größe <b>&</b> 東京?\n"}
TALK = [USER, {"role": "assistant", "content": "Yes. "}, {"role": "user", "content": "Why?"}]
CALLS = [
    {**USER, "tool_calls": [{"name": "now", "arguments": {"zone": "Köln", "at": [1, 2.5, None]}}]},
    {"role": "tool", "content": "12:00"},
]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"zone": "<ß>"}}}


def config(template: object) -> dict[str, Any]:
    return {
        "chat_template": template,
        "bos_token": {"content": "<s>", "special": True, "__type": "AddedToken"},
        "eos_token": "</s>",
        "pad_token": None,
    }


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [[USER], TALK, CALLS])
@pytest.mark.parametrize("tools", [None, [TOOL, TOOL]])
@pytest.mark.parametrize("opens", [True, False])
def test_templates_render_as_in_transformers(
    name: str, messages: list[Any], tools: list[Any] | None, opens: bool
) -> None:
    if name == "brackets" and messages is CALLS:
        messages = messages[:1]
    peer = PreTrainedTokenizerFast(
        tokenizer_object=by_bytes(),
        chat_template=TEMPLATES[name],
        bos_token="<s>",
        eos_token="</s>",
    )
    expected = peer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=opens, tokenize=False
    )
    result = apply_chat(messages, config(TEMPLATES[name]), tools=tools, add_generation_prompt=opens)
    assert result == expected
    assert len(result) > 20


def test_variables_of_a_template_are_passed_by_name() -> None:
    assert "Today Date: tomorrow\n" in apply_chat(TALK, config(HEADERS), date_string="tomorrow")
    assert len(apply_chat(TALK, config("{{ strftime_now('%Y-%m-%d') }}"))) == 10


def test_of_several_templates_the_fitting_one_is_used() -> None:
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    assert apply_chat(TALK, config(several)) == "plain"
    assert apply_chat(TALK, config(several), tools=[TOOL]) == "tools"


def chatty(**files: bytes) -> Any:
    model = build("gpt2", layers=1, width=8, heads=1, vocabulary=300, seed=0)
    model.tokenizer = by_bytes()
    model.side_files = files
    return model


def test_the_folder_of_a_model_brings_its_template() -> None:
    said = {"tokenizer_config.json": json.dumps(config("{{ eos_token }}")).encode()}
    assert chatty(**said).tokenizer.decode(chat_prompt(chatty(**said), TALK)) == "</s>"
    both = said | {"chat_template.jinja": "{{ bos_token }}ß".encode()}
    assert chatty().tokenizer.decode(chat_prompt(chatty(**both), TALK)) == "<s>ß"


def test_the_template_alone_decides_what_begins_a_text() -> None:
    model = chatty(**{"chat_template.jinja": b"{{ messages[0].role }}"})
    model.tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 256)]
    )
    assert chat_prompt(model, TALK) == by_bytes().encode("user").ids
    assert isinstance(model.tokenizer, Tokenizer)


def test_an_error_of_a_template_keeps_its_own_words() -> None:
    with pytest.raises(InputError, match=r"refuses .*, roles must alternate user/assistant"):
        apply_chat([USER, USER], config(BRACKETS))


def test_a_template_that_cannot_be_read_is_to_be_fixed_and_not_the_messages() -> None:
    with pytest.raises(InputError, match=r"cannot be read, .* in line 2: fix chat_template in"):
        apply_chat([USER], config("hello\n{% for m in %}"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for %}",
        "{{ messages[0].content + 1 }}",
        "{{ nobody.name }}",
    ],
)
def test_a_template_reaches_nothing_and_breaks_nothing(template: str) -> None:
    with pytest.raises(InputError, match="the model's chat template"):
        apply_chat(TALK, config(template))
    assert len(TALK) == 3


def test_a_missing_template_messages_or_jinja_are_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InputError, match=r"^the model has no chat template"):
        chat_prompt(chatty(), TALK)
    with refuses(InputError, "the conversation is empty: give at least one message."):
        apply_chat([], config(CHATML))
    with pytest.raises(InputError, match="a message must have a role"):
        apply_chat([{"content": "who?"}], config(CHATML))
    imports = builtins.__import__

    def without_jinja(name: str, *rest: Any) -> Any:
        if name.startswith("jinja2"):
            raise ImportError(name)
        return imports(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_jinja)
    message = "a chat template needs the package jinja2: run pip install jinja2."
    with refuses(MissingPackageError, message):
        apply_chat(TALK, config(CHATML))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' * 10 ** 10 }}", "characters"),
        ("{{ 'a' * 11000000 }}", "characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_template_that_goes_too_far_is_stopped(template: str, said: str) -> None:
    with refuses(InputError, "chat template", said):
        apply_chat(TALK, {"chat_template": template})


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        # A list of two to the power of sixty parts that share their memory.
        "{% set x = namespace(y=[]) %}{% for i in range(60) %}{% set x.y = [x.y, x.y] %}"
        "{% endfor %}{{ x.y }}",
    ],
)
def test_a_template_that_loops_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.decoding.chat.PATIENCE", 0.5)
    with refuses(InputError, "chat template takes more than 2 seconds"):
        apply_chat(TALK, {"chat_template": template})


def test_what_another_process_cannot_receive_is_refused() -> None:
    with refuses(InputError, "strings, numbers, lists and dictionaries"):
        apply_chat([{"role": "user", "content": object()}], {"chat_template": "a"})
