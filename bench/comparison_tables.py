"""The tables that compare us with others, in the README and the docs, from bench/results.

Texts of the rows are below, in English and Russian, with places for figures. `{NAME:.2f}` is a
figure of the row's file, `{version PACKAGE}` the version that it was measured with. A page has its
tables between marks, and `python bench/readme_table.py --write` renews what is between them.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["PAGES", "ROWS", "read", "renew", "write"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
LANGUAGES = ("en", "ru")
# In English and in Russian.
Text = tuple[str, str]
BLANK: Text = ("", "")
FASTER: Text = ("{NAME:.2f} times as fast", "в {NAME:.2f} раза быстрее")


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the file of its figures without the ending, and its cells."""

    file: str
    job: Text
    peer: Text
    result: Text
    script: str = ""


def _faster(name: str) -> Text:
    english, russian = (text.replace("NAME", name) for text in FASTER)
    return english, russian


ROWS = (
    Row(
        "encode-arm",
        ("encode texts with MiniLM", "эмбеддинги текстов, MiniLM"),
        ("sentence-transformers{version sentence-transformers}",) * 2,
        _faster("times sentence-transformers"),
        "encode.py",
    ),
    Row("encode-x86", BLANK, BLANK, _faster("times sentence-transformers")),
    Row("encode-x86-avx2", BLANK, BLANK, _faster("times sentence-transformers")),
    Row(
        "encode-arm",
        BLANK,
        ("onnxruntime{version onnxruntime}, float32",) * 2,
        _faster("times onnxruntime"),
        "encode.py",
    ),
    Row("encode-x86", BLANK, BLANK, _faster("times onnxruntime")),
    Row("encode-x86-avx2", BLANK, BLANK, _faster("times onnxruntime")),
    Row(
        "generate-x86",
        ("generate with GPT-2 small, one text", "генерация, GPT-2 small, один текст"),
        ("transformers{version transformers}",) * 2,
        (
            "{times transformers, by the clock:.2f} times as fast, at {share of limit:.0%} of the "
            "speed at which the weights can be read",
            "в {times transformers, by the clock:.2f} раза быстрее; "
            "{share of limit:.0%} скорости, с которой можно читать веса",
        ),
        "generate.py",
    ),
    Row(
        "generate-x86-avx2",
        BLANK,
        BLANK,
        (
            "{times transformers, by the clock:.2f} times as fast, at {share of limit:.0%}",
            "в {times transformers, by the clock:.2f} раза быстрее; {share of limit:.0%}",
        ),
    ),
    Row(
        "lens-arm",
        (
            "statistics of all 144 heads of GPT-2 small at 2,048 tokens",
            "статистики всех 144 голов GPT-2 small на 2 048 токенах",
        ),
        ("TransformerLens{version transformer-lens}, `run_with_cache`",) * 2,
        (
            "{MB:.0f} MB of extra memory and {core-seconds:.1f} core-seconds, compared with "
            "{TransformerLens, GB:.2f} GB and {TransformerLens, core-seconds:.1f}",
            "{MB:.0f} МБ дополнительной памяти и {core-seconds:.1f} с процессорного времени против "
            "{TransformerLens, GB:.2f} ГБ и {TransformerLens, core-seconds:.1f} с",
        ),
        "lens.py",
    ),
    Row(
        "lens-x86",
        BLANK,
        BLANK,
        (
            "{MB:.0f} MB and {core-seconds:.1f} core-seconds, compared with "
            "{TransformerLens, GB:.2f} GB and {TransformerLens, core-seconds:.1f}",
            "{MB:.0f} МБ и {core-seconds:.1f} с против "
            "{TransformerLens, GB:.2f} ГБ и {TransformerLens, core-seconds:.1f} с",
        ),
    ),
    Row(
        "report-arm",
        (
            "a page to look at 12 x 12 heads on 128 tokens",
            "страница с 12 x 12 головами на 128 токенах",
        ),
        ("BertViz{version bertviz}, head view",) * 2,
        (
            "{128 tokens, MB:.2f} MB with the largest weights of each token, predictions, kinds, "
            "statistics and the worth of each head, compared with {128 tokens, BertViz, MB:.1f} MB "
            "of weights ([more](guides/inspect.md#how-large-and-how-long))",
            "{128 tokens, MB:.2f} МБ: наибольшие веса каждого токена, предсказания, типы, "
            "статистики и вклад каждой головы; у BertViz {128 tokens, BertViz, MB:.1f} МБ весов "
            "([подробнее](inspect.md))",
        ),
        "report.py",
    ),
    Row(
        "atlas-arm",
        (
            "one pass over a corpus for an atlas, texts of 8,192 tokens",
            "один проход по корпусу для атласа, тексты по 8 192 токена",
        ),
        (
            "eager attention of transformers{version transformers}, six metrics from whole "
            "patterns",
            "transformers{version transformers}, eager, шесть метрик по полным матрицам внимания",
        ),
        (
            "{8192, times eager:.2f} times as fast in {8192, GB:.2f} GB, compared with "
            "{8192, eager, GB:.2f} GB; {2048, times eager:.2f} times at 2,048 tokens, and "
            "{512, times eager:.2f} at 512, where the pass measures far more",
            "в {8192, times eager:.2f} раза быстрее, {8192, GB:.2f} ГБ памяти против "
            "{8192, eager, GB:.2f} ГБ; на 2 048 токенах в {2048, times eager:.2f} раза, на 512 — "
            "в {512, times eager:.2f} раза, но проход измеряет гораздо больше",
        ),
        "atlas.py",
    ),
    Row(
        "encode-h200",
        (
            "ModernBERT-base, texts of 512 and of 8,192 tokens",
            "ModernBERT-base, тексты по 512 и по 8 192 токена",
        ),
        ("transformers{version transformers}, SDPA",) * 2,
        (
            "{512 equal, times transformers:.2f} and {8192 equal, times transformers:.2f} "
            "times as fast",
            "в {512 equal, times transformers:.2f} и в {8192 equal, times transformers:.2f} "
            "раза быстрее",
        ),
        "encode.py",
    ),
    Row(
        "encode-h200",
        ("the same, mixed lengths up to 8,192", "то же, тексты разной длины до 8 192"),
        (
            "transformers{version transformers}, SDPA, padded to the longest",
            "transformers{version transformers}, SDPA, паддинг до самого длинного",
        ),
        _faster("8192 mixed, times transformers"),
        "encode.py",
    ),
    Row(
        "generate-h200",
        (
            "generate with a Llama shape of 1.24 billion weights, one text",
            "генерация, конфигурация Llama с 1,24 млрд параметров, один текст",
        ),
        (
            "transformers{version transformers}, `generate` with its defaults",
            "transformers{version transformers}, `generate` с настройками по умолчанию",
        ),
        (
            "{1, tokens/s:,.0f} tokens per second, compared with {1, transformers, tokens/s:,.0f}; "
            "{1, transformers, static cache, compiled, tokens/s:,.0f} compiled with a static cache",
            "{1, tokens/s:,.0f} токенов/с против {1, transformers, tokens/s:,.0f}; со статическим "
            "кэшем после компиляции — {1, transformers, static cache, compiled, tokens/s:,.0f}",
        ),
        "generate.py",
    ),
    Row(
        "generate-h200",
        ("the same, 32 texts at once", "то же, 32 текста сразу"),
        ("the same", "то же"),
        (
            "{32, tokens/s:,.0f} tokens per second, compared with "
            "{32, transformers, tokens/s:,.0f} and "
            "{32, transformers, static cache, compiled, tokens/s:,.0f}; in steps alone "
            "{32, steps alone, tokens/s:,.0f}",
            "{32, tokens/s:,.0f} токенов/с против {32, transformers, tokens/s:,.0f} и "
            "{32, transformers, static cache, compiled, tokens/s:,.0f}; "
            "только шаги декодирования — {32, steps alone, tokens/s:,.0f}",
        ),
        "generate.py",
    ),
    Row(
        "generate-long-h200",
        (
            "one step of the same model after 32,000 tokens",
            "один шаг той же модели после 32 000 токенов",
        ),
        (
            "transformers{version transformers}, not compiled",
            "transformers{version transformers} без компиляции",
        ),
        (
            "{1 x 32000, recorded step, ms:.2f} ms, compared with "
            "{1 x 32000, transformers, ms:.1f}; with 8 texts {8 x 32000, recorded step, ms:.2f} "
            "and {8 x 32000, transformers, ms:.1f}",
            "{1 x 32000, recorded step, ms:.2f} мс против {1 x 32000, transformers, ms:.1f}; "
            "для 8 текстов {8 x 32000, recorded step, ms:.2f} и {8 x 32000, transformers, ms:.1f}",
        ),
        "generate.py",
    ),
    Row(
        "train-gpt2-h200",
        ("train GPT-2 (124 million weights)", "обучение GPT-2 (124 млн параметров)"),
        (
            "transformers{version transformers}, compiled",
            "transformers{version transformers}, скомпилированный",
        ),
        _faster("times transformers"),
        "train.py",
    ),
    Row(
        "train-masked-h200",
        (
            "train a masked ModernBERT-base on mixed lengths up to 1,024",
            "обучение ModernBERT-base (MLM) на текстах разной длины до 1 024",
        ),
        (
            "transformers{version transformers}, padded to 1,024",
            "transformers{version transformers}, паддинг до 1 024",
        ),
        (
            "{times transformers, not compiled:.1f} times as fast; "
            "{times transformers:.1f} times when both are compiled",
            "в {times transformers, not compiled:.1f} раза быстрее; "
            "в {times transformers:.1f} раза, если скомпилированы оба",
        ),
        "train.py",
    ),
    Row(
        "train-t5-x86",
        (
            "a training step of T5-small, 32 pairs of 4 to 32 tokens",
            "шаг обучения T5-small, 32 пары по 4–32 токена",
        ),
        (
            "transformers{version transformers}, padded",
            "transformers{version transformers}, с паддингом",
        ),
        _faster("T5-small, dropout, times transformers"),
        "train.py",
    ),
    Row(
        "train-t5-h200",
        (
            "the same, 128 pairs of 16 to 256 tokens",
            "то же, 128 пар по 16–256 токенов",
        ),
        (
            "transformers{version transformers}, padded",
            "transformers{version transformers}, с паддингом",
        ),
        _faster("T5-small, times transformers"),
        "train.py",
    ),
    Row(
        "lens-h200",
        (
            "statistics of all 256 heads of 8 layers at 131,072 tokens",
            "статистики всех 256 голов 8 слоёв на 131 072 токенах",
        ),
        ("our own plain forward", "наш же обычный forward"),
        (
            "{times a forward:.2f} times its time, in memory linear in the tokens",
            "{times a forward:.2f} его времени, память линейна по токенам",
        ),
        "lens.py",
    ),
)
README_ROWS = (
    Row(
        "lens-arm",
        (
            "statistics of all 144 heads of GPT-2 small at 2,048 tokens, CPU",
            "статистики всех 144 голов GPT-2 small на 2 048 токенах, CPU",
        ),
        ("TransformerLens, `run_with_cache`",) * 2,
        (
            "{MB:.0f} MB of extra memory, compared with {TransformerLens, GB:.2f} GB, "
            "in {share of core time:.2f} of the core time",
            "{MB:.0f} МБ дополнительной памяти против {TransformerLens, GB:.2f} ГБ, "
            "{share of core time:.2f} процессорного времени",
        ),
    ),
    Row(
        "encode-h200",
        (
            "encode texts of mixed lengths up to 8,192 with ModernBERT-base, H200",
            "эмбеддинги текстов разной длины до 8 192 токенов, ModernBERT-base, H200",
        ),
        (
            "transformers, SDPA, padded to the longest",
            "transformers, SDPA, паддинг до самого длинного",
        ),
        _faster("8192 mixed, times transformers"),
    ),
    Row(
        "generate-h200",
        (
            "generate with a Llama shape of 1.24 billion weights, one text, H200",
            "генерация, конфигурация Llama с 1,24 млрд параметров, один текст, H200",
        ),
        (
            "transformers, `generate` with its defaults",
            "transformers, `generate` с настройками по умолчанию",
        ),
        (
            "{1, tokens/s:,.0f} tokens per second, compared with {1, transformers, tokens/s:,.0f}",
            "{1, tokens/s:,.0f} токенов/с против {1, transformers, tokens/s:,.0f}",
        ),
    ),
    Row(
        "train-masked-h200",
        (
            "train a masked ModernBERT-base on mixed lengths up to 1,024, H200",
            "обучение ModernBERT-base (MLM) на текстах разной длины до 1 024, H200",
        ),
        ("transformers, padded to 1,024", "transformers, паддинг до 1 024"),
        (
            "{times transformers, not compiled:.1f} times as fast; "
            "{times transformers:.1f} times when both are compiled",
            "в {times transformers, not compiled:.1f} раза быстрее; "
            "в {times transformers:.1f} раза, если скомпилированы оба",
        ),
    ),
)
README_HEAD = (("job", "compared with", "result"), ("задача", "с чем сравнили", "результат"))
HEAD = (
    (*README_HEAD[0], "script", "measured"),
    (*README_HEAD[1], "скрипт", "где и когда измерено"),
)
MACHINES = {"arm": "ARM", "x86": "x86", "avx2": "x86 AVX2", "h200": "H200"}
MACHINE_HEAD = (("machine", "what it is"), ("машина", "что это"))
CORES = ("{:d} cores", "ядер: {:d}")
COMPILED = (
    "our ModernBERT and training steps are compiled too",
    "наши ModernBERT и шаг обучения тоже скомпилированы",
)
UNRECORDED = (
    "where a row names no version of transformers, it was not recorded",
    "где у transformers не указана версия, она не записана",
)
# The figures of bench/circuits.py with their headings.
CIRCUITS = {
    "AUROC of edges": "AUROC рёбер",
    "AP of edges": "AP рёбер",
    "clear": "«явный»",
    "AUROC of heads": "AUROC голов",
    "AP of heads": "AP голов",
    "forwards": "прямых проходов",
    "backwards": "обратных",
}


