"""curves.png is drawn from what a run wrote, also when parts are missing."""

import pytest
from matplotlib.image import imread
from tests.telemetry.records import evaluation, run, step

from sao.telemetry import plot
from sao.telemetry.sinks import record


def test_curves_of_a_whole_run(tmp_path):
    plot.curves(run(60), tmp_path / "curves.png")
    image = imread(tmp_path / "curves.png")
    assert image.shape[0] > 600 and image.shape[1] > 1200 and image[..., :3].std() > 0.05


@pytest.mark.parametrize(
    "records",
    [
        [record("step", {"step": 1})],
        [step(1), evaluation(1, None)],
        [step(n, **{"logprob_gap/mean": 0.0, "critic/explained_variance": None}) for n in range(3)],
    ],
)
def test_curves_of_a_run_that_lacks_numbers(tmp_path, records):
    plot.curves(records, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="no step record"):
        plot.curves([evaluation(1, 0.5)], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
