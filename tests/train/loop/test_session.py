"""A whole run: what it learns, leaves and says; how it stops and goes on."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import build, load, save
from manyheads.errors import ConfigError, InputError, TrainingError
from manyheads.quantization import quantize_weights
from manyheads.train.loop import session
from manyheads.train.loop.manifest import write_manifest
from manyheads.train.loop.reporting import MetricsLog
from manyheads.train.loop.session import train
from manyheads.train.loop.train_step import Updater
from manyheads.train.objectives import CausalLM
from manyheads.train.run_file.run_config import Run, parse_run
from tests.compiled import keep_einops_whole
from tests.messages import refuses
from tests.train.tiny import tables, tiny, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


@pytest.fixture
def place(corpus: Path, tmp_path: Path) -> Path:
    """A folder with the corpus, as if it were its own."""
    for file in corpus.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


@pytest.fixture(params=[0, 1])
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many steps the host is ahead of its device: none as on the CPU, or one as on CUDA."""
    steps: int = request.param
    monkeypatch.setattr(session, "can_run_ahead", lambda _: steps > 0)
    return steps


def losses(folder: Path) -> dict[int, float]:
    lines = MetricsLog(folder / "out/metrics.jsonl").read()
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def steps_saved(folder: Path) -> set[str]:
    return {place.name for place in (folder / "out/checkpoints").iterdir()}


@pytest.mark.usefixtures("pace")
def test_a_run_learns_and_leaves_a_model_that_others_open(place: Path) -> None:
    from transformers import AutoModelForCausalLM

    settings = tables(place, steps=8, validate_every=4, telemetry_every=4)
    settings["data"]["validation"] = 0.1
    finished = train(parse_run(settings), progress=False)
    result = losses(place)
    assert list(result) == list(range(1, 9))
    assert result[8] < result[1] - 0.5
    assert str(finished.saved).endswith("as gpt2, which transformers can open")
    ours = load(place / "out/model")
    assert ours.tokenizer.get_vocab_size() == 300
    ids = torch.tensor([[5, 6, 7, 8]])
    peer = AutoModelForCausalLM.from_pretrained(place / "out/model").eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, peer(ids).logits, atol=1e-5, rtol=1e-5)
    lines = MetricsLog(place / "out/metrics.jsonl").read()
    held = [line["validation"] for line in lines if "validation" in line]
    assert len(held) == 2
    assert held[1]["loss"] < held[0]["loss"]
    assert set(held[0]) == {"loss", "perplexity", "bits_per_byte"}
    assert len(MetricsLog(place / "out/telemetry.jsonl").read()) == 2


def test_the_last_checkpoints_and_the_marked_ones_stay(place: Path) -> None:
    settings = tables(place, steps=9, checkpoint_every=2, keep=1, keep_every=4)
    settings["schedule"] = {"kind": "WarmupStableDecay", "decay": 4}
    train(parse_run(settings), progress=False)
    # 6 is the last at the full rate, 9 the end, 4 and 8 are asked for; 2 was in passing.
    assert steps_saved(place) == {"step-4", "step-6", "step-8", "step-9"}


def test_nothing_that_is_written_is_a_pickle(place: Path) -> None:
    train(tiny(place, steps=3), progress=False)
    files = {file.name for file in (place / "out").rglob("*") if file.is_file()}
    kinds = {Path(name).suffix for name in files}
    assert kinds <= {".safetensors", ".json", ".jsonl", ".bin", ""}, files
    for file in (place / "out").rglob("*.bin"):
        assert not file.read_bytes().startswith(b"\x80"), f"{file} begins as pickles do"


def test_an_interrupted_run_saves_and_can_be_resumed(
    pace: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Updater.begin

    def interrupted(self: Updater, settings: Any, **more: Any) -> Any:
        if settings.number == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, settings, **more)

    train(tiny(place), progress=False)
    whole = losses(place)
    (place / "out").rename(tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(Updater, "begin", interrupted)
        finished = train(tiny(place), progress=False)
    assert (finished.exit_code, finished.saved) == (130, None)
    # The fourth step is under way when the signal comes, so that the fifth is the first to say it.
    assert finished.state.step == 5 + pace
    assert f"step-{finished.state.step}" in steps_saved(place)
    again = train(tiny(place), progress=False)
    assert again.saved is not None
    assert losses(place) == whole


def test_a_checkpoint_with_keys_of_earlier_versions_is_resumed(place: Path, tmp_path: Path) -> None:
    train(tiny(place, steps=6), progress=False)
    whole = losses(place)
    (place / "out").rename(tmp_path / "whole")
    train(tiny(place, steps=3), progress=False)
    checkpoint = place / "out/checkpoints/step-3"
    state = json.loads((checkpoint / "state.json").read_text())
    state["run"]["optimiser"] = {"rate": state["run"].pop("optimizer")["lr"]}
    state["run"]["data"]["length"] = state["run"]["data"].pop("max_length")
    state["data"]["length"] = state["data"].pop("max_length")
    state["data"]["field"] = state["data"].pop("text_column")
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint)
    assert train(tiny(place, steps=6), progress=False).state.step == 6
    assert losses(place) == whole
    with refuses(ConfigError, "optimizer.lr changed"):
        settings = tables(place, steps=9)
        settings["optimizer"]["lr"] = 1e-3
        train(parse_run(settings), progress=False)


