"""The counters."""

from tritoncomm import record


def test_add_and_total() -> None:
    record.reset()
    started = record.now()
    record.add("f", "view", 0, 8, started)
    record.add("f", "torch", 16, 8, started)
    record.add("g", "torch", 4, 0, started, calls=0)
    counts = record.counters()
    assert set(counts) == {("f", "view"), ("f", "torch"), ("g", "torch")}
    assert (counts["f", "torch"].calls, counts["f", "torch"].packed, counts["f", "torch"].wire) == (1, 16, 8)
    both = record.total("f")
    assert (both.calls, both.packed, both.wire) == (2, 16, 16)
    assert both.seconds == 0.0
    assert counts["g", "torch"].calls == 0
    record.reset()
    assert record.counters() == {}
    assert record.total("f") == record.Count()


def test_counters_are_a_copy() -> None:
    record.reset()
    record.add("f", "view", 1, 1, record.now())
    record.counters()["f", "view"].calls = 99
    assert record.total("f").calls == 1


def test_recording_sees_only_its_block() -> None:
    record.reset()
    record.add("f", "view", 1, 2, record.now())
    record.add("old", "view", 1, 2, record.now())
    with record.recording() as inside:
        record.add("f", "view", 10, 20, record.now())
        record.add("new", "torch", 3, 4, record.now())
        assert inside == {}
    record.add("f", "view", 5, 5, record.now())
    assert set(inside) == {("f", "view"), ("new", "torch")}
    assert (inside["f", "view"].calls, inside["f", "view"].packed, inside["f", "view"].wire) == (1, 10, 20)


def test_recording_survives_an_error() -> None:
    record.reset()
    try:
        with record.recording() as inside:
            record.add("f", "view", 1, 1, record.now())
            raise KeyError
    except KeyError:
        pass
    assert inside["f", "view"].calls == 1


def test_time_is_taken_only_on_demand() -> None:
    record.reset()
    record.add("f", "view", 0, 0, record.now())
    assert record.total("f").seconds == 0.0
    record.timing(True)
    try:
        started = record.now()
        record.add("f", "view", 0, 0, started)
        assert started > 0
        assert record.total("f").seconds > 0
    finally:
        record.timing(False)