class Number(float):
    """A figure that is formatted as the language writes numbers.

    >>> f"{Number(13391.5, 'ru'):,.1f} {Number(13391.5, 'en'):,.1f}"
    '13 391,5 13,391.5'
    """

    language: str

    def __new__(cls, value: float, language: str) -> "Number":
        result = super().__new__(cls, value)
        result.language = language
        return result

    def __format__(self, form: str) -> str:
        text = super().__format__(form)
        return text.translate({44: " ", 46: ","}) if self.language == "ru" else text


def read(file: str) -> dict[str, Any]:
    """A stored result, by the name of its file without the ending."""
    result: dict[str, Any] = json.loads((RESULTS / f"{file}.json").read_text("utf-8"))
    return result


def _release(version: str) -> str:
    return version.partition("+")[0]


def _fill(text: str, file: str, language: str) -> str:
    """The text with the figures and versions of a file in their places."""
    result = read(file)
    places: dict[str, Any] = {
        name: Number(value, language)
        for name, value in result["figures"].items()
        if not isinstance(value, dict)
    }

    class Places(dict[str, Any]):
        def __missing__(self, name: str) -> str:
            if not name.startswith("version "):
                raise SystemExit(
                    f"bench/results/{file}.json has no figure {name!r}, which a table shows: "
                    f"run its bench with all that `make bench` runs, and --store"
                )
            version = result["versions"].get(name.removeprefix("version "))
            return f" {_release(version)}" if version else ""

    return text.format_map(Places(places))


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    table = ("".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in lines)
    return "\n".join(table).replace("| --- |", "|---|").replace(" --- |", "---|")


