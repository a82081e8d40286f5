"""Chat: messages rendered by the model's template to the text that it continues."""

import atexit
import json
import marshal
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from manyheads.decoding import request, template_worker
from manyheads.errors import InputError, MissingPackageError
from manyheads.models.build import Model
from manyheads.tokenizers import surrogates_refused

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
# Templates use these by name.
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
FIX = "fix chat_template in its tokenizer_config.json, or its chat_template.jinja"
# Seconds until the process that renders is given up, however little of them it could compute.
PATIENCE = 20

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
    values: dict[str, Any] = {}
    for name in (f"{kind}_token" for kind in SPECIAL):
        token = tokenizer_config.get(name)
        # A token is a string, or an object that has it as its content.
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str):
            values[name] = content
    values["messages"] = [dict(message) for message in messages]
    values["tools"] = None if tools is None else [dict(tool) for tool in tools]
    values |= {"documents": None, "add_generation_prompt": add_generation_prompt, **variables}
    return _render(_template(tokenizer_config, with_tools=tools is not None), values)


def chat_prompt(model: Model, messages: Sequence[Message], **more: Any) -> list[int]:
    """The token ids of a conversation, ready for `generate(model, [ids])`."""
    tokenizer = request.tokenizer_of(model, "a conversation")
    text = apply_chat(messages, tokenizer_config_of(model), **more)
    # The template itself adds the beginning-of-text token.
    with surrogates_refused([text]):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def tokenizer_config_of(model: Model) -> dict[str, Any]:
    """The tokenizer_config.json of a loaded model; a template in its own file takes precedence."""
    files: Mapping[str, bytes] = getattr(model, "side_files", None) or {}
    config: dict[str, Any] = {}
    if CONFIG_FILE in files:
        try:
            config = json.loads(files[CONFIG_FILE])
        except (ValueError, RecursionError) as error:
            raise InputError(f"{CONFIG_FILE} is not valid JSON, {error}", "fix the file") from None
        if not isinstance(config, dict):
            raise InputError(f"{CONFIG_FILE} must hold an object {{...}}", "fix the file")
    if TEMPLATE_FILE in files:
        try:
            config["chat_template"] = files[TEMPLATE_FILE].decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{TEMPLATE_FILE} is not UTF-8, {error}", "fix the file") from None
    return config


def _template(config: Mapping[str, Any], *, with_tools: bool) -> str:
    template = config.get("chat_template")
    if isinstance(template, list):
        pairs = [entry for entry in template if isinstance(entry, Mapping)]
        named = {str(entry.get("name")): entry.get("template") for entry in pairs}
        name = "tool_use" if with_tools and "tool_use" in named else "default"
        template = named.get(name)
    if not isinstance(template, str):
        raise InputError(
            "the model has no chat template",
            f"use a model whose {CONFIG_FILE} has chat_template or whose folder has "
            f"{TEMPLATE_FILE}, or pass a plain prompt",
        )
    return template


def _plain(value: Any) -> Any:
    """The same value without subclasses, which another process may not know."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


_LOCK = Lock()


@cache
def _worker(parent: int) -> "subprocess.Popen[bytes]":
    """The process that renders the templates of this one; a fork has a process of its own."""
    del parent
    command = [sys.executable, "-I", str(Path(__file__).with_name("template_worker.py"))]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(_stop, worker)
    assert worker.stdin is not None
    marshal.dump(sys.path, worker.stdin)
    return worker


def _stop(worker: "subprocess.Popen[bytes]") -> None:
    _worker.cache_clear()
    atexit.unregister(_stop)
    worker.kill()
    worker.communicate()


def _answer(worker: "subprocess.Popen[bytes]", task: bytes) -> tuple[str, str]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    timer = Timer(PATIENCE, worker.kill)
    timer.start()
    try:
        worker.stdin.write(task)
        worker.stdin.flush()
        outcome, text = marshal.load(worker.stdout)
    except (OSError, EOFError, ValueError, TypeError):
        _stop(worker)
        return "limit", ""
    except BaseException:
        _stop(worker)
        raise
    finally:
        timer.cancel()
    return outcome, text


def _render(template: str, variables: Mapping[str, Any]) -> str:
    """Render in a process of its own, which the system stops where it goes too far."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise MissingPackageError("a chat template", "jinja2") from None
    try:
        task = marshal.dumps((template, _plain(variables)))
    except (ValueError, RecursionError):
        raise InputError(
            "a chat template takes strings, numbers, lists and dictionaries",
            "convert the messages, tools and variables to these",
        ) from None
    with _LOCK:
        if _worker(os.getpid()).poll() is not None:
            _stop(_worker(os.getpid()))
        outcome, text = _answer(_worker(os.getpid()), task)
    first = text.partition("\n")[0][:300]
    match outcome:
        case "text":
            return str(text)
        case "syntax":
            problem, remedy = f"cannot be read, {first}", FIX
        case "refused":
            problem, remedy = f"refuses these messages, {first}", "change the messages"
        case "failed":
            problem = f"fails on these messages, {first}"
            remedy = "give each message a role and a content, or fix the template"
        case _:
            size = f"{template_worker.MEMORY >> 20} MB or {template_worker.LONGEST_TEXT:,}"
            problem = f"takes more than {template_worker.CPU_SECONDS} seconds, {size} characters"
            remedy = FIX
    raise InputError(f"the model's chat template {problem}", remedy)
