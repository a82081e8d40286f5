import textwrap
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads import load
from manyheads.errors import InputError
from manyheads.models.build import Model
from manyheads.tasks import Document
from manyheads.tasks.search.chunking import Chunker, ChunkSettings
from manyheads.tasks.search.code_chunks import python_spans

SOURCE = textwrap.dedent(
    '''
    """Module."""
    import os

    @cache
    @other(1)
    def outer(x):
        """Outer's words."""
        def inner():
            return x
        return inner

    CONSTANT = 3

    class Small:
        def method(self): return 1

    class Large(Small):
        """Large's words."""
        field = 1

        @property
        def first(self):
            return 1
    '''
) + "".join(f"\n    async def method_{n}(self):\n        return {n}\n" for n in range(20))


@cache
def house_bert() -> Model:
    return load("house-bert")


TEXTS = st.text(st.sampled_from("ab .\n\té日🙂e\u0301"), min_size=1, max_size=300)


@settings(max_examples=25, deadline=None)
@given(TEXTS, st.integers(8, 24), st.integers(0, 4), st.booleans())
def test_chunks_cover_every_visible_letter_at_exact_offsets(
    text: str, chunk_tokens: int, overlap: int, code: bool
) -> None:
    chosen = ChunkSettings(chunk_tokens=chunk_tokens, overlap=overlap, code=code)
    for model in (None, house_bert()):
        [chunks] = Chunker(chosen, model).split([Document("d", text)])
        covered = set()
        for number, chunk in enumerate(chunks):
            assert chunk.number == number
            assert chunk.text == text[chunk.start : chunk.end]
            covered |= set(range(chunk.start, chunk.end))
        assert [chunk.start for chunk in chunks] == sorted(chunk.start for chunk in chunks)
        missed = [text[index] for index in range(len(text)) if index not in covered]
        assert not "".join(missed).strip()


def test_chunks_fit_the_model_with_their_title_and_begin_with_words() -> None:
    model = house_bert()
    text = " ".join(f"sentence{n} about attention heads." for n in range(300))
    for title in ("", "A title", "long " * 100):
        chosen = ChunkSettings(chunk_tokens=32, overlap=8)
        [chunks] = Chunker(chosen, model).split([Document("d", text, title)])
        assert len(chunks) > 10
        for before, after in pairwise(chunks):
            assert len(model.tokenizer.encode(after.encoded).ids) <= 32
            assert after.start == 0 or text[after.start - 1].isspace()
            assert before.start < after.start <= before.end + 1 < after.end
        assert all(chunk.title and title.startswith(chunk.title) for chunk in chunks if title)


def test_a_whole_document_is_one_chunk_and_settings_are_checked() -> None:
    document = Document("d", "word " * 1000, "T")
    [[chunk]] = Chunker(ChunkSettings(whole=True), house_bert()).split([document])
    assert (chunk.start, chunk.end, chunk.encoded) == (0, 5000, f"T\n{document.text}")
    with pytest.raises(InputError, match=r"overlap=20.*at most 16"):
        ChunkSettings(chunk_tokens=32, overlap=20)
    with pytest.raises(ValueError, match=r"chunk_tokens.*8"):
        ChunkSettings(chunk_tokens=2)


def test_python_is_split_by_function_and_class_with_qualified_names() -> None:
    document = Document("pkg/module.py", SOURCE)
    spans = python_spans(document)
    named = {span.name: SOURCE[span.start : span.end] for span in spans if span.name}
    assert list(named)[:5] == ["outer", "Small", "Large", "Large.first", "Large.method_0"]
    assert named["outer"].startswith("@cache\n@other(1)\ndef outer(x):")
    assert named["outer"].rstrip().endswith("return inner")
    assert named["Large"].startswith('class Large(Small):\n    """Large')
    assert named["Large.first"].startswith("    @property")
    rest = [SOURCE[span.start : span.end] for span in spans if not span.name]
    assert rest == ['"""Module."""\nimport os', "CONSTANT = 3"]
    [chunks] = Chunker(ChunkSettings(code=True), None).split([document])
    assert {chunk.title for chunk in chunks} == {"", *named}
    assert all(chunk.text == SOURCE[chunk.start : chunk.end] for chunk in chunks)


def test_code_that_does_not_parse_is_split_at_lines() -> None:
    text = "\n".join(f"line {n} of ( something" for n in range(50))
    for name in ("broken.py", "other.rs"):
        chosen = ChunkSettings(code=True, chunk_tokens=20, overlap=0)
        [chunks] = Chunker(chosen, None).split([Document(name, text)])
        assert len(chunks) > 10
        assert all(chunk.text.startswith("line") for chunk in chunks)