def comparison(language: str) -> str:
    """All rows, each with its script, machine and date."""
    index = LANGUAGES.index(language)
    rows = (
        (
            row.job[index],
            _fill(row.peer[index], row.file, language),
            _fill(row.result[index], row.file, language),
            f"`{row.script}`" if row.script else "",
            _measured(row.file),
        )
        for row in ROWS
    )
    return _table(HEAD[index], rows)


def _measured(file: str) -> str:
    return f"{MACHINES[file.rpartition('-')[2]]}, {read(file)['date'].replace('/', ' – ')}"


def short_comparison(language: str) -> str:
    """The rows of the README."""
    index = LANGUAGES.index(language)
    rows = (
        (row.job[index], row.peer[index], _fill(row.result[index], row.file, language))
        for row in README_ROWS
    )
    return _table(README_HEAD[index], rows)


def machines(language: str) -> str:
    """The machines of all rows; one that changed between two runs has several descriptions."""
    index = LANGUAGES.index(language)
    rows = []
    for short, name in MACHINES.items():
        results = [read(row.file) for row in ROWS if row.file.endswith(f"-{short}")]
        texts = [_machine(result, index) for result in results]
        if short == "h200":
            texts.append(COMPILED[index])
            if any("transformers" not in result["versions"] for result in results):
                texts.append(UNRECORDED[index])
        rows.append((name, "; ".join(dict.fromkeys(texts))))
    return _table(MACHINE_HEAD[index], iter(rows))


