"""The one estimate of the time left: recent steps, and pauses for validation and checkpoints."""

from cellmill.train.telemetry import TimeLeft


def test_the_time_left_is_that_of_recent_steps_and_of_pauses() -> None:
    left = TimeLeft(steps=1000, first=100, since=50.0)
    # the first step takes long, the ten windows after it 2 s a step
    assert left.line(101, 150.0) == {"left_s": 899 * 100.0}
    now = 150.0
    for step in range(111, 211, 10):
        now += 20.0
        line = left.line(step, now)
    assert line == {"left_s": 799 * 2.0}
    # a pause of 60 s after 101 steps of this process comes again as often, and is no part of the next steps
    left.pause(60.0)
    assert left.line(211, now + 62.0) == {"left_s": round(789 * (2.0 + 60 / 111), 1)}
    # steps that became four times slower are the pace once they are most of the last ten
    now += 62.0
    for step in range(212, 218):
        now += 8.0
        line = left.line(step, now)
    assert line == {"left_s": round(783 * (8.0 + 60 / 117), 1)}
    assert left.line(1000, now) == {"left_s": 0.0}
