"""MaxSim against its definition, and the codes that stand for vectors."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.util import maxsim as judge
from torch import Tensor

from manyheads import Lengths, Ragged
from manyheads.encoding import late_scores as module
from manyheads.encoding.late_scores import maxsim, maxsim_matrix
from manyheads.errors import InputError
from manyheads.tasks.search.residual_codes import ResidualCodec, ResidualCodes, train_codec
from tests.messages import refuses


def vectors(*lengths: int, width: int = 8, seed: int = 0) -> Ragged:
    drawn = torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(seed))
    return Ragged(F.normalize(drawn, dim=-1), Lengths.of(lengths))


def topical(documents: int, tokens: int, width: int) -> Ragged:
    """Vectors that lie around few directions, as those of words do."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(200, width, generator=generator)
    drawn = words[torch.randint(200, (documents * tokens,), generator=generator)]
    drawn = drawn + 0.6 * torch.randn(drawn.shape, generator=generator)
    return Ragged(F.normalize(drawn, dim=-1), Lengths.of([tokens] * documents))


@settings(max_examples=20, deadline=None)
@given(
    queries=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    documents=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    rows=st.integers(1, 12),
)
def test_scores_are_those_of_sentence_transformers_in_blocks_of_any_size(
    queries: list[int], documents: list[int], rows: int
) -> None:
    query, document = vectors(*queries), vectors(*documents, seed=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "BLOCK_ROWS", rows)
        scores = maxsim_matrix(query, document)
        alone = torch.stack([maxsim(each, document) for each in query.to_list()])
    torch.testing.assert_close(scores, judge(query.to_list(), document.to_list()))
    torch.testing.assert_close(alone, scores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_wide_where_vectors_are_stored_in_half(dtype: torch.dtype) -> None:
    query, documents = vectors(40), vectors(30, 20, 10, seed=1)
    half = documents.map(lambda values: values.to(dtype))
    expected = maxsim(query.values, half.map(Tensor.float))
    assert torch.equal(maxsim(query.values, half), expected)
    assert maxsim(query.values.to(dtype), half).dtype == torch.float32


def test_a_document_without_vectors_comes_last() -> None:
    scores = maxsim(vectors(3).values, vectors(2, 0, 4, 0, seed=1))
    assert scores.isinf().tolist() == [False, True, False, True]
    assert maxsim(vectors(3).values, Ragged(torch.zeros(0, 8), Lengths.of([]))).shape == (0,)


def test_vectors_of_two_sizes_are_refused() -> None:
    with refuses(InputError, "(3, 8)", "(5, 4)", "the same size"):
        maxsim(vectors(3).values, vectors(5, width=4))


def test_codes_take_few_bytes_and_find_what_the_vectors_find(tmp_path: Path) -> None:
    documents = topical(documents=200, tokens=20, width=32)
    codes = ResidualCodes.of(documents, progress=False)
    assert (codes.rows.values.dtype, codes.rows.values.shape) == (torch.uint8, (4000, 2 + 32 // 4))
    decoded = codes.decode()
    assert F.cosine_similarity(decoded.values, documents.values).mean() > 0.95
    result = []
    for query in topical(documents=20, tokens=6, width=32).to_list():
        scores = codes.score(query)
        torch.testing.assert_close(scores, maxsim(query, decoded))
        exact = set(maxsim(query, documents).topk(10).indices.tolist())
        result.append(len(exact & set(scores.topk(10).indices.tolist())) / 10)
    assert sum(result) / len(result) > 0.7
    codes.codec.save(tmp_path / "codec.safetensors")
    again = ResidualCodec.load(tmp_path / "codec.safetensors")
    assert torch.equal(again.encode(documents.values), codes.rows.values)
    assert again.normalized


def test_each_quarter_of_a_channel_is_decoded_as_its_mean() -> None:
    values = torch.arange(16.0).unsqueeze(1) * torch.tensor([[1.0, -1.0, 10.0, 0.0, 1.0]])
    codec = train_codec(values, centroids=1, progress=False)
    assert codec.row_bytes == 2 + 2
    assert not codec.normalized
    decoded = codec.decode(codec.encode(values))
    # Of 16 even steps each quarter holds 4, and no step is further from their mean than 1.5.
    assert (decoded - values).abs().max(0).values.tolist() == pytest.approx(
        [1.5, 1.5, 15.0, 0.0, 1.5]
    )


def test_what_a_codec_cannot_do_is_refused(tmp_path: Path) -> None:
    codec = train_codec(vectors(40).values, progress=False)
    with refuses(InputError, "8 channels", "(3, 4)"):
        codec.encode(torch.zeros(3, 4))
    with refuses(InputError, "rows of 4 bytes", "(3, 5)"):
        codec.decode(torch.zeros(3, 5, dtype=torch.uint8))
    with refuses(InputError, "got 50", "at most one per vector"):
        train_codec(vectors(40).values, centroids=50)
    with refuses(InputError, "(0, 8)", "at least one"):
        train_codec(torch.zeros(0, 8))
    (tmp_path / "other").write_bytes(b"not tensors")
    with refuses(InputError, "is not a codec", "create the index again"):
        ResidualCodec.load(tmp_path / "other")