def _machine(result: dict[str, Any], index: int) -> str:
    cuda = result["machine"].startswith("NVIDIA")
    parts = [result["machine"]]
    if not cuda:
        parts += [CORES[index].format(result["cores"]), *(result["flags"] or ()), "float32"]
    else:
        parts.append("bfloat16")
    # Some files have 2.13 and some 2.13.0.
    version = _release(result["versions"]["torch"]).removesuffix(".0")
    return ", ".join([*parts, f"torch {version}"])


def circuits(language: str) -> str:
    """How methods rank true edges and heads, the best first."""
    figures = read("circuits-arm")["figures"]
    names = sorted(figures, key=lambda name: -figures[name]["AUROC of edges"])
    russian = language == "ru"
    rows = (
        (
            _method(name, language),
            *(
                f"{Number(figures[name][key], language):{'.0f' if 'wards' in key else '.3f'}}"
                for key in CIRCUITS
            ),
        )
        for name in names
    )
    headings = ("метод", *CIRCUITS.values()) if russian else ("method", *CIRCUITS)
    return _table(headings, rows)


def estimates(language: str) -> str:
    """Correlation of estimated effects of edges with exact ones; no score is none."""
    figures = read("circuit-estimates-h200")["figures"]
    headings = ("method", *next(iter(figures.values())))
    rows = (
        (
            _method(name, language),
            *(
                "none"
                if value is None
                else f"{value:g}"
                if value == 1 or key == "seconds"
                else f"{value:.2f}"
                for key, value in row.items()
            ),
        )
        for name, row in figures.items()
    )
    return _table(headings, rows)


