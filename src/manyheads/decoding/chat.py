"""Chat: messages rendered by the model's template to the text that it continues."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from manyheads.decoding.request import tokenizer_of
from manyheads.errors import InputError, MissingPackageError

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
# Templates use these by name.
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

Message = Mapping[str, Any]


def apply_chat(
    messages: Sequence[Message],
    tokenizer_config: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """A conversation as text, by the template in a tokenizer_config.json.

    Each message has a role and a content. `add_generation_prompt` ends the text where the model's
    answer begins; other variables of the template are keyword arguments.

    >>> template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    >>> config = {"chat_template": template, "eos_token": "</s>"}
    >>> apply_chat([{"role": "user", "content": "Hello!"}], config)
    'user: Hello!</s>'
    """
    if not messages:
        raise InputError("the conversation is empty", "give at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise InputError(
                f"a message must have a role, got {message!r}",
                'use {"role": "user", "content": "Hello!"}',
            )
    template = _template(tokenizer_config, with_tools=tools is not None)
    return _render(
        template,
        {
            **_special_tokens(tokenizer_config),
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        },
    )


def chat_prompt(model: Any, messages: Sequence[Message], **more: Any) -> list[int]:
    """The token ids of a conversation, ready for `generate(model, [ids])`."""
    tokenizer = tokenizer_of(model, "a conversation")
    text = apply_chat(messages, tokenizer_config_of(model), **more)
    # The template itself adds the beginning-of-text token.
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def tokenizer_config_of(model: Any) -> dict[str, Any]:
    """The tokenizer_config.json of a loaded model; a template in its own file takes precedence."""
    files: Mapping[str, bytes] = getattr(model, "side_files", None) or {}
    config: dict[str, Any] = {}
    if CONFIG_FILE in files:
        try:
            config = json.loads(files[CONFIG_FILE])
        except ValueError as error:
            raise InputError(f"{CONFIG_FILE} is not valid JSON, {error}", "fix the file") from None
    if TEMPLATE_FILE in files:
        config["chat_template"] = files[TEMPLATE_FILE].decode("utf-8")
    return config


def _template(config: Mapping[str, Any], *, with_tools: bool) -> str:
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {each["name"]: each["template"] for each in template}
        wanted = "tool_use" if with_tools and "tool_use" in named else "default"
        template = named.get(wanted)
    if not isinstance(template, str):
        raise InputError(
            "the model has no chat template",
            f"use a model whose {CONFIG_FILE} has chat_template or whose folder has "
            f"{TEMPLATE_FILE}, or pass a plain prompt",
        )
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """A token is a string, or an object that has it as its content."""
    tokens = {}
    for name in (f"{kind}_token" for kind in SPECIAL):
        token = config.get(name)
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _render(template: str, variables: Mapping[str, Any]) -> str:
    try:
        from jinja2.exceptions import TemplateError, TemplateSyntaxError
    except ImportError:
        raise MissingPackageError("a chat template", "jinja2") from None
    try:
        text: str = _environment().from_string(template).render(variables)
    except TemplateSyntaxError as error:
        raise InputError(
            f"the model's chat template cannot be read, {error.message} in line {error.lineno}",
            "fix chat_template in its tokenizer_config.json, or its chat_template.jinja",
        ) from None
    except TemplateError as error:
        raise InputError(
            f"the model's chat template refuses these messages, {error}", "change the messages"
        ) from None
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise InputError(
            f"the model's chat template fails on these messages, {error}",
            "give each message a role and a content",
        ) from None
    return text


@cache
def _environment() -> Any:
    """A sandbox: a template is an untrusted program and must not change or reach anything."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """Templates for training mark the model's own words; here they are plain text."""

        tags = {"generation"}  # noqa: RUF012  jinja2 declares it without ClassVar

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    # The filter of jinja2 would escape for HTML.
    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
