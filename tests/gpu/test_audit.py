"""The audit on a GPU: the sampling kernels that serve there, and the built-in models in graphs."""

from specdec.audit.laboratory import Settings, audit


def test_the_sampler_and_the_built_in_models():
    """Odds of a false alarm: 5e-5, of five chi-squares; their seeds are fixed."""
    report = audit(Settings(device="cuda", levels=(1, 2, 3), tokens=12))
    assert [c.status for c in report.checks] == ["pass"] * 12, report.to_json()
