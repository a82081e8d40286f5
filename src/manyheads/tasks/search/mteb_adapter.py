"""Run the tasks of mteb (arXiv 2210.07316) on a model."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from manyheads.encoding.encode import encode
from manyheads.encoding.text_reader import require_text_model
from manyheads.errors import InputError, import_package
from manyheads.models.build import Model


class MtebEncoder:
    """A model as `mteb.evaluate` takes it.

    `prompts` are put in front of texts, as mteb chooses them: by the name of a task, its type, or
    "query" and "document". Texts are truncated as in `encode`; `batch_size` of mteb is not used,
    because texts are batched by `batch_tokens`. `kind="late"` gives one vector per token, for
    tasks of retrieval and reranking. Results are stored by mteb under `name`.

        import mteb
        model = manyheads.load("minilm")
        mteb.evaluate(tasks.MtebEncoder(model), mteb.get_tasks(tasks=["SciFact"]))
    """

    def __init__(
        self,
        model: Model,
        *,
        name: str = "",
        revision: str = "local",
        prompts: Mapping[str, str] | None = None,
        kind: Literal["dense", "late"] = "dense",
        batch_tokens: int | None = None,
    ) -> None:
        import_package("mteb", "MtebEncoder", "'manyheads[mteb]'")
        if kind not in ("dense", "late"):
            raise InputError(f"kind must be dense or late, got {kind!r}")
        self.model = require_text_model(model)
        self.kind = kind
        self.prompts = dict(prompts or {})
        self.batch_tokens = batch_tokens
        self.mteb_model_meta = _describe(model, name, revision, kind, bool(self.prompts))

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any,
        hf_split: str,  # noqa: ARG002
        hf_subset: str,  # noqa: ARG002
        prompt_type: Any = None,
        **options: Any,
    ) -> Any:
        """The vectors of all texts as an array, or per text the vectors of its tokens."""
        from mteb.models.abs_encoder import get_prompt

        prompt = get_prompt(self.prompts, task_metadata, prompt_type) or ""
        texts = []
        for batch in inputs:
            if "text" not in batch:
                raise InputError(
                    f"{task_metadata.name} has inputs of {', '.join(batch)}", "use tasks of texts"
                )
            texts += [prompt + text for text in batch["text"]]
        progress = bool(options.get("show_progress_bar", True))
        if self.kind == "dense":
            vectors = encode(self.model, texts, batch_tokens=self.batch_tokens, progress=progress)
            return vectors.float().numpy()
        if task_metadata.simplified_task_type != "retrieval":
            raise InputError(
                f"{task_metadata.name} needs one vector per text",
                "use kind='dense', or tasks of retrieval and reranking",
            )
        from manyheads.encoding.token_vectors import encode_tokens

        role: Literal["query", "document"] = (
            "query" if getattr(prompt_type, "value", prompt_type) == "query" else "document"
        )
        ragged = encode_tokens(
            self.model, texts, role=role, batch_tokens=self.batch_tokens, progress=progress
        )
        return list(ragged.values.float().split(ragged.lengths.offsets.diff().tolist()))

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """The similarity of each of the first with each of the second: cosine, or MaxSim."""
        from mteb.similarity_functions import cos_sim, max_sim

        function = cos_sim if self.kind == "dense" else max_sim
        return torch.as_tensor(function(_together(embeddings1), _together(embeddings2)))

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """The similarity of the first with the first, the second with the second, and so on."""
        from mteb.similarity_functions import pairwise_cos_sim, pairwise_max_sim

        function = pairwise_cos_sim if self.kind == "dense" else pairwise_max_sim
        return torch.as_tensor(function(_together(embeddings1), _together(embeddings2)))


def _together(embeddings: Any) -> Any:
    """Token vectors of texts of equal length may come as one tensor, others as a list."""
    return list(embeddings) if isinstance(embeddings, Sequence) else embeddings


def _describe(model: Model, name: str, revision: str, kind: str, prompts: bool) -> Any:
    from mteb.models.model_meta import ModelMeta, ScoringFunction

    title = name or Path(model.source or type(model).__name__.lower()).name
    late = kind == "late"
    return ModelMeta.create_empty(
        overwrites={
            "name": title if "/" in title else f"manyheads/{title}",
            "revision": revision,
            "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "framework": ["PyTorch"],
            "similarity_fn_name": ScoringFunction.MAX_SIM if late else ScoringFunction.COSINE,
            "model_type": ["late-interaction" if late else "dense"],
            "use_instructions": prompts,
            "modalities": ["text"],
        }
    )
