"""The process that renders a chat template, an untrusted program that may loop or fill memory.

It is run as a script and imports nothing of manyheads, so that it starts fast. From its input it
reads templates with their variables; to its output it writes what became of each.
"""

import json
import marshal
import sys
from contextlib import suppress
from datetime import datetime
from time import process_time
from typing import Any, NoReturn

CPU_SECONDS = 2
MEMORY = 2**29
LONGEST_TEXT = 10_000_000


def limit_resources() -> None:
    """Let the system end this process if it takes too long or too much from now on."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        end = int(process_time()) + 1 + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))


def environment() -> Any:
    """A sandbox, in which a template changes and reaches nothing."""
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


def render(template: str, variables: dict[str, Any]) -> tuple[str, str]:
    """The outcome and the text, or what went wrong."""
    from jinja2.exceptions import TemplateError, TemplateSyntaxError

    try:
        text = environment().from_string(template).render(variables)
    except TemplateSyntaxError as error:
        return "syntax", f"{error.message} in line {error.lineno}"
    except TemplateError as error:
        return "refused", str(error)
    except MemoryError:
        return "limit", ""
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return ("text", text) if len(text) <= LONGEST_TEXT else ("limit", "")


def main() -> None:
    sys.path[:] = marshal.load(sys.stdin.buffer)
    with suppress(EOFError):
        while True:
            template, variables = marshal.load(sys.stdin.buffer)
            limit_resources()
            marshal.dump(render(template, variables), sys.stdout.buffer)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
