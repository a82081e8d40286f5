"""What heads of wrapped models write to the logits, and two wrapped models side by side."""

import copy

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn

from manyheads import lens
from manyheads.bridge.residual_writes import FrozenNorm, find_writes
from manyheads.bridge.wrapped_model import wrap
from manyheads.checkpoints.folder import load
from manyheads.errors import InputError
from manyheads.taps import Sublayer
from tests.bridge.zoo import GROUPED, arguments_of, texts_of, tiny

PLAIN = ("gpt2", "llama", "gpt_oss", "gpt_neox", "deepseek_v3", "mixtral", "t5", "whisper")
NORMED = ("gemma2", "olmo2")


def last_logits(name: str) -> list[float]:
    """The largest logit at the end of each text, before a cap."""
    model = tiny(name)
    with torch.no_grad():
        ends = [model(**arguments_of(text)).logits[0, -1].max().item() for text in texts_of(name)]
    cap = getattr(model.config, "final_logit_softcapping", None)
    return ends if cap is None else [cap * np.arctanh(each / cap) for each in ends]


@pytest.mark.parametrize("name", [*PLAIN, *NORMED])
def test_the_parts_sum_to_the_logit(name: str) -> None:
    result = lens.attribute_logits(wrap(tiny(name)), texts_of(name))
    assert result.logits.tolist() == pytest.approx(last_logits(name), rel=1e-4)
    assert result.completeness < 1e-5
    assert len(result.heads.addresses) == (16 if name in ("t5", "whisper") else 8)


def test_a_wrapped_model_gives_what_the_native_one_gives(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("gpt2")
    tiny("gpt2").save_pretrained(folder)
    texts = texts_of("gpt2")
    native, wrapped = (
        lens.attribute_logits(model, texts) for model in (load(folder), wrap(tiny("gpt2")))
    )
    torch.testing.assert_close(wrapped.by_head, native.by_head, rtol=1e-4, atol=1e-5)
    key = Sublayer.FEEDFORWARD, 1
    torch.testing.assert_close(wrapped.layers[key], native.layers[key], rtol=1e-4, atol=1e-5)


def test_logits_of_a_scaled_readout_and_scaled_writes() -> None:
    config = transformers.GraniteConfig(**GROUPED, residual_multiplier=0.5, logits_scaling=4.0)
    torch.manual_seed(0)
    model = transformers.GraniteForCausalLM(config).eval()
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits[0, -1].max().item()
    result = lens.attribute_logits(model, [[5, 6, 7]])
    assert result.logits.tolist() == pytest.approx([expected], rel=1e-4)
    assert result.completeness < 1e-6


@pytest.mark.parametrize("name", ["bert", "bart", "vit", "modernbert"])
def test_a_model_whose_logits_are_no_sums_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(InputError, match="ablation"):
        lens.attribute_logits(wrap(tiny(name)), texts_of(name))


def test_words_are_attributed_with_a_tokenizer() -> None:
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(60)}, "w3"))
    tokenizer.pre_tokenizer = Whitespace()
    wrapped = wrap(tiny("llama"), tokenizer)
    result = lens.attribute(wrapped, "w5 w6 w7 w5")
    logits = lens.attribute_logits(wrapped, [[5, 6, 7, 5]])
    assert result.value == pytest.approx(float(logits.logits[0]))
    assert len(result.steps) == 3
    assert lens.attribute(wrapped, "w5 w6 w7", method="rollout").completeness < 1e-5
    with pytest.raises(InputError, match="tokenizer"):
        lens.attribute(wrap(tiny("llama")), [5, 6, 7])


def test_two_wrapped_models_are_compared() -> None:
    before, texts = tiny("llama"), texts_of("llama")
    after = copy.deepcopy(before)
    with torch.no_grad():
        after.model.layers[1].self_attn.o_proj.weight[:, :8] *= 2
    result = lens.compare(before, after, texts, compare_kinds=False, progress=False)
    changed = dict(zip(result.addresses, result.weights.means["all"], strict=True))
    assert {str(head) for head, change in changed.items() if change > 0} == {"L1H0"}
    assert np.isnan(result.weights.means["query"]).all()
    assert abs(result.losses.change) > 0


def test_inspection_of_a_model_without_token_ids() -> None:
    wrapped, texts = wrap(tiny("whisper")), texts_of("whisper")
    with pytest.raises(InputError, match="token ids"):
        lens.kinds(wrapped, None, progress=False)
    result = lens.inspect(wrapped, texts, progress=False)
    assert result.kinds is not None
    assert "alignment" in result.kinds.scores.names
    assert result.metadata["complete"]
    assert "WrappedSeq2Seq" in str(result)


class ScaledNormOfTheirs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sign(x) * x.abs().sqrt()


def test_only_layer_and_rms_norms_are_frozen() -> None:
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for norm in (nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-6)):
        nn.init.normal_(norm.weight)
        torch.testing.assert_close(
            FrozenNorm.of(norm, x).apply(x).float(), norm(x.float()), rtol=1e-4, atol=1e-4
        )
    with pytest.raises(InputError, match="ScaledNormOfTheirs"):
        FrozenNorm.of(ScaledNormOfTheirs(), x)


def test_a_norm_on_the_stream_is_no_sum() -> None:
    x, written = torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    norm = nn.LayerNorm(8)
    leaves = [(norm, x + written, norm(x + written))]
    assert find_writes(x, norm(x + written), [written], leaves, 1.0) is None
