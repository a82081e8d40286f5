"""Put models to work: search, find entities, classify and filter corpora; standard scores."""

from manyheads.encoding.late_scores import maxsim, maxsim_matrix
from manyheads.tasks.benchmarks.evaluation import (
    benchmark_data,
    evaluate,
    evaluate_heads,
    lm_eval_model,
)
from manyheads.tasks.benchmarks.lm_eval_tasks import DatasetNeed
from manyheads.tasks.extraction.calibration import (
    Calibration,
    calibrate,
    calibration_error,
    fit_temperature,
    fit_thresholds,
)
from manyheads.tasks.extraction.classification_scores import (
    ClassificationScores,
    ClassScore,
    score_classes,
)
from manyheads.tasks.extraction.entity_recognition import Entity, entities, entities_of_tags
from manyheads.tasks.extraction.span_scores import EntityScores, SpanScore, score_entities
from manyheads.tasks.filtering.block_scoring import FilterCounts
from manyheads.tasks.filtering.corpus_filter import FilterResult, filter_corpus
from manyheads.tasks.filtering.ray_engine import classify_with_ray, encode_with_ray
from manyheads.tasks.filtering.ray_lens import ablate_with_ray, statistics_with_ray
from manyheads.tasks.search.answering import Answer, Source, answer
from manyheads.tasks.search.documents import Document, read_documents
from manyheads.tasks.search.hard_negatives import mine_negatives, score_candidates
from manyheads.tasks.search.index import Hit, Index
from manyheads.tasks.search.match_explanation import explain_hit, explain_match
from manyheads.tasks.search.match_result import MatchExplanation, MatchSide, MatchWord
from manyheads.tasks.search.mteb_adapter import MtebEncoder
from manyheads.tasks.search.ranking_measures import (
    JudgedQuery,
    MeanScore,
    RetrievalScores,
    evaluate_retrieval,
    read_queries,
)
from manyheads.tasks.search.residual_codes import ResidualCodec, ResidualCodes, train_codec
from manyheads.tasks.search.storage.index_writer import IndexingReport

__all__ = [
    "Answer",
    "Calibration",
    "ClassScore",
    "ClassificationScores",
    "DatasetNeed",
    "Document",
    "Entity",
    "EntityScores",
    "FilterCounts",
    "FilterResult",
    "Hit",
    "Index",
    "IndexingReport",
    "JudgedQuery",
    "MatchExplanation",
    "MatchSide",
    "MatchWord",
    "MeanScore",
    "MtebEncoder",
    "ResidualCodec",
    "ResidualCodes",
    "RetrievalScores",
    "Source",
    "SpanScore",
    "ablate_with_ray",
    "answer",
    "benchmark_data",
    "calibrate",
    "calibration_error",
    "classify_with_ray",
    "encode_with_ray",
    "entities",
    "entities_of_tags",
    "evaluate",
    "evaluate_heads",
    "evaluate_retrieval",
    "explain_hit",
    "explain_match",
    "filter_corpus",
    "fit_temperature",
    "fit_thresholds",
    "lm_eval_model",
    "maxsim",
    "maxsim_matrix",
    "mine_negatives",
    "read_documents",
    "read_queries",
    "score_candidates",
    "score_classes",
    "score_entities",
    "statistics_with_ray",
    "train_codec",
]
