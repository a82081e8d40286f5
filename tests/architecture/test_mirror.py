"""Tests mirror src: tests/a/test_b.py tests src/manyheads/a/b.py.

A second file of a module adds a word to its name: test_b_word.py. Files that test what several
modules do together are listed in TOPICS, modules that are tested through another one in THROUGH.
"""

from functools import cache
from pathlib import Path

from tests.architecture.house import PACKAGE, ROOT

TESTS = ROOT / "tests"
# Rooms of tests without a room in src: judges, attacks, the rules of the house, the GPU, studies.
OWN_ROOMS = {"architecture", "fuzz", "gpu", "parity", "studies"}

# A property of a whole room, or of a model that runs through several.
TOPICS = {
    "bridge/test_attribution.py",
    "bridge/test_interventions.py",
    "bridge/test_multimodal.py",
    "bridge/test_studio.py",
    "checkpoints/families/encoders/test_question_answering.py",
    "checkpoints/families/test_readouts.py",
    "checkpoints/test_bundled_models.py",
    "checkpoints/test_damaged_folders.py",
    "encoding/test_images.py",
    "encoding/test_minilm.py",
    "kernels/test_agreement.py",
    "kernels/test_memory.py",
    "kernels/test_neighbors.py",
    "lens/head_kinds/test_mixer_kinds.py",
    "lens/measure/test_mixer_statistics.py",
    "lens/test_memory.py",
    "mixers/recurrent/test_autocast.py",
    "mixers/test_hybrid.py",
    "mixers/test_mixers.py",
    "models/test_autocast.py",
    "models/test_batches.py",
    "models/test_compile.py",
    "models/test_reversible.py",
    "models/test_shared_layers.py",
    "models/test_watching.py",
    "pictures/test_shapes.py",
    "report/test_browser.py",
    "report/test_image.py",
    "report/test_language.py",
    "report/test_pages_in_firefox.py",
    "studio/test_first_minute.py",
    "studio/test_language.py",
    "studio/test_page.py",
    "studio/test_view.py",
    "test_sampling.py",
    "test_shape_checks.py",
    "train/loop/test_objectives_end_to_end.py",
    "train/loop/test_parity.py",
    "train/loop/test_resume.py",
    "train/loop/test_retriever_runs.py",
}