def spoiled(where: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loss of a step's micro-batch no number."""
    update, score = Updater.begin, CausalLM.score
    now: dict[str, int] = {}

    def begin(self: Updater, settings: Any, **more: Any) -> Any:
        now.update(step=settings.number, micro=0)
        return update(self, settings, **more)

    def spoil(self: CausalLM, *inputs: Any, **more: Any) -> Any:
        loss = score(self, *inputs, **more)
        micro = now["micro"]
        now["micro"] += 1
        return loss.plus({}) if where.get(now["step"]) != micro else _nothing(loss)

    monkeypatch.setattr(Updater, "begin", begin)
    monkeypatch.setattr(CausalLM, "score", spoil)


def _nothing(loss: Any) -> Any:
    return type(loss)(total=loss.total * float("nan"), targets=loss.targets)


@pytest.mark.usefixtures("pace")
def test_a_loss_that_is_no_number_is_skipped_counted_and_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoiled({2: 1, 5: 0}, monkeypatch)
    finished = train(tiny(place, steps=7))
    assert [str(each) for each in finished.state.skipped] == [
        "step 3 (micro-batch 1)",
        "step 6 (micro-batch 0)",
    ]
    assert (
        "loss or gradient not finite at step 3 (micro-batch 1): the step is skipped"
        in capsys.readouterr().err
    )
    lines = {line["step"]: line for line in MetricsLog(place / "out/metrics.jsonl").read()}
    assert (lines[3]["loss"], lines[3]["skipped"]) == (None, [1])
    assert lines[7]["loss"] is not None
    assert all(weight.isfinite().all() for weight in load(place / "out/model").parameters())


@pytest.mark.usefixtures("pace")
def test_three_in_a_row_end_the_run_with_a_good_checkpoint(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled({4: 0, 5: 1, 6: 0}, monkeypatch)
    message = (
        "loss or gradient not finite in 3 consecutive steps: step 5 "
        "(micro-batch 0), step 6 (micro-batch 1), "
        "step 7 (micro-batch 0): lower the learning rate, or check the data there, and resume with "
        "--from step-3"
    )
    # Step 4 may have damaged the weights that step 5 found.
    with refuses(TrainingError, message):
        train(tiny(place, checkpoint_every=1, keep=1), progress=False)
    state = json.loads((place / "out/checkpoints/step-6/state.json").read_text())
    assert state["consecutive_skips"] == 2
    assert steps_saved(place) == {"step-3", "step-6"}
    monkeypatch.undo()
    assert train(tiny(place), resume_from="step-3", progress=False).state.step == 8


def test_it_goes_on_from_before_the_decay_on_other_data(place: Path, tmp_path: Path) -> None:
    settings = tables(place, steps=8)
    settings["schedule"] = {"kind": "WarmupStableDecay", "decay": 4}
    train(parse_run(settings), progress=False)
    kept = place / "out/checkpoints/step-5"
    first = losses(place)
    (tmp_path / "other.txt").write_text("low sun was over a hill\n\n" * 60)
    settings["data"] |= {"train": str(tmp_path / "other.txt")}
    settings["run"]["folder"] = str(tmp_path / "other")
    finished = train(parse_run(settings), resume_from=str(kept), progress=False)
    lines = MetricsLog(tmp_path / "other/metrics.jsonl").read()
    assert [line["step"] for line in lines] == [6, 7, 8]
    assert (tmp_path / "other/checkpoints/step-5").is_dir(), "it could not go on after a kill"
    assert finished.state.step == 8
    assert lines[0]["loss"] != first[6]


def test_nothing_is_set_aside_for_a_start_that_cannot_be(place: Path) -> None:
    train(tiny(place, keep=3), progress=False)
    saved, written = steps_saved(place), losses(place)
    there = place / "out/checkpoints/step-3"
    settings = tables(place)
    settings["model"]["change"]["layers"] = 1
    message = (
        f"{there} has stack.layers.1.attention.output.bias, and the model has no such "
        "parameter: resume "
        "with the model and the regularizers that the run was started with."
    )
    with refuses(InputError, message):
        train(parse_run(settings), resume_from="step-3", progress=False)
    settings = tables(place)
    settings["optimizer"] = {"kind": "Muon"}
    message = (
        f"{there} has the optimizer state of AdamW, which Muon cannot use: use "
        'optimizer.kind="AdamW", or start a run with the saved model as model.folder.'
    )
    with refuses(InputError, message):
        train(parse_run(settings), resume_from="step-3", progress=False)
    assert (steps_saved(place), losses(place)) == (saved, written)
    assert not (place / "out/before-1").exists()


def test_integer_weights_are_refused_before_the_data_are_read(place: Path) -> None:
    model = build("gpt2", layers=1, width=64, heads=2, vocabulary=300, positions=32, seed=0).eval()
    quantize_weights(model, "int8")
    save(model, place / "rounded")
    settings = tables(place) | {"model": {"folder": str(place / "rounded")}}
    with refuses(
        ConfigError, "a model with int8 weights cannot be trained", "before it was rounded"
    ):
        train(parse_run(settings), progress=False)
    assert not (place / "out").exists()


def test_a_run_that_ends_before_its_checkpoint_is_refused(place: Path) -> None:
    train(tiny(place, steps=4), progress=False)
    newest = place / "out/checkpoints/step-4"
    message = (
        f"the run file ends at step 2 and {newest} is at step 4: "
        "set more steps, or start again with --fresh."
    )
    with refuses(ConfigError, message):
        train(tiny(place, steps=2), progress=False)


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_works(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fcntl")
    begin = Updater.begin
    met: list[Any] = []

    def another(self: Updater, settings: Any, **more: Any) -> Any:
        if not met:
            met.append(True)
            with refuses(
                InputError,
                f"another run is using {place / 'out'}: "
                "wait for it, stop it, or choose another run.folder.",
            ):
                train(tiny(place, steps=2), progress=False)
        return begin(self, settings, **more)

    monkeypatch.setattr(Updater, "begin", another)
    assert train(tiny(place, steps=2), progress=False).state.step == 2
    assert met
    assert train(tiny(place, steps=4), progress=False).state.step == 4, "the lock was left behind"


def test_what_is_in_the_way_of_an_earlier_start_is_set_aside(place: Path) -> None:
    train(tiny(place, keep=3), progress=False)
    whole = losses(place)
    train(tiny(place), resume_from="step-3", progress=False)
    assert losses(place) == whole
    aside = place / "out/before-1"
    assert {each.name for each in (aside / "checkpoints").iterdir()} == {"step-6", "step-8"}
    train(tiny(place, steps=2), fresh=True, progress=False)
    assert (place / "out/before-2/metrics.jsonl").exists()
    assert list(losses(place)) == [1, 2]
    assert steps_saved(place) == {"step-2"}


def test_a_run_file_that_asks_for_another_run_is_refused(place: Path) -> None:
    train(tiny(place, steps=2), progress=False)
    message = (
        "run.seed changed since this run was started (run.seed was None and is 5): "
        "change it back, resume from a checkpoint with --from step-2, or start again with --fresh."
    )
    with refuses(ConfigError, message):
        train(tiny(place, steps=4, seed=5), progress=False)
    settings = tables(place, steps=4)
    settings["model"]["change"]["layers"] = 1
    with pytest.raises(ConfigError, match=r"model\.change\.layers was 2 and is 1"):
        train(parse_run(settings), progress=False)
    assert train(tiny(place, steps=4), progress=False).state.step == 4


def test_a_run_made_longer_after_its_decay_warns_of_a_higher_learning_rate(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_of(steps: int) -> Run:
        decays = {"kind": "WarmupStableDecay", "decay": 4, "shape": "linear"}
        return parse_run({**tables(place, steps=steps), "schedule": decays})

    train(run_of(4))
    train(run_of(4))
    assert "its rate goes" not in capsys.readouterr().err
    train(run_of(6))
    said = capsys.readouterr().err
    assert "longer than before: at step 4 its learning rate rises from 0.0025 to 0.0075;" in said


def test_phases_follow_one_another_with_their_own_data_and_rotary_base(place: Path) -> None:
    settings = tables(place)
    del settings["run"]["steps"]
    change = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "head_size": 8}
    settings["model"] = {
        "size": "llama-1b-shape",
        "change": {**change, "hidden": 32, "vocabulary": 300, "theta": 1000.0},
    }
    settings["phase"] = [
        {"steps": 4},
        {
            "steps": 3,
            "rotary": 5000.0,
            "data": {"max_length": 32, "train": str(place / "other.txt")},
            "schedule": {"kind": "Decay"},
        },
    ]
    (place / "other.txt").write_text("low sun was over a hill\n\n" * 60)
    train(parse_run(settings), progress=False)
    lines = MetricsLog(place / "out/metrics.jsonl").read()
    assert [round(line["rate"], 5) for line in lines] == [0.01] * 5 + [0.00423, 0.00184]
    assert {"step-4", "step-7"} <= steps_saved(place)
    attention = load(place / "out/model").config.stack.layers[0].attention
    assert attention.inner.position.theta == 5000.0
    state = json.loads((place / "out/checkpoints/step-7/state.json").read_text())
    assert state["position"]["step"] == 3


def test_errors_of_a_later_phase_are_raised_before_the_first(place: Path) -> None:
    settings = tables(place)
    del settings["run"]["steps"]
    settings["phase"] = [{"steps": 4}, {"steps": 3, "rotary": 5000.0}]
    with refuses(ConfigError, "phase.rotary=5000", "no layer has rotary positions", "leave it out"):
        train(parse_run(settings), progress=False)
    (place / "rows.jsonl").write_text('{"content": "low sun"}\n')
    settings["phase"] = [{"steps": 4}, {"steps": 3, "data": {"train": str(place / "rows.jsonl")}}]
    message = f"{place / 'rows.jsonl'}, line 1 has no field 'text': use one of: content."
    with refuses(InputError, message):
        train(parse_run(settings), progress=False)
    assert not (place / "out").exists()
    (place / "rows.jsonl").write_text('{"text": "low sun"}\n{"text": 5}\n')
    with refuses(InputError, f"{place / 'rows.jsonl'}, line 2", "use a field of texts"):
        train(parse_run(settings), progress=False)
    (place / "short.txt").write_text("low sun")
    later = {"train": str(place / "short.txt"), "layout": "fixed"}
    settings["phase"] = [{"steps": 4}, {"steps": 3, "data": later}]
    with refuses(ConfigError, "fewer than length=16", "use more text"):
        train(parse_run(settings), progress=False)
    assert not (place / "out/checkpoints").exists()


@pytest.mark.parametrize("kind", ["AdamW", "StableAdamW", "Muon"])
def test_every_optimizer_goes_on_as_if_it_had_not_stopped(place: Path, kind: str) -> None:
    settings = tables(place, dropout=0.1, steps=2)
    # In half precision this CPU's products differ from call to call, stopped or not.
    single = {"precision": "single"} if kind == "Muon" else {}
    settings["optimizer"] = {"kind": kind, "lr": 1e-2, **single}
    settings["data"]["batch"] = 64
    train(parse_run(settings), progress=False)
    settings["run"]["steps"] = 4
    train(parse_run(settings), progress=False)
    stopped = losses(place)
    train(parse_run(settings), fresh=True, progress=False)
    assert losses(place) == stopped


def test_an_unknown_checkpoint_is_refused_with_a_list_of_existing_ones(place: Path) -> None:
    train(tiny(place, steps=2), progress=False)
    there = place / "out/checkpoints"
    with refuses(InputError, f"there is no checkpoint step-9: use one of {there}: step-2."):
        train(tiny(place), resume_from="step-9", progress=False)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.shapes_unchecked
def test_a_compiled_run_learns_what_another_does(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_einops_whole()
    settings = tables(place, steps=3)
    # Of one shape, so that it is traced once.
    settings["data"]["layout"] = "fixed"
    settings["model"]["change"]["layers"] = 1
    train(parse_run(settings), progress=False)
    expected = losses(place)
    compiled = []

    def traced(function: Any) -> Any:
        # All of the compiler but what only saves memory, and the making of machine code.
        compiled.append(function)
        return compile_(function, backend="aot_eager_default_partitioner")

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", traced)
    settings["run"]["compile"] = True
    train(parse_run(settings), fresh=True, progress=False)
    assert len(compiled) == 1
    assert losses(place) == pytest.approx(expected, abs=1e-4)


def test_a_run_writes_for_tensorboard_if_requested(place: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny(place, steps=3, tensorboard=True, telemetry_every=2), progress=False)
    board = EventAccumulator(str(place / "out/tensorboard")).Reload()
    expected = losses(place)
    assert {each.step: each.value for each in board.Scalars("loss")} == pytest.approx(expected)
    [heads] = MetricsLog(place / "out/telemetry.jsonl").read()
    for layer, head in ((0, 0), (1, 1)):
        [result] = board.Scalars(f"heads/entropy/L{layer}H{head}")
        assert (result.step, result.value) == (2, pytest.approx(heads["entropy"][layer][head]))
    assert board.Scalars("heads/largest_activation/L1")
    assert board.Scalars("heads/second_copy_loss")
