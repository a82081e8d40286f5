"""The families of models whose folders can be read and written, one file per family."""

from manyheads.checkpoints.families.decoders.bloom import BLOOM
from manyheads.checkpoints.families.decoders.gemma import GEMMA
from manyheads.checkpoints.families.decoders.gpt2 import GPT2
from manyheads.checkpoints.families.decoders.gpt_neox import GPT_NEOX
from manyheads.checkpoints.families.decoders.gpt_oss import GPT_OSS
from manyheads.checkpoints.families.decoders.gptj import GPTJ
from manyheads.checkpoints.families.decoders.llama import LLAMA
from manyheads.checkpoints.families.decoders.mamba import MAMBA, MAMBA2
from manyheads.checkpoints.families.decoders.mixtral import MIXTRAL, QWEN3_MOE
from manyheads.checkpoints.families.decoders.olmo import OLMO, OLMO_HYBRID
from manyheads.checkpoints.families.decoders.phi3 import PHI3
from manyheads.checkpoints.families.decoders.qwen import QWEN_GATED
from manyheads.checkpoints.families.decoders.qwen_hybrid import QWEN3_5, QWEN_NEXT
from manyheads.checkpoints.families.decoders.reformer import REFORMER
from manyheads.checkpoints.families.dinov2 import DINOV2
from manyheads.checkpoints.families.encoders.albert import ALBERT
from manyheads.checkpoints.families.encoders.bert import BERT, ROBERTA
from manyheads.checkpoints.families.encoders.big_bird import BIG_BIRD
from manyheads.checkpoints.families.encoders.deberta import DEBERTA
from manyheads.checkpoints.families.encoders.distilbert import DISTILBERT
from manyheads.checkpoints.families.encoders.fnet import FNET
from manyheads.checkpoints.families.encoders.longformer import LONGFORMER
from manyheads.checkpoints.families.encoders.modernbert import MODERNBERT
from manyheads.checkpoints.families.encoders.mpnet import MPNET
from manyheads.checkpoints.families.encoders.nomic_bert import NOMIC_BERT
from manyheads.checkpoints.families.family import Family
from manyheads.checkpoints.families.marian import MARIAN
from manyheads.checkpoints.families.native import NATIVE
from manyheads.checkpoints.families.t5 import T5
from manyheads.checkpoints.families.vit import VIT

# By the model_type of config.json. A model is saved as the first family that can describe it; our
# own layout, which describes every model, is therefore the last.
FAMILIES: dict[str, Family] = {
    "gpt2": GPT2,
    "bert": BERT,
    "roberta": ROBERTA,
    "distilbert": DISTILBERT,
    "albert": ALBERT,
    "deberta-v2": DEBERTA,
    "big_bird": BIG_BIRD,
    "fnet": FNET,
    "longformer": LONGFORMER,
    "mpnet": MPNET,
    "modernbert": MODERNBERT,
    "nomic_bert": NOMIC_BERT,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": QWEN_GATED,
    "qwen3_next": QWEN_NEXT,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "gpt_neox": GPT_NEOX,
    "gptj": GPTJ,
    "bloom": BLOOM,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "olmo2": OLMO,
    "olmo3": OLMO,
    "olmo_hybrid": OLMO_HYBRID,
    "phi3": PHI3,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
    "reformer": REFORMER,
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": MAMBA2,
    "vit": VIT,
    "dinov2": DINOV2,
    "dinov2_with_registers": DINOV2,
    "t5": T5,
    "marian": MARIAN,
    "manyheads": NATIVE,
}