# A module without a file of its own, and the file whose tests run it.
THROUGH = {
    "__main__.py": "cli/test_main.py",
    "bridge/automatic.py": "bridge/test_wrapped_model.py",
    "bridge/padded_call.py": "bridge/test_mask_rules.py",
    "bridge/residual_writes.py": "bridge/test_attribution.py",
    "bridge/structure.py": "bridge/test_interventions.py",
    "bridge/watched_run.py": "bridge/test_wrapped_model.py",
    "bridge/wrapped_parts.py": "bridge/test_wrapped_model.py",
    "bridge/wrapped_steps.py": "bridge/test_interventions.py",
    "checkpoints/config_json.py": "checkpoints/test_folder.py",
    "checkpoints/families/config_keys.py": "checkpoints/families/test_readouts.py",
    "checkpoints/families/decoders/mamba.py": "parity/test_mixers.py",
    "checkpoints/families/decoders/mixtral.py": "parity/test_experts.py",
    "checkpoints/families/family.py": "checkpoints/families/test_readouts.py",
    "checkpoints/families/rope.py": "checkpoints/families/decoders/test_llama.py",
    "checkpoints/families/windows.py": "checkpoints/families/decoders/test_gemma.py",
    "checkpoints/gguf_tokenizer.py": "checkpoints/test_gguf_config.py",
    "checkpoints/pip_models.py": "cli/commands/test_get.py",
    "cli/commands/tasks/answer.py": "cli/commands/tasks/test_search.py",
    "cli/commands/tasks/index.py": "cli/commands/tasks/test_search.py",
    "console.py": "cli/test_main.py",
    "data/batch.py": "data/test_stream.py",
    "data/tag_schemes.py": "tasks/extraction/test_entity_recognition.py",
    "decoding/template_worker.py": "decoding/test_chat.py",
    "encoding/fingerprints.py": "tasks/search/test_index.py",
    "encoding/text_reader.py": "encoding/test_encode.py",
    "encoding/text_scores.py": "decoding/test_guard.py",
    "encoding/word_reader.py": "tasks/extraction/test_entity_recognition.py",
    "errors.py": "train/run_file/test_run_config.py",
    "explain/walk_page.py": "cli/commands/test_explain.py",
    "kernels/contract.py": "kernels/test_choose.py",
    "kernels/varlen.py": "kernels/test_fused.py",
    "lens/attribution/frozen_reads.py": "lens/attribution/test_link_reasons.py",
    "lens/attribution/stream_parts.py": "lens/attribution/test_link_reasons.py",
    "lens/causal/gradient_importance.py": "lens/attribution/test_gradients.py",
    "lens/causal/path_patching.py": "lens/causal/test_patching.py",
    "lens/causal/replacements.py": "lens/causal/test_ablation.py",
    "lens/circuit_discovery/circuit_pairs.py": "lens/circuit_discovery/test_circuit.py",
    "lens/circuit_discovery/sublayers.py": "lens/circuit_discovery/test_pair_runs.py",
    "lens/faithful/adversarial.py": "lens/faithful/test_faithfulness_report.py",
    "lens/faithful/erasure.py": "lens/faithful/test_faithfulness_report.py",
    "lens/head_kinds/criteria.py": "lens/head_kinds/test_kinds.py",
    "lens/head_kinds/head_tests.py": "lens/head_kinds/test_kinds.py",
    "lens/head_kinds/image_attention.py": "lens/head_kinds/test_kinds.py",
    "lens/head_kinds/partners.py": "lens/head_kinds/test_kinds.py",
    "lens/head_kinds/word_targets.py": "lens/inputs/test_conllu.py",
    "lens/inputs/texts.py": "lens/inputs/test_cached_run.py",
    "lens/measure/score_tiles.py": "lens/measure/test_row_sums.py",
    "lens/probing/syntax.py": "lens/probing/test_linear.py",
    "lens/result_types.py": "lens/results/test_tables.py",
    "lens/results/files.py": "lens/results/test_tables.py",
    "lens/results/measure_names.py": "lens/measure/test_statistics.py",
    "lens/weights/composition.py": "lens/weights/test_circuits.py",
    "mixers/fourier.py": "mixers/test_mixers.py",
    "mixers/growing_cache.py": "mixers/test_mixers.py",
    "mixers/head_weights.py": "mixers/test_mixers.py",
    "mixers/linear_attention.py": "mixers/test_mixers.py",
    "mixers/memory/recent_keys.py": "mixers/test_mixers.py",
    "mixers/mixer.py": "mixers/test_mixers.py",
    "mixers/recurrent/gated_delta.py": "mixers/test_mixers.py",
    "mixers/recurrent/mamba2.py": "mixers/test_mixers.py",
    "mixers/sparse/big_bird.py": "mixers/test_mixers.py",
    "mixers/sparse/longformer.py": "mixers/test_mixers.py",
    "models/non_finite_weights.py": "checkpoints/test_damaged_folders.py",
    "models/provenance.py": "checkpoints/test_folder.py",
    "parts/halting.py": "models/test_shared_layers.py",
    "parts/head_groups.py": "test_attention.py",
    "parts/positions/disentangled.py": "checkpoints/families/encoders/test_deberta.py",
    "pictures/class_charts.py": "tasks/extraction/test_classification_scores.py",
    "pictures/head_charts.py": "pictures/test_shapes.py",
    "pictures/layer_maps.py": "pictures/test_shapes.py",
    "pictures/match_maps.py": "tasks/search/test_match_explanation.py",
    "studio/generation.py": "studio/test_queue.py",
    "studio/models.py": "studio/test_run_cache.py",
    "studio/requests.py": "studio/test_queue.py",
    "studio/server.py": "studio/test_security.py",
    "studio/views.py": "studio/test_handlers.py",
    "surgery/addresses.py": "surgery/selection/test_l0_selection.py",
    "lens/inputs/evaluation_inputs.py": "surgery/test_pruning.py",
    "lens/causal/head_importance.py": "report/test_data.py",
    "lens/corpus/pass_files.py": "lens/corpus/test_corpus_pass.py",
    "lens/corpus/pass_state.py": "lens/corpus/test_corpus_pass.py",
    "surgery/finetune/adapter_run.py": "cli/commands/test_train_adapters.py",
    "surgery/finetune/loop.py": "surgery/selection/test_heads.py",
    "surgery/lora/low_rank.py": "surgery/lora/test_peft_files.py",
    "surgery/lora/targets.py": "surgery/lora/test_adapters.py",
    "surgery/rebuild.py": "surgery/test_pruning.py",
    "surgery/selection/orders.py": "surgery/selection/test_heads.py",
    "tasks/extraction/labels.py": "tasks/extraction/test_classification_scores.py",
    "tasks/filtering/block_scoring.py": "tasks/filtering/test_corpus_filter.py",
    "tasks/filtering/corpus.py": "tasks/filtering/test_corpus_filter.py",
    "tasks/filtering/shards.py": "tasks/filtering/test_corpus_filter.py",
    "tasks/search/code_chunks.py": "tasks/search/test_chunking.py",
    "tasks/search/highlights.py": "tasks/search/test_match_explanation.py",
    "tasks/search/match_result.py": "tasks/search/test_match_explanation.py",
    "tasks/search/rank_fusion.py": "tasks/search/test_index.py",
    "tasks/search/residual_codes.py": "encoding/test_late_scores.py",
    "tasks/search/storage/index_manifest.py": "tasks/search/storage/test_index_writer.py",
    "tasks/search/storage/keyword_search.py": "tasks/search/storage/test_index_writer.py",
    "tasks/search/storage/vector_store.py": "tasks/search/test_index.py",
    "train/loop/manifest.py": "train/loop/test_checkpoint.py",
    "train/loop/phase_trainer.py": "train/loop/test_session.py",
    "train/loop/run_checks.py": "train/loop/test_checkpoint.py",
    "train/loop/train_step.py": "train/loop/test_session.py",
    "train/objectives/objective.py": "train/objectives/test_language_modeling.py",
    "train/objectives/text_similarity.py": "train/objectives/test_contrastive.py",
    "train/optim/param_groups.py": "train/optim/test_optimizers.py",
}


@cache
def modules() -> set[str]:
    """Every module; kernels in Triton are tested in tests/gpu."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" and not path.name.startswith("triton_")
    }


@cache
def files_with_tests() -> set[str]:
    files = (path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))
    return {file.as_posix() for file in files if file.parts[0] not in OWN_ROOMS}


def mirrored(file: str) -> str | None:
    """The module that a test file is named after, the longest that fits.

    >>> mirrored("tasks/search/storage/test_index_writer.py")
    'tasks/search/storage/index_writer.py'
    """
    folder, words = Path(file).parent, Path(file).stem.removeprefix("test_").split("_")
    names = [folder / f"{'_'.join(words[:count])}.py" for count in range(len(words), 0, -1)]
    return next((name.as_posix() for name in names if name.as_posix() in modules()), None)


def test_every_test_file_is_named_after_a_module_or_is_a_topic() -> None:
    unknown = {file for file in files_with_tests() if mirrored(file) is None}
    assert unknown == TOPICS


def test_every_module_has_its_tests() -> None:
    without = modules() - {mirrored(file) for file in files_with_tests()}
    assert without == THROUGH.keys()
    missing = [file for file in THROUGH.values() if not (TESTS / file).is_file()]
    assert not missing, f"no such test file: {missing}"
