"""Put encoders to work: search documents, find entities, classify and filter corpora."""

from manyheads.argument_checks import checked_functions
from manyheads.tasks.extraction.entity_recognition import Entity, entities, entities_of_tags
from manyheads.tasks.extraction.span_scores import EntityScores, SpanScore, score_entities
from manyheads.tasks.search.match_explanation import explain_match
from manyheads.tasks.search.match_result import MatchExplanation, MatchSide, MatchWord
from manyheads.tasks.search.ranking_measures import (
    JudgedQuery,
    RetrievalScores,
    evaluate_retrieval,
    read_queries,
)

__all__ = [
    "Entity",
    "EntityScores",
    "JudgedQuery",
    "MatchExplanation",
    "MatchSide",
    "MatchWord",
    "RetrievalScores",
    "SpanScore",
    "entities",
    "entities_of_tags",
    "evaluate_retrieval",
    "explain_match",
    "read_queries",
    "score_entities",
]

# Every function refuses wrong arguments.
globals().update(checked_functions({name: globals()[name] for name in __all__}))
