"""The studio's questions about a wrapped model."""

from typing import Any

import torch
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from manyheads.bridge.wrapped_model import wrap
from manyheads.studio.security import Endpoint
from manyheads.studio.server import make_app
from tests.bridge.zoo import tiny

TEXT = "w5 w6 w7 w5 w6"


def test_every_question_about_a_wrapped_decoder_is_answered() -> None:
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(60)}, "w3"))
    tokenizer.pre_tokenizer = Whitespace()
    model = wrap(tiny("stablelm"), tokenizer)
    app = make_app([("theirs", model)], Endpoint(port=8765))
    with TestClient(app, base_url="http://127.0.0.1:8765") as client:

        def ask(name: str, **fields: Any) -> Any:
            body = {"model": "theirs", **({} if name == "kinds" else {"text": TEXT}), **fields}
            answer = client.post(f"/api/{name}", json=body)
            assert answer.status_code == 200, (name, answer.text)
            return answer

        described = client.get("/api/models").json()["models"][0]
        assert described["layers"] == [{"layer": layer, "heads": 4} for layer in range(2)]
        assert len(ask("tokens").json()["tokens"]) == 5
        ask("statistics")
        ask("kinds")
        ask("attention_map", heads=["L1H2"], rows=[0, 5], keys=[0, 5])
        ask("attention_from", heads=["L1H2"], position=3)
        part = ask("explain_layer", layer=1, head=2).json()["attention"]
        mixed = torch.tensor(part["weights"]) @ torch.tensor(part["value"])
        torch.testing.assert_close(mixed, torch.tensor(part["mixed"]), atol=1e-4, rtol=0.0)
        ask("explain_batch", text="w5 w6\nw7 w8 w9")
        plain = ask("predictions").json()
        edited = ask("predictions", edits={"ablated": ["L1H2"]}).json()
        assert plain != edited
        written = ask("generate", max_new_tokens=3, edits={"ablated": ["L0H1"]}).text
        assert "error" not in written
        assert '"measured": 8' in ask("worth").text
