"""A model as lm-evaluation-harness takes it; needs lm_eval, so nothing imports it at the top."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM, hash_args
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from manyheads.decoding.chat import apply_chat, tokenizer_config_of
from manyheads.decoding.generation_config import GenerationConfig, GenerationDefaults
from manyheads.decoding.request import tokenizer_of
from manyheads.decoding.sampling import Greedy, Sample, Sampling
from manyheads.encoding.text_reader import check_continues, require_text_model, resolve_max_length
from manyheads.errors import InputError
from manyheads.lens.causal.evaluate import HeadSet
from manyheads.lens.causal.replacements import Replacement
from manyheads.lens.inputs.cached_run import ActivationEditor
from manyheads.models import build
from manyheads.tasks.benchmarks.continuation_scores import (
    head_ablation,
    score_continuations,
)
from manyheads.tasks.benchmarks.prefix_tree import Continuation
from manyheads.tasks.benchmarks.prompt_steps import generate_ids

# As the harness has them.
DEFAULT_MAX_LENGTH = 2048
MAX_NEW_TOKENS = 256
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p")


class LmEvalModel(TemplateLM):  # type: ignore[misc]
    """A language model for `lm_eval.simple_evaluate`, without the heads `without`.

    With `versions`, which lack more heads, all of them answer a request together, and `version`
    says whose answers are returned: 0 is the model that lacks no more.
    """

    def __init__(
        self,
        model: build.Model,
        versions: Sequence[HeadSet] = (),
        *,
        without: HeadSet = (),
        replace_with: Replacement = "zero",
        max_length: int | None = None,
        batch_tokens: int | None = None,
        progress: bool = True,
    ) -> None:
        super().__init__()
        check_continues(model)
        self.model, self.versions, self.without = model, tuple(versions), without
        self.version = 0
        self.replace_with = replace_with
        self.batch_tokens, self.progress = batch_tokens, progress
        self._device = next(model.parameters()).device
        self._tokenizer = tokenizer_of(model, "a benchmark")
        reader = require_text_model(model)
        self.max_length = resolve_max_length(reader, max_length) or DEFAULT_MAX_LENGTH
        self._settings = tokenizer_config_of(model)
        self._start, self._end = self._special("bos"), self._special("eos")
        first = self._end if self._start is None else self._start
        self._prefix: str | None = None if first is None else self._tokenizer.id_to_token(first)
        # What all versions have answered, by request.
        self._answers: dict[tuple[str, str, int], Sequence[Any]] = {}

    @property
    def eot_token_id(self) -> int:
        if self._end is None:
            raise InputError(
                "the model does not name the token that ends a text",
                "set eos_token in its tokenizer_config.json",
            )
        return self._end

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self._start is None else self._start

    def _special(self, kind: str) -> int | None:
        """A token that tokenizer_config.json names, or else generation_config or config.json."""
        text = self._settings.get(f"{kind}_token")
        text = text.get("content") if isinstance(text, Mapping) else text
        token = self._tokenizer.token_to_id(text) if isinstance(text, str) else None
        if token is not None:
            return int(token)
        defaults = GenerationDefaults.of(self.model)
        return defaults.bos_token_id if kind == "bos" else next(iter(defaults.eos_token_ids), None)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        if add_special_tokens is None:
            # A text that begins with the first token has it already.
            add_special_tokens = not (self._prefix and string.startswith(self._prefix))
        ids: list[int] = self._tokenizer.encode(string, add_special_tokens=add_special_tokens).ids
        return ids

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is the most likely one."""
        del disable_tqdm

        def compute(new: list[Instance]) -> Any:
            return TemplateLM.loglikelihood(self, new, disable_tqdm=True)

        return self._answer("loglikelihood", requests, compute)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[list[tuple[float, bool]]]:
        """For each request the answers of all versions."""
        items = []
        for text, context, tokens in requests:
            if not tokens or len(tokens) > self.max_length:
                raise InputError(
                    f"the continuation {text!r:.100} has {len(tokens)} tokens",
                    f"use 1 to {self.max_length}",
                )
            fitting = (context + tokens)[-(self.max_length + 1) : -len(tokens)]
            items.append(Continuation(tuple(fitting), tuple(tokens)))
        scores = score_continuations(
            self.model,
            items,
            self.versions,
            without=self.without,
            replace_with=self.replace_with,
            batch_tokens=self.batch_tokens,
            progress=self.progress,
        )
        pairs = zip(scores.logprobs.T.tolist(), scores.greedy.T.tolist(), strict=True)
        return [list(zip(*both, strict=True)) for both in pairs]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """The log-probability of whole texts, in windows as long as the model reads."""
        del disable_tqdm
        return self._answer("loglikelihood_rolling", requests, self._roll)

    def _roll(self, requests: Sequence[Instance]) -> list[list[float]]:
        windows: list[tuple[Any, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            before = len(windows)
            windows += [(text, *make_disjoint_window(pair)) for pair in pairs]
            counts.append(len(windows) - before)
        answers = iter(self._loglikelihood_tokens(windows))
        totals = []
        for count in counts:
            own = [next(answers) for _ in range(count)]
            by_version = zip(*own, strict=True) if own else [()] * (1 + len(self.versions))
            totals.append([sum(logprob for logprob, _ in windows) for windows in by_version])
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """The continuation of each context, up to its stop strings."""
        del disable_tqdm
        return self._answer("generate_until", requests, self._generate)

    def _generate(self, requests: Sequence[Instance]) -> list[list[str]]:
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        texts: dict[int, list[str]] = {}
        for members in groups.values():
            options = normalize_gen_kwargs(requests[members[0]].args[1], MAX_NEW_TOKENS)
            contexts = [requests[index].args[0] for index in members]
            texts |= dict(zip(members, self._continue(contexts, dict(options)), strict=True))
        return [texts[index] for index in range(len(requests))]

    def _continue(self, contexts: Sequence[str], options: dict[str, Any]) -> list[list[str]]:
        """The texts of all versions for contexts with the same options."""
        end = self.eot_token_id
        new = options.pop("max_gen_toks")
        stops = handle_stop_sequences(options.pop("until", None), self._tokenizer.id_to_token(end))
        if new >= self.max_length:
            raise InputError(
                f"max_gen_toks={new} leaves no room for a prompt: the model reads "
                f"{self.max_length} tokens",
                f"use less than {self.max_length}, as in --generation max_gen_toks=64",
            )
        config = GenerationConfig(
            max_new_tokens=new,
            sampling=_sampling(options),
            stop_strings=[stop for stop in stops if stop],
            eos_token_ids={end, *GenerationDefaults.of(self.model).eos_token_ids},
            seed=0,
        )
        prompts = [self.tok_encode(context)[-(self.max_length - new) :] for context in contexts]
        by_version = []
        for heads in ((), *self.versions):
            removed = (*heads, *self.without)
            watch = None
            if removed:
                ablation = head_ablation(self.model, prompts, self.replace_with)
                watch = ActivationEditor(ablation.changes(removed))
            generated = generate_ids(
                self.model, prompts, config, watch=watch, progress=self.progress
            )
            texts = self._tokenizer.decode_batch([list(ids) for ids in generated])
            by_version.append([postprocess_generated_text(text, stops, None) for text in texts])
        return [list(texts) for texts in zip(*by_version, strict=True)]

    def _answer(
        self, kind: str, requests: Sequence[Instance], compute: Callable[[list[Instance]], Any]
    ) -> list[Any]:
        """The answers of the current version; with several, all answer a request at once."""
        if not self.versions:
            return [answers[0] for answers in compute(list(requests))]
        counts: Counter[str] = Counter()
        keys = []
        for request in requests:
            key = hash_args(kind, request.args)
            # A request that is repeated is sampled again.
            keys.append((kind, key, counts[key]))
            counts[key] += 1
        new = [index for index, key in enumerate(keys) if key not in self._answers]
        if new:
            answers = compute([requests[index] for index in new])
            self._answers |= dict(zip((keys[index] for index in new), answers, strict=True))
        return [self._answers[key][self.version] for key in keys]

    @property
    def tokenizer_name(self) -> str:
        return str(self.model.source or type(self.model).__name__).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        template = self._settings.get("chat_template")
        return str(template) if chat_template and template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text, by the model's template."""
        return apply_chat(chat_history, self._settings, add_generation_prompt=add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes about a model."""
        parameters = list(self.model.parameters())
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in parameters),
            "model_dtype": str(parameters[0].dtype),
            "model_revision": "",
            "model_sha": "",
        }


def _sampling(options: dict[str, Any]) -> Sampling:
    """How the options of a task choose tokens; those that nobody reads are refused."""
    drawn = options.pop("do_sample", False)
    values = {name: options.pop(name) for name in SAMPLING_OPTIONS if name in options}
    if options:
        raise InputError(
            f"generation_kwargs of the task has {', '.join(map(repr, options))}",
            f"use do_sample, {', '.join(SAMPLING_OPTIONS)}, max_gen_toks and until",
        )
    return Sample(**values) if drawn and values.get("temperature", 1.0) > 0 else Greedy()