def _method(name: str, language: str) -> str:
    method, comma, steps = name.partition(", ")
    steps = steps.replace("steps", "шагов") if language == "ru" else steps
    return f"`{method}`{comma}{steps}"


Table = Callable[[], str]
_FULL: dict[str, Callable[[str], str]] = {
    "comparison": comparison,
    "machines": machines,
    "circuits": circuits,
}
PAGES: dict[str, dict[str, Table]] = {
    "README.md": {"comparison": partial(short_comparison, "en")},
    "README.ru.md": {"comparison": partial(short_comparison, "ru")},
    "docs/comparison.md": {
        **{name: partial(table, "en") for name, table in _FULL.items()},
        "estimates": partial(estimates, "en"),
    },
    "docs/ru/comparison.md": {name: partial(table, "ru") for name, table in _FULL.items()},
}


def renew(page: str) -> str:
    """The text of a page with its tables as the files have them."""
    text = (ROOT / page).read_text("utf-8")
    for name, table in PAGES[page].items():
        start = f"<!-- {name} table, written by bench/readme_table.py -->"
        end = f"<!-- end of {name} table -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise SystemExit(f"{page} needs {start} and {end} once each, around its table")
        head, tail = text.index(start) + len(start), text.index(end)
        text = f"{text[:head]}\n\n{table()}\n\n{text[tail:]}"
    return text


def write() -> None:
    """Put the tables into all pages."""
    for page in PAGES:
        text = renew(page)
        if text != (ROOT / page).read_text("utf-8"):
            (ROOT / page).write_text(text, "utf-8")
            print(f"{page}: renewed")
