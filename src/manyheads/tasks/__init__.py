"""Put encoders to work: search documents, find entities, classify and filter corpora."""

from manyheads.argument_checks import checked_functions
from manyheads.tasks.search.match_explanation import explain_match
from manyheads.tasks.search.match_result import MatchExplanation, MatchSide, MatchWord
from manyheads.tasks.search.ranking_measures import (
    JudgedQuery,
    RetrievalScores,
    evaluate_retrieval,
    read_queries,
)

__all__ = [
    "JudgedQuery",
    "MatchExplanation",
    "MatchSide",
    "MatchWord",
    "RetrievalScores",
    "evaluate_retrieval",
    "explain_match",
    "read_queries",
]

# Every function refuses wrong arguments.
globals().update(checked_functions({name: globals()[name] for name in __all__}))
