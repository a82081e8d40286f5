"""Statistics of all heads of a wrapped `transformers` model: `python bench/bridge.py`.

GPT-2 small's shape with random weights, on the CPU. Each entrant runs in a process of its own: the
model's fused forward, our statistics inside it, the same with `output_attentions=True`, and
TransformerLens `run_with_cache` where it is installed. Processor seconds of the best round, which
other work on the machine hardly changes, and the largest resident memory above that of the loaded
model after a first short forward.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

LAYERS, HEADS, WIDTH, VOCABULARY = 12, 12, 768, 50257


def make_model(tokens: int, attention: str) -> Any:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, n_positions=tokens, vocab_size=VOCABULARY
    )
    config._attn_implementation = attention
    return transformers.GPT2Model(config).eval()


def forward(tokens: int) -> Callable[[], Any]:
    import torch

    model, ids = make_model(tokens, "sdpa"), torch.randint(VOCABULARY, (1, tokens))

    def run() -> Any:
        with torch.inference_mode():
            return model(ids, use_cache=False)

    return run


def statistics(tokens: int) -> Callable[[], Any]:
    import torch

    from manyheads import lens, wrap

    model = wrap(make_model(tokens, "sdpa"))
    ids = torch.randint(VOCABULARY, (1, tokens)).tolist()
    return lambda: lens.statistics(model, ids, progress=False)


def output_attentions(tokens: int) -> Callable[[], Any]:
    import torch

    model, ids = make_model(tokens, "eager"), torch.randint(VOCABULARY, (1, tokens))

    def run() -> Any:
        with torch.inference_mode():
            weights = model(ids, use_cache=False, output_attentions=True).attentions
            return [-torch.special.xlogy(each, each).sum(-1).mean() for each in weights]

    return run


def transformer_lens(tokens: int) -> Callable[[], Any]:
    import tempfile

    import torch
    import transformers
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge

    inner = transformers.GPT2LMHeadModel(make_model(tokens, "eager").config).eval()
    inner.config.architectures = ["GPT2LMHeadModel"]
    # It asks for a tokenizer, which is not used.
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "b")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    with tempfile.TemporaryDirectory() as folder:
        inner.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = TransformerBridge.boot_transformers(
            folder, hf_model=inner, tokenizer=tokenizer, device="cpu"
        )
    ids = torch.randint(VOCABULARY, (1, tokens))

    def run() -> Any:
        with torch.inference_mode():
            cache = model.run_with_cache(
                ids, names_filter=lambda name: name.endswith("hook_pattern"), return_type=None
            )[1]
            return [-torch.special.xlogy(each, each).sum(-1).mean() for each in cache.values()]

    return run


ENTRANTS = {
    "its own fused forward": forward,
    "statistics of all heads": statistics,
    "output_attentions=True": output_attentions,
    "TransformerLens": transformer_lens,
}


def measure(name: str, tokens: int, rounds: int) -> None:
    """Print the seconds and the memory of one entrant, in a process of its own."""
    ENTRANTS[name](64)()
    run = ENTRANTS[name](tokens)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": min(seconds), "mebibytes": (peak - before) / 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=2, help="how often each entrant is timed")
    parser.add_argument("--longest-pattern", type=int, default=2048, help="for those that keep it")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.one, arguments.tokens[0], arguments.rounds)
        return
    for tokens in arguments.tokens:
        for name in ENTRANTS:
            keeps_pattern = name in ("output_attentions=True", "TransformerLens")
            if keeps_pattern and tokens > arguments.longest_pattern:
                continue
            if name == "TransformerLens" and find_spec("transformer_lens") is None:
                continue
            command = [sys.executable, __file__, "--one", name, "--tokens", str(tokens)]
            command += ["--rounds", str(arguments.rounds)]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
            if done.returncode:
                print(f"{tokens:6,}  {name:26} failed: {done.stderr.strip().splitlines()[-1]}")
                continue
            result = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{tokens:6,}  {name:26} {result['seconds']:8.2f} s {result['mebibytes']:8.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
