"""`lfm2-cb --trace`, `lfm2-cb plot`, and what a job shows of itself."""

import io
import json

import pytest
from helpers import demo_prompts

import lfm2_cb
from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.cli.main import main
from lfm2_cb.cli.progress import LiveView, Summary, make_progress

MODEL = lfm2_cb.demo_model_path()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": text} for text in demo_prompts(6)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_job_writes_a_trace_and_plot_draws_it(folder, capsys):
    matplotlib = pytest.importorskip("matplotlib.image")
    job = ["generate", MODEL, "--input", "in.jsonl", "--output", "out.jsonl", "--max-new-tokens", "6", "--quiet"]
    assert main([*job, "--trace", "t.json"]) == 0
    assert main(["plot", "t.json"]) == 0
    assert "drawn: t.png" in capsys.readouterr().err
    assert main(["plot", "t.json", "--output", "other.svg"]) == 0 and (folder / "other.svg").stat().st_size
    picture = matplotlib.imread(folder / "t.png")[..., :3]
    assert picture.shape[0] > 600 and picture.shape[1] > 900
    for colour in ((0xFF, 0x9D, 0x2E), (0x3B, 0x78, 0xC3), (0x2A, 0x9D, 0x5C)):  # prefill, decode, the cache
        near = abs(picture - [part / 255 for part in colour]).max(axis=-1) < 0.02
        assert near.sum() > 100
    assert main(["bench", MODEL, "--prompts", "2", "--max-new-tokens", "3", "--trace", "b.json"]) == 0
    assert main(["plot", "b.json"]) == 0


def test_legends_hide_nothing(folder, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    with ContinuousBatchingGenerator(MODEL) as generator, generator.trace("t.json"):
        generator.generate(demo_prompts(3), max_new_tokens=3, progress_bar=False)
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    assert main(["plot", "t.json"]) == 0
    legends = [(axes, axes.get_legend()) for axes in figures[0].axes if axes.get_legend()]
    assert len(legends) == 3
    for axes, legend in legends:
        assert legend.get_window_extent().y0 >= axes.get_window_extent().y1


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "No such file"),
        ("", "is not a trace"),
        ('{"a": 1}\n', "is not a trace"),
        ("[\n]\n", "has no steps"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(folder, capsys, content, message):
    if content is not None:
        (folder / "t.json").write_text(content)
    assert main(["plot", "t.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lfm2-cb: error: ") and message in line and not (folder / "t.png").exists()


def test_a_picture_of_an_unknown_kind_is_refused(folder, capsys):
    pytest.importorskip("matplotlib")
    with ContinuousBatchingGenerator(MODEL) as generator, generator.trace("t.json"):
        generator.generate(["It was"], max_new_tokens=2)
    assert main(["plot", "t.json", "--output", "t.gramophone"]) == 2
    assert "--output t.gramophone" in capsys.readouterr().err


def test_the_live_view_says_what_runs():
    console = pytest.importorskip("rich.console")
    said = io.StringIO()
    with ContinuousBatchingGenerator(MODEL) as generator:
        view = LiveView(generator.engine, num_rows=1000, num_done=400)
        submission = generator.enqueue([[5, 6, 7]] * 3, generator.resolve(None, {"max_new_tokens": 30}))
        while generator.loop.engine.scheduler.running == []:
            generator.loop.drive_once()
        view.update(Summary(num_rows=100, num_errors=2, num_output_tokens=12345))
        console.Console(file=said, width=120).print(view.render())
        generator.abandon([submission])
    text = said.getvalue()
    assert "500 of 1,000" in text and "2 errors" in text and " left" in text
    assert "3 running, 0 waiting" in text and "12,348 tokens" in text and "in use" in text


def test_the_time_left_counts_what_running_rows_have_done():
    pytest.importorskip("rich.console")
    with ContinuousBatchingGenerator(MODEL) as generator:
        view = LiveView(generator.engine, num_rows=8, num_done=2, start=100.0)
        assert view._time_left(110.0) == "time left unknown"
        options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
        submission = generator.enqueue([[5, 6, 7]] * 4, generator.resolve(None, options))
        running = generator.loop.engine.scheduler.running
        while not running or min(request.num_output_tokens for request in running) < 15:
            generator.loop.drive_once()
        assert len(running) == 4 and view._time_left(110.0) == "0:20 left"  # 2 of 6 rows' work in 10 s
        generator.abandon([submission])


def test_live_is_a_bar_where_there_is_no_terminal(folder, capsys):
    with ContinuousBatchingGenerator(MODEL) as generator:
        shown = make_progress(generator.engine, 10, 0, quiet=False, live=True)
    assert not isinstance(shown, LiveView)
    job = ["generate", MODEL, "--input", "in.jsonl", "--output", "out.jsonl", "--max-new-tokens", "3"]
    assert main([*job, "--live"]) == 0
